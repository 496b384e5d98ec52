"""`ablate` and `tune` with real trials: searches that are killed, and trials that crash, hang or run out of memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from tests.waiting import wait_until

from flatout.insight.ablate import ablate
from flatout.insight.switches import Switch
from flatout.insight.trials import Measured, Trial, Trials

CONFIG = """recipe: pretrain
model: {layers: 2, hidden: 64, heads: 2}
data: {source: embedded, embedded_mb: 1, tokenizer: byte, sequence_length: 64}
train: {batch_tokens: 2048, steps: 100, lr: 1.0e-3}
"""
# On a GPU the next process imports torch while the present one trains; here on any machine.
SEARCH = """
from flatout.insight import trials

class Ahead(trials.Trials):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.ahead = True

trials.Trials = Ahead
from flatout.cli import main
main()
"""
WORDS = {
    "ablate": ["--only", "data loader", "--blocks", "2", "--table", "without"],
    "tune": ["--trials", "3"],
}
MIB = 1 << 20


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.long
@pytest.mark.parametrize("verb", WORDS)
def test_killed_with_real_trials(verb: str, tmp_path: Path) -> None:
    config, folder = tmp_path / "job.yaml", tmp_path / "search"
    config.write_text(CONFIG)
    command = [sys.executable, "-c", SEARCH, verb, str(config), *WORDS[verb], "--run", str(folder)]
    before = used_bytes() if torch.cuda.is_available() else 0
    search = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def finished() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in (folder / "trials").glob("*.json")}

    wait_until(lambda: len(finished()) >= 2 and any(folder.glob("trial-*/run/steps.jsonl")), process=search)
    if before:
        wait_until(lambda: used_bytes() > before + 100 * MIB, process=search)
    below = psutil.Process(search.pid).children(recursive=True)
    assert len(below) >= 4, "a supervisor and its trial, and another pair that imports"
    search.kill()
    search.wait()
    wait_until(lambda: not any(map(runs, below)))
    if before:
        wait_until(lambda: used_bytes() <= before + MIB)
    kept = finished()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = finished()
    assert {file: after[file] for file in kept} == kept, "a finished trial was repeated"
    assert len(after) > len(kept)
    assert not list(folder.glob("trial-*")), "what the killed trial left is gone"


# A signal to the trial itself, once it has taken a step.
AFTER_A_STEP = """
import os, signal, sys, threading, time
def wait(file):
    while not (os.path.exists(file) and os.path.getsize(file)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.{name})
threading.Thread(target=wait, args=(os.path.join(sys.argv[-1], "steps.jsonl"),), daemon=True).start()
"""
# Room for the model, but not for the activations of all 1,024 sequences at a time.
LITTLE_ROOM = """
import resource, torch
if torch.cuda.is_available():
    taken = torch.empty(torch.cuda.mem_get_info()[0] - (500 << 20), dtype=torch.uint8, device="cuda")
else:
    with open("/proc/self/status") as file:
        kib = next(int(line.split()[1]) for line in file if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, ((kib << 10) + (500 << 20),) * 2)
"""
FAILING = {"crash": AFTER_A_STEP.format(name="SIGSEGV"), "hang": AFTER_A_STEP.format(name="SIGSTOP")}
FAILING |= {"out of memory": LITTLE_ROOM, "nothing": "pass"}


@pytest.mark.long
def test_real_trials_that_fail_are_rows_and_the_rest_goes_on(tmp_path: Path) -> None:
    class Impatient(Trials):
        """Waits briefly for the trial that hangs, and long for the others, however busy the machine is."""

        def run(self, trial: Trial, *, name: str, again: bool = False) -> Measured:
            self.limit_s = 20.0 if "SIGSTOP" in trial.code else 600.0
            return super().run(trial, name=name, again=again)

    config = tmp_path / "job.yaml"
    config.write_text(
        CONFIG.replace("2048", "65536") + "plan: {micro_batch: 1024, precision: fp32, recompute: none, threads: 1}\n"
    )
    others = set(psutil.Process().children(recursive=True))
    switches = [Switch(name=name, task="", claim="", code=code) for name, code in FAILING.items()]
    trials = Impatient(config, [], folder=tmp_path / "search", steps=2)
    found = ablate(trials, blocks=2, switches=switches, tables=("alone",))
    trials.close()
    rows = {row.name.removeprefix("+ "): row for row in found.rows}
    assert str(rows["crash"].problem).startswith("killed by signal 11 (Segmentation fault)")
    assert rows["hang"].problem == "it did not end within 20 s and was stopped"
    assert str(rows["out of memory"].problem).startswith("out of memory")
    assert [rows[name].problem for name in ("before", "full plan", "nothing")] == [None] * 3
    assert rows["nothing"].blocks == 2
    assert set(psutil.Process().children(recursive=True)) <= others
