"""A run is evaluated at its newest checkpoint, and keeps what was found without a new attempt."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from flatout.record import Run

Flatout = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.slow
def test_a_run_keeps_its_scores(flatout: Flatout, config: Path, tmp_path: Path) -> None:
    assert flatout("train", config, "--run", "run").returncode == 0
    run = Run.open(tmp_path / "run")
    before = list(run.events())
    (tmp_path / "text.txt").write_text("One morning the fox went to the river. " * 20)
    asked = ("eval", "run", "--tasks", "perplexity:text.txt,units", "--limit", 2, "--max-tokens", 8)
    done = flatout(*asked, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["step"] == 12
    *same, added = list(run.events())
    assert same == before
    assert (added.kind, added.step, added.attempt) == ("tasks", 12, before[-1].attempt)
    found = {task["task"]: task["value"] for task in added.data["tasks"]}
    assert found == {task["task"]: task["value"] for task in document["tasks"]}
    assert flatout("report", "run", "--json").returncode == 0
    with run.lock():
        busy = flatout(*asked)
    assert busy.returncode == 0
    assert "not recorded" in busy.stderr
    assert len(list(run.events())) == len(before) + 1
