"""How a run begins: in a folder that a kill left half-made, with a plan that nobody has changed, until a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flatout.engine.faults import stop_on_signals
from flatout.record import Run

Call = Callable[..., subprocess.CompletedProcess[str]]
TINY = ["model.layers=1", "model.hidden=16", "train.steps=2", "train.warmup_steps=0", "eval.every=null"]

# Dies as a run that is killed when the second file of its folder is about to appear.
KILLED = """
import os, signal, sys
from pathlib import Path
from flatout.record import Run
rename, done = Path.replace, []
def replace(self, target):
    done.append(target)
    if len(done) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
Path.replace = replace
Run.create(sys.argv[1], config_text="", config={}, plan={}, hardware={}, environment={})
"""


@pytest.mark.parametrize("resume", [[], ["--resume"]], ids=["same command", "resume"])
def test_a_run_killed_while_its_folder_was_made_begins_again(
    flatout: Call, config: Path, tmp_path: Path, resume: list[str]
) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, "run"], cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "run" / "config.yaml").exists()
    done = flatout("train", config, *TINY, "--run", "run", *resume)
    assert done.returncode == 0, done.stderr
    run = Run.open(tmp_path / "run")
    assert [step.step for step in run.steps()] == [0, 1]
    assert not list(run.path.glob(".*.tmp"))


def test_resuming_a_run_that_never_began_begins_it(flatout: Call, config: Path, tmp_path: Path) -> None:
    done = flatout("train", config, *TINY, "--run", "run", "--resume")
    assert done.returncode == 0, done.stderr
    assert "there is no run in run yet, so it starts from the beginning" in done.stderr
    assert [step.step for step in Run.open(tmp_path / "run").steps()] == [0, 1]


def test_resuming_in_a_folder_of_something_else_or_what_was_changed_is_refused(
    flatout: Call, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("mine")
    done = flatout("train", config, *TINY, "--run", "notes", "--resume")
    assert done.returncode == 2
    assert "notes is not a run folder" in done.stderr
    assert flatout("train", config, *TINY, "--run", "run").returncode == 0
    plan = tmp_path / "run" / "plan.json"
    value = json.loads(plan.read_text())
    value["decisions"]["precision"] = "bf16"
    plan.write_text(json.dumps(value))
    done = flatout("train", config, *TINY, "train.steps=4", "--run", "run", "--resume")
    assert done.returncode == 2
    assert "plan.json was changed after flatout wrote it" in done.stderr
    assert "set plan.KEY in the configuration" in done.stderr
    assert len(list(Run.open(tmp_path / "run").steps())) == 2


@pytest.mark.parametrize("ignored", [False, True], ids=["in a terminal", "under nohup"])
def test_a_hangup_asks_for_a_stop_unless_it_is_ignored(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else lambda *_: None)
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert (stop.signal is signal.SIGHUP) is not ignored
        assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) is ignored
    finally:
        signal.signal(signal.SIGHUP, before)
