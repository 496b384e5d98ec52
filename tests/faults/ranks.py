"""Faults of whole jobs, many times over: kills at any moment, preemptions, dead ranks and actors, hangs, full disks.

    python -m tests.faults.ranks FAULT [--times N] [--seed N]

Each trial begins a small job in a fresh folder and lets the fault come at a random step. Prints a line for each trial
that ends otherwise than it must, then a count, and the longest time that a recovery or a detection took.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from tests.recipes.conftest import CONFIG
from tests.recipes.recipes_processes import events, trajectory, wait_for_step
from tests.recipes.test_ranks_end import STUCK, two
from tests.test_launch import launched
from tests.waiting import wait_until
from tests.warm import Started

from flatout.engine.checkpoint import Checkpoints
from flatout.record import Run

HANG_S = 10
LATE_S = 300.0  # only a hang takes this long
Trial = Callable[[Path, random.Random], float | None]  # seconds to recover or to detect, where that is asked


class Failed(Exception):
    """What went otherwise than it must."""


def check(true: object, otherwise: str) -> None:
    if not true:
        raise Failed(otherwise)


# -- jobs


def config_in(folder: Path) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def started(*arguments: object, world: int, cwd: Path) -> list[Started]:
    return two(*arguments, cwd=cwd) if world == 2 else [Started(*arguments, cwd=cwd)]


def all_end_well(processes: list[Started]) -> None:
    said = [process.communicate()[1] for process in processes]
    codes = [process.wait() for process in processes]
    check(not any(codes), f"exit codes {codes}: {said[0][-500:]}")


def outcome(run: Path) -> tuple[Any, str]:
    """Losses, gradient norms and learning rates of every step, and a hash of the newest weights."""
    newest = max((run / "checkpoints").glob("step-*"))
    digest = hashlib.sha256()
    for file in sorted(newest.glob("weights-*")):
        digest.update(file.read_bytes())
    return trajectory(run), digest.hexdigest()


@functools.cache
def undisturbed(world: int, settings: tuple[str, ...]) -> tuple[Any, str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        all_end_well(started("train", config_in(folder), *settings, "--run", folder / "run", world=world, cwd=folder))
        return outcome(folder / "run")


def ranks_of(run: Path) -> dict[str, psutil.Process]:
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = process.cmdline()
            if f"run={run}" in line and "RANK" in process.environ() and "torch.distributed.run" not in line:
                found[process.environ()["RANK"]] = process
    return found


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes if psutil.pid_exists(p.pid))


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever a trial leaves, nothing of it runs on."""
    try:
        yield
    finally:
        with suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()


# -- trials


def killed(folder: Path, chance: random.Random) -> None:
    """SIGKILL to all ranks, during saves too: it resumes by the same command and ends bit-equal."""
    world, every = chance.choice([1, 2]), 2
    in_background = chance.choice([True, False])
    sharding = chance.choice(["none", "full"]) if world == 2 else "none"
    settings = ("train.steps=24", f"save.every={every}", "eval.every=null", f"plan.sharding={sharding}")
    run = folder / "run"
    arguments = ("train", config_in(folder), *settings, f"save.asynchronous={str(in_background).lower()}", "--run", run)
    processes = started(*arguments, world=world, cwd=folder)
    wait_for_step(run, chance.randrange(1, 20), processes[0])
    time.sleep(chance.random() * 0.03)
    for process in chance.sample(processes, len(processes)):
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
    codes = [process.wait() for process in processes]
    check(-signal.SIGKILL in codes, f"the run was over before the kill: {codes}")
    reached = max(record.step for record in Run.open(run).steps()) + 1
    checkpoints = run / "checkpoints"
    if any(path for path in checkpoints.glob("step-*") if ".tmp-" not in path.name):
        found, problems = Checkpoints(checkpoints, identity=None, keep=2, run=Run.open(run).id).latest()
        check(found is not None and not problems, f"the newest checkpoint is not whole: {problems}")
    all_end_well(started(*arguments, "--resume", world=world, cwd=folder))
    resumed = [event["step"] for event in events(run, "resume")]
    lost = reached - (int(str(resumed[0])) if resumed else 0)
    check(lost <= every * (2 if in_background else 1), f"{lost} steps were lost")
    check(outcome(run) == undisturbed(world, settings), "it ended otherwise than the undisturbed run")
    check(not list(checkpoints.glob("*.tmp*")), "temporary files are left")


