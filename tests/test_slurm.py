"""`flatout launch --on slurm` on a real cluster of one node, where this machine can start one (`tests.slurm`)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from tests import slurm
from tests.recipes.conftest import CONFIG
from tests.recipes.recipes_processes import events, trajectory, wait_for_step
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(slurm.missing() is not None, reason=f"a SLURM cluster {slurm.missing()}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with slurm.cluster() as environment:
        yield environment


class Submitted:
    """A job of two ranks, one CPU each."""

    def __init__(self, environment: dict[str, str], folder: Path, *overrides: str) -> None:
        self.environment, self.folder, self.run = environment, folder, folder / "run"
        config = folder / "tiny.yaml"
        config.write_text(yaml.safe_dump(CONFIG))
        sizes = ("--ranks", "2", "--cpus", "1")
        line = ["launch", str(config), *overrides, "--on", "slurm", *sizes, "--run", str(self.run)]
        done = subprocess.run(
            [sys.executable, "-m", "flatout", *line], env=environment, cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found = re.match(r"job (\d+): ", done.stdout)
        assert found is not None, done.stdout
        self.id = found[1]

    def asked(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    @property
    def state(self) -> dict[str, str]:
        """What the controller says of the job."""
        words = self.asked("scontrol", "show", "job", "--oneliner", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, *states: str) -> None:
        wait_until(lambda: self.state["JobState"] in states)

    def wait_for_step(self, step: int) -> None:
        wait_for_step(self.run, step, self)

    def poll(self) -> int | None:
        """As of a process, for those who wait."""
        return None if self.state["JobState"] in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING") else 1

    @property
    def said(self) -> str:
        return (self.folder / f"run-{self.id}.out").read_text()

    @property
    def seen(self) -> str:
        """For a test that waits in vain."""
        return f"{self.state}\n{[rank.pid for rank in self.ranks()]}\n{self.said}"

    def ranks(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if f"run={self.run}" in process.cmdline() and "RANK" in process.environ():
                    found.append(process)
            except psutil.Error:
                continue
        return sorted(found, key=lambda process: process.environ()["RANK"])


@pytest.mark.long
def test_a_job_is_preempted_requeued_and_resumed(cluster: dict[str, str], tmp_path: Path) -> None:
    job = Submitted(cluster, tmp_path, "train.steps=1000000")
    assert (tmp_path / "run.job").read_text() == f"{job.id}\n"
    job.wait_for_step(3)
    assert [rank.environ()["RANK"] for rank in job.ranks()] == ["0", "1"]
    # The warning that #SBATCH --signal asks for goes to the tasks, as this does.
    job.asked("scancel", "--signal=USR2", job.id)
    wait_until(lambda: job.state["Restarts"] == "1")
    (ended,) = events(job.run, "end")
    checkpoints = [int(path.name[5:]) for path in (job.run / "checkpoints").glob("step-*")]
    assert max(checkpoints) == ended["step"], "the ranks saved where they stopped"
    restarts = "0"

    def resumed() -> bool:
        """A requeued job is held for two minutes, which are shortened here; again, if slurmd refused it too early."""
        nonlocal restarts
        state = job.state
        if state["JobState"] == "PENDING" and state["Restarts"] != restarts:
            restarts = state["Restarts"]
            job.asked("scontrol", "update", f"JobId={job.id}", "StartTime=now+3seconds")
        return bool(events(job.run, "resume"))

    wait_until(resumed, process=job)
    assert events(job.run, "resume")[0]["step"] == ended["step"]
    job.wait_for_step(ended["step"] + 3)
    # Cancelled, it saves too and is not requeued.
    job.asked("scancel", job.id)
    job.wait_for("CANCELLED")
    wait_until(lambda: not job.ranks())
    assert job.state["Restarts"] == restarts
    steps = [step for step, *_ in trajectory(job.run)]
    assert steps == list(range(len(steps)))


@pytest.mark.long
def test_a_killed_rank_comes_back(cluster: dict[str, str], tmp_path: Path) -> None:
    job = Submitted(cluster, tmp_path, "train.steps=1000000", "save.every=5")
    job.wait_for_step(12)
    os.kill(job.ranks()[1].pid, signal.SIGKILL)
    wait_until(lambda: events(job.run, "resume"), process=job)
    assert events(job.run, "resume")[0]["step"] % 5 == 0
    assert "Traceback" not in job.said
    job.asked("scancel", job.id)
    job.wait_for("CANCELLED")
    wait_until(lambda: not job.ranks())


@pytest.mark.long
def test_two_configurations_end_in_their_comparison(cluster: dict[str, str], tmp_path: Path) -> None:
    for name, lr in (("slow", 1e-3), ("fast", 3e-3)):
        train = {**CONFIG["train"], "lr": lr, "steps": 40}  # type: ignore[dict-item]
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**CONFIG, "train": train}))
    line = ["launch", "slow.yaml", "fast.yaml", "--on", "slurm", "--cpus", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "flatout", *line], env=cluster, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"job (\d+) compares them when all have ended, in (\S+)", done.stdout)
    assert found is not None, done.stdout
    output = Path(found[2])
    queue = ["squeue", "-h", "-j", found[1]]
    wait_until(lambda: not subprocess.run(queue, env=cluster, capture_output=True, text=True).stdout.strip())
    assert "fast against slow:" in output.read_text()
    assert re.search(r"state +Finished +Finished", output.read_text())
