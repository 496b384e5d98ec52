"""Faults of a run with two ranks: a stopped rank, a dead rank, a dead launcher; and updates that are not finite."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.recipes import test_rft
from tests.recipes.recipes_processes import events, trajectory, wait_for_step
from tests.waiting import wait_until
from tests.warm import Started

from flatout.engine.watchdog import Beat, Watch, blamed
from flatout.record import Run

Call = Callable[..., subprocess.CompletedProcess[str]]


def beat(*, count: int = 1, moves: int = 0, step: int = 0, phase: str = "data", waits: bool = False) -> Beat:
    return Beat(count=count, moves=moves, step=step, phase=phase, waits=waits)


def test_the_rank_that_waits_for_nobody_is_to_blame() -> None:
    assert blamed({0: beat(moves=4, waits=True), 1: beat(moves=4), 2: beat(moves=3, waits=True)}) == 1
    assert blamed({0: beat(moves=4), 1: beat(moves=3)}) == 1
    assert blamed({0: beat(step=3, moves=9, waits=True), 1: beat(step=3, moves=8, waits=True)}) == 1


def test_a_rank_is_silent_when_its_report_does_not_change() -> None:
    watch = Watch(world=2, silent_s=10.0, now=0.0)
    for second in range(1, 10):
        assert watch.see({0: beat(count=second), 1: beat(count=second)}, now=float(second)) is None
    for second in range(10, 20):
        assert watch.see({0: beat(count=second), 1: beat(count=9)}, now=float(second)) is None
    assert watch.see({0: beat(count=20), 1: beat(count=9)}, now=19.5) == 1


def test_a_pause_of_this_process_counts_for_nobody() -> None:
    watch = Watch(world=2, silent_s=10.0, now=0.0)
    assert watch.see({0: beat(count=1), 1: beat(count=1)}, now=1.0) is None
    assert watch.see({0: beat(count=2), 1: beat(count=1)}, now=500.0) is None
    assert watch.see({0: beat(count=3), 1: beat(count=1)}, now=504.0) is None


@pytest.fixture
def left() -> Iterator[list[int]]:
    """Processes that a failed test must not leave behind."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def two(*arguments: object, cwd: Path, script: str | None = None) -> list[Started]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        Started(*arguments, cwd=cwd, script=script, environment=shared | {"RANK": r, "LOCAL_RANK": r})
        for r in ("0", "1")
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_a_stopped_rank_is_named(which: int, config: Path, tmp_path: Path, left: list[int]) -> None:
    """The first rank too, which holds the store that the ranks report to."""
    run, other = tmp_path / "run", 1 - which
    ranks = two("train", config, "train.steps=1000000", "train.hang_s=4", "--run", run, cwd=tmp_path)
    left += [rank.pid for rank in ranks]
    wait_for_step(run, 3, ranks[0])
    ranks[which].send_signal(signal.SIGSTOP)
    _, said = ranks[other].communicate()
    assert ranks[other].returncode == 4
    assert f"rank {which} has not answered for 4 s" in said
    assert "Traceback" not in said
    (hung,) = events(run, "hang")
    assert hung["rank"] == which
    assert hung["silent"] is True
    assert "all_reduce" in (run / f"stacks-rank0000{other}.txt").read_text()
    ranks[which].send_signal(signal.SIGKILL)
    ranks[which].wait()


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_is_stopped_while_it_samples_is_named(which: int, tmp_path: Path, left: list[int]) -> None:
    """Between two trainings, when nothing else watches."""
    values, run = test_rft.config(tmp_path), tmp_path / "run"
    values["rft"] |= {"teach_steps": 2, "oversample": 60_000, "adaptive": False, "first": 2}
    values["train"]["hang_s"] = 4
    file = test_rft.write(tmp_path / "rft.yaml", values)
    ranks = two("sample", file, "--run", run, cwd=tmp_path)
    left += [rank.pid for rank in ranks]
    wait_until(lambda: Run.is_at(run) and events(run, "sample"), process=ranks[0])
    ranks[which].send_signal(signal.SIGSTOP)
    _, said = ranks[1 - which].communicate()
    assert ranks[1 - which].returncode == 4
    assert f"rank {which} has not answered for 6 s" in said
    assert "Traceback" not in said
    ranks[which].send_signal(signal.SIGKILL)
    ranks[which].wait()


STUCK = """
import time
from flatout.cli import main
from flatout.recipes.batches import StreamBatches
import os
plain = StreamBatches.next
def next(self, step):
    if step == 4 and os.environ.get("RANK", "0") == "{rank}":
        time.sleep(600)
    return plain(self, step)
StreamBatches.next = next
main()
"""


def test_a_rank_that_never_gets_its_data_is_named(config: Path, tmp_path: Path, left: list[int]) -> None:
    arguments = ("train", config, "train.steps=1000000", "train.hang_s=6", "--run", tmp_path / "run")
    ranks = two(*arguments, cwd=tmp_path, script=STUCK.format(rank=1))
    left += [rank.pid for rank in ranks]
    said = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [4, 4]
    assert sum("rank 1 is stuck in phase data of step 4" in text for text in said) == 1, said
    assert events(tmp_path / "run", "hang")[0]["rank"] == 1
    assert (
        "time.sleep" in (tmp_path / "run/stacks-rank00001.txt").read_text()
        or "next" in (tmp_path / "run/stacks-rank00001.txt").read_text()
    )