SMALL_DISK = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x20000) == 0 and libc.mount(b"none", b"/", None, 0x44000, None) == 0
from flatout.cli import main
main()
"""


def full(folder: Path, chance: random.Random) -> None:
    """A disk with room for one and a half checkpoints: training goes on, and saves again when there is room."""
    run = folder / "run"
    checkpoints, steps = run / "checkpoints", chance.randrange(3, 9)
    arguments = ("train", config_in(folder), "train.steps=1000000", f"save.every={steps}", "eval.every=null")
    size = checkpoint_bytes() * 3 // 2
    process = Started(*arguments, "--run", run, cwd=folder, script=SMALL_DISK)
    inside = ["nsenter", "-t", str(process.pid), "-m"]
    try:
        wait_until(lambda: (run / "config.yaml").exists(), process=process)
        subprocess.run([*inside, "mkdir", "-p", checkpoints], check=True)
        subprocess.run([*inside, "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", checkpoints], check=True)
        wait_until(lambda: len(events(run, "save-failed")) >= 2, process=process)
        failed_at = max(int(str(event["step"])) for event in events(run, "save-failed"))
        listed = subprocess.run([*inside, "ls", checkpoints], capture_output=True, text=True, check=True).stdout.split()
        whole = [name for name in listed if name.startswith("step-") and ".tmp-" not in name]
        check(whole, f"no checkpoint is left: {listed}")
        subprocess.run([*inside, "mount", "-o", "remount,size=64m", checkpoints], check=True)
        wait_until(lambda: any(int(str(e["step"])) > failed_at for e in events(run, "save")), process=process)
        process.send_signal(signal.SIGTERM)
        check(process.wait() == 75, "it did not end with 75")
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)


@functools.cache
def checkpoint_bytes() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        all_end_well([Started("train", config_in(folder), "--run", folder / "run", cwd=folder)])
        newest = max((folder / "run" / "checkpoints").glob("step-*"))
        return sum(file.stat().st_size for file in newest.iterdir())


def preempted(folder: Path, chance: random.Random) -> float:
    """A signal to the launcher, or two, the second one during the save: one step is saved, and it resumes exactly."""
    run = folder / "run"
    settings = ("train.steps=300", "eval.every=null", "plan.sharding=none")
    process = launched(config_in(folder), *settings, "--ranks", 2, "--run", run, cwd=folder)
    with ended(process):
        wait_for_step(run, chance.randrange(2, 100), process)
        number, began = chance.choice([signal.SIGTERM, signal.SIGUSR1]), time.monotonic()
        process.send_signal(number)
        if chance.random() < 0.5:
            time.sleep(chance.random() * 0.2)
            with suppress(ProcessLookupError):
                process.send_signal(number)
        code, seconds = process.wait(LATE_S), time.monotonic() - began
        check(code == 75, f"exit {code}: {(folder / 'said').read_text()[-500:]}")
    (end,) = events(run, "end")
    saved = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    check(saved and saved[-1] == end["step"], f"it stopped at {end['step']} and saved {saved}")
    all_end_well(started("train", folder / "job.yaml", *settings, "--run", run, "--resume", world=2, cwd=folder))
    check(outcome(run) == undisturbed(2, settings), "it ended otherwise than the undisturbed run")
    return seconds


def dead(folder: Path, chance: random.Random, *, on: tuple[str, ...] = (), actor: bool = False) -> float:
    """SIGKILL to a rank, or to the Ray actor that it runs in: training goes on from a checkpoint."""
    run, every = folder / "run", 5
    where = on or chance.choice([(), ("--on", "torchrun")])
    settings = ("train.steps=1000000", f"save.every={every}", "eval.every=null")
    process = launched(config_in(folder), *settings, *where, "--ranks", 2, "--run", run, cwd=folder)
    with ended(process):
        wait_for_step(run, chance.randrange(6, 60), process)
        ranks, which = ranks_of(run), chance.choice(["0", "1"])
        check(sorted(ranks) == ["0", "1"], f"ranks {sorted(ranks)}")
        victim = ranks[which].parent() if actor and chance.random() < 0.5 else ranks[which]
        assert victim is not None
        victim.kill()
        began = time.monotonic()
        wait_until(lambda: events(run, "resume"), process=process)
        at = int(str(events(run, "resume")[0]["step"]))
        wait_until(lambda: any(record.attempt > 1 for record in Run.open(run).steps()), process=process)
        seconds = time.monotonic() - began
        check(gone(list(ranks.values())), "an old rank still runs")
        reached = max(record.step for record in Run.open(run).steps() if record.attempt == 1) + 1
        check(0 <= reached - at <= 2 * every, f"{reached - at} steps were lost")
        if "torchrun" not in where:
            said = (folder / "said").read_text()
            check(f"rank {which} was killed by SIGKILL first\nrestart 1 of 3" in said, f"said {said[-300:]}")
        process.send_signal(signal.SIGTERM)
        code = process.wait(LATE_S)
        check(code == 75, f"exit {code}: {(folder / 'said').read_text()[-500:]}")
    wait_until(lambda: not ranks_of(run))
    return seconds


def stopped(folder: Path, chance: random.Random) -> float:
    """SIGSTOP to a rank: the other one names it, and leaves its stack."""
    run, which = folder / "run", chance.choice([0, 1])
    arguments = ("train", config_in(folder), "train.steps=1000000", f"train.hang_s={HANG_S}", "eval.every=null")
    ranks = two(*arguments, "--run", run, cwd=folder)
    try:
        wait_for_step(run, chance.randrange(2, 60), ranks[0])
        ranks[which].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        _, said = ranks[1 - which].communicate()
        seconds = time.monotonic() - began
        check(ranks[1 - which].returncode == 4, f"exit {ranks[1 - which].returncode}: {said[-300:]}")
        check(f"rank {which} has not answered" in said, f"said {said[-300:]}")
        check((run / f"stacks-rank0000{1 - which}.txt").exists(), "no stack was written")
        check("Traceback" not in said, "a traceback")
        return seconds
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                rank.send_signal(signal.SIGKILL)
        for rank in ranks:
            rank.wait()


def stuck(folder: Path, chance: random.Random) -> None:
    """A loader that never returns on one rank: both end, and the rank and its phase are named."""
    run, which = folder / "run", chance.choice([0, 1])
    arguments = ("train", config_in(folder), "train.steps=1000000", f"train.hang_s={HANG_S}", "eval.every=null")
    script = STUCK.format(rank=which)
    ranks = two(*arguments, "--run", run, cwd=folder, script=script)
    said = [rank.communicate()[1] for rank in ranks]
    check([rank.returncode for rank in ranks] == [4, 4], f"exit codes {[rank.returncode for rank in ranks]}")
    named = sum(f"rank {which} is stuck in phase data of step 4" in text for text in said)
    check(named == 1, f"said {said[0][-200:]} | {said[1][-200:]}")
    check(all((run / f"stacks-rank0000{rank}.txt").exists() for rank in (0, 1)), "a stack is missing")


def endless(folder: Path, chance: random.Random) -> None:
    """A reward that never returns for half the questions: they count as timed out, or the reward is named as broken."""
    (folder / "rewards.py").write_text(
        "def graded(question, answer, completion):\n"
        f"    while int(question[:-1]) % 2 == {chance.randrange(2)}:\n        pass\n    return len(completion) % 2\n"
    )
    rows = "".join(json.dumps({"question": f"{i}?", "answer": str(i % 10)}) + "\n" for i in range(40))
    (folder / "rows.jsonl").write_text(rows)
    config = {
        "recipe": "rl",
        "model": {"layers": 1, "hidden": 16, "heads": 2},
        "data": {"sequence_length": 128},
        "rl": {"tasks": [f"jsonl:{folder / 'rows.jsonl'}?reward=rewards:graded"], "prompts": 4, "samples": 2},
        "sample": {"max_tokens": 8},
        "train": {"steps": 2, "lr": 1e-3},
        "plan": {"precision": "fp32", "threads": 1},
    }
    (folder / "rl.yaml").write_text(yaml.safe_dump(config))
    run = folder / "run"
    process = Started("train", folder / "rl.yaml", "--run", run, cwd=folder, environment={"PYTHONPATH": str(folder)})
    seen = set[psutil.Process]()

    def over() -> bool:
        with suppress(psutil.Error):
            seen.update(psutil.Process(process.pid).children(recursive=True))
        return process.poll() is not None

    wait_until(over)
    _, said = process.communicate()
    named = process.returncode == 4 and "rewards:graded does not work" in said
    check(process.returncode == 0 or named, f"exit {process.returncode}: {said[-500:]}")
    check(len(seen) > 2, f"no grader was ended: {len(seen)} seen, of two that start")
    wait_until(lambda: gone(list(seen)))


SLOW = """
import time
from flatout.cli import main
from flatout.engine.step import Engine
plain = Engine.step
def step(self, step, batches):
    time.sleep({slow} if step % 20 == 19 else {usual})
    plain(self, step, batches)
