"""`ablate` and `tune` with real trials, killed while one trains: nothing is left running, and nothing is repeated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from tests.waiting import wait_until

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