def test_one_process_that_hangs_ends_too(config: Path, tmp_path: Path) -> None:
    arguments = ("train", config, "train.hang_s=4", "--run", tmp_path / "run")
    alone = Started(*arguments, cwd=tmp_path, script=STUCK.format(rank=0))
    _, said = alone.communicate()
    assert alone.returncode == 4
    assert "no progress" in said
    assert "phase data of step 4" in said


# -- torchrun


def torchrun(*arguments: object, cwd: Path, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *options),
        *("-m", "flatout", "train", *map(str, arguments)),
    ]
    with (cwd / "said").open("w") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, text=True, cwd=cwd)


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found = psutil.Process(process.pid).children(recursive=True)
    return sorted((p for p in found if "flatout" in " ".join(p.cmdline())), key=lambda p: p.environ()["RANK"])


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGUSR1, marks=pytest.mark.faults)])
def test_a_dead_launcher_leaves_no_orphan(
    number: signal.Signals, config: Path, tmp_path: Path, left: list[int]
) -> None:
    run = tmp_path / "run"
    launcher = torchrun(config, "train.steps=1000000", f"run={run}", cwd=tmp_path)
    left.append(launcher.pid)
    wait_for_step(run, 3, launcher)
    ranks = ranks_of(launcher)
    left += [rank.pid for rank in ranks]
    assert len(ranks) == 2
    launcher.send_signal(number)
    launcher.wait()
    wait_until(lambda: not any(psutil.pid_exists(rank.pid) for rank in ranks))
    (ended,) = events(run, "end")
    stopped = ended["step"]
    assert [int(p.name[5:]) for p in (run / "checkpoints").glob("step-*")] == [stopped], "it saved, as when preempted"


@pytest.mark.faults
def test_torchrun_restarts_and_the_run_goes_on(config: Path, tmp_path: Path, left: list[int]) -> None:
    """Without --run: the restarted ranks find the folder of the first attempt."""
    launcher = torchrun(
        config, "train.steps=2000", "save.every=5", "eval.every=null", cwd=tmp_path, options=("--max-restarts", "1")
    )
    left.append(launcher.pid)
    wait_until(lambda: list((tmp_path / "runs").glob("tiny-*/config.yaml")), process=launcher)
    (run,) = (tmp_path / "runs").glob("tiny-*")
    wait_for_step(run, 12, launcher)
    killed = ranks_of(launcher)
    left += [rank.pid for rank in killed]
    killed[1].kill()
    wait_until(lambda: events(run, "resume") or launcher.poll() is not None)
    assert launcher.poll() is None, (tmp_path / "said").read_text()[-6000:]
    (resumed,) = events(run, "resume")
    assert resumed["step"] % 5 == 0
    assert resumed["step"] > 0
    launcher.terminate()
    launcher.wait()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in left[1:]))
    steps = [step for step, *_ in trajectory(run)]
    assert steps == list(range(len(steps)))
    assert "lost the connection to another rank" in (tmp_path / "said").read_text()


def test_a_restart_does_not_touch_the_run_of_another_job(flatout: Call, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert flatout("train", config, "--run", run).returncode == 0
    environment = {"FLATOUT_JOB": "other", "FLATOUT_RESTARTS": "1"}
    again = Started("train", config, "--run", run, cwd=tmp_path, environment=environment)
    _, said = again.communicate()
    assert again.returncode == 2
    assert "already holds a run" in said


# -- updates that are not finite

POISONED = """
import torch
from flatout.cli import main
from flatout.engine.step import Engine
plain = Engine._update
def update(self, gradients, loss, lr):
    if self.phases.step in {steps}:
        gradients[0].view(-1)[0] = float("nan")
    return plain(self, gradients, loss, lr)
Engine._update = update
main()
"""


def poisoned(steps: range | list[int], *arguments: object, cwd: Path) -> tuple[int, str]:
    started = Started("train", *arguments, cwd=cwd, script=POISONED.format(steps=list(steps)))
    _, said = started.communicate()
    return started.wait(), said


def test_three_bad_updates_take_the_run_back(config: Path, tmp_path: Path, flatout: Call) -> None:
    run = tmp_path / "run"
    settings = (config, "train.steps=20", "save.every=4", "save.keep=9", "eval.every=null", "--run", run)
    code, said = poisoned(range(9, 12), *settings, cwd=tmp_path)
    assert code == 0, said
    (back,) = events(run, "rollback")
    assert back["checkpoint"] == "step-00000008", "the one of step 12 came after the first bad update"
    assert len(events(run, "skipped")) == 3
    assert [step for step, *_ in trajectory(run)] == list(range(20))
    # Resumed where it went back, the run comes to the same end: it does not return to the bad data.
    gone = [path for path in (run / "checkpoints").glob("step-*") if int(path.name[5:]) > back["step"]]
    expected = trajectory(run)
    for path in gone:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    code, said = poisoned(range(9, 12), *settings, "--resume", cwd=tmp_path)
    assert code == 0, said
    assert trajectory(run) == expected
    assert len(events(run, "rollback")) == 1


def test_the_third_time_ends_the_run(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = (config, "train.steps=60", "save.every=4", "eval.every=null", "--run", run)
    code, said = poisoned([*range(9, 12), *range(25, 28), *range(41, 44)], *settings, cwd=tmp_path)
    assert code == 4
    assert len(events(run, "rollback")) == 2
    assert "it has done so 2 times" in said
    assert "Traceback" not in said
    assert Run.open(run).path.is_dir()