Engine.step = step
main()
"""


def healthy(folder: Path, chance: random.Random) -> None:
    """A minute in which every twentieth step takes three times as long as the others: no alarm."""
    usual = 0.5
    arguments = ("train", config_in(folder), "train.steps=100", f"train.hang_s={HANG_S}", "eval.every=null")
    script = SLOW.format(usual=usual, slow=3 * usual)
    all_end_well(two(*arguments, "--run", folder / "run", cwd=folder, script=script))
    check(not events(folder / "run", "hang"), "a false alarm")


TRIALS: dict[str, tuple[Trial, int]] = {
    "killed": (killed, 200),
    "full": (full, 20),
    "preempted": (preempted, 50),
    "dead": (dead, 20),
    "dead-actor": (functools.partial(dead, on=("--on", "ray", "--cpus", "1"), actor=True), 20),
    "stopped": (stopped, 20),
    "stuck": (stuck, 20),
    "endless": (endless, 20),
    "healthy": (healthy, 10),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", choices=TRIALS)
    parser.add_argument("--times", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    trial, usual = TRIALS[options.fault]
    times, failures, seconds = options.times or usual, 0, list[float]()
    for number in range(times):
        with tempfile.TemporaryDirectory(prefix="flatout-fault-") as name:
            try:
                taken = trial(Path(name), random.Random(f"{options.fault} {options.seed} {number}"))
                seconds += [] if taken is None else [taken]
            except (Failed, AssertionError, ValueError, psutil.Error, subprocess.SubprocessError) as error:
                failures += 1
                print(f"{options.fault} {number}: {str(error)[:1000]}", flush=True)
    longest = f", {max(seconds):.1f} s at most" if seconds else ""
    print(f"{options.fault}: {times} trials, {failures} ended otherwise than they must{longest}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
