"""Runs are found, listed, and waited for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.insight import made
from tests.insight.conftest import Flatout
from tests.waiting import HANG_S

from flatout.insight import found
from flatout.insight.story import tell


def test_runs_are_listed_newest_first(flatout: Flatout, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    old = made.make(tmp_path / "runs" / "old", steps=20)
    made.make(tmp_path / "runs" / "group" / "new", steps=20, ended=False)
    for name in ("steps.jsonl", "events.jsonl"):
        os.utime(old.path / name, (1e9, 1e9))
    shutil.copytree(old.path, tmp_path / "runs" / "broken")
    (tmp_path / "runs" / "broken" / "config.json").write_text("{")
    (tmp_path / "runs" / "notes").mkdir()
    code, out, err = flatout("runs")
    assert code == 0
    assert "runs/broken/config.json" in " ".join(err.split())
    assert out.index("runs/group/new") < out.index("runs/old")
    assert "finished" in out
    assert "20/20" in out
    rows = json.loads(flatout("runs", "--json")[1])
    assert {row["run"] for row in rows} == {"runs/old", "runs/group/new", "runs/broken"}
    by_name = {row["run"]: row for row in rows}
    assert by_name["runs/old"]["state"] == "finished"
    assert by_name["runs/old"]["steps"] == 20
    assert by_name["runs/old"]["val_loss"]
    assert "config.json" in by_name["runs/broken"]["problem"], "a damaged run is listed with what is wrong"


def test_a_run_is_one_line_of_80_columns_with_its_recipe(tmp_path: Path) -> None:
    for at, recipe in enumerate(("pretrain", "rl", "router")):
        run = made.make(tmp_path / "runs" / f"{recipe}-guru-mixed-cpu-20261119-13080{at}", steps=20)
        config = json.loads((run.path / "config.json").read_text())
        (run.path / "config.json").write_text(json.dumps(config | {"recipe": recipe}))
    command = [sys.executable, "-m", "flatout", "runs"]  # a new process: the width is read once
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True)
    head, *lines = done.stdout.splitlines()
    assert head.split()[:4] == ["run", "recipe", "state", "step"]
    assert len(lines) == 3
    for line in lines:
        words = line.split()
        assert words[0].startswith(f"runs/{words[1]}-guru")
        assert words[2] == "finished"
        assert len(line) <= 80


def test_a_folder_without_runs_and_one_that_is_not_there(flatout: Flatout, tmp_path: Path) -> None:
    assert flatout("runs", tmp_path)[:2] == (0, f"no run in {tmp_path}\n")
    code, _, err = flatout("runs", tmp_path / "nothing")
    assert code == 2
    assert "is not a folder" in err


def test_what_is_running_is_found(tmp_path: Path) -> None:
    assert found.running(tmp_path / "nothing") == []
    made.make(tmp_path / "over", steps=20)
    going = made.make(tmp_path / "going", steps=20, ended=False)  # by this process, which is alive
    alive = {run.path for run in found.running(tmp_path)}
    assert alive <= {going.path}
    assert tell(going).state.kind != "running" or alive == {going.path}


def test_watch_waits_for_a_run_that_is_not_there_yet(tmp_path: Path) -> None:
    made.make(tmp_path / "elsewhere", steps=20)
    command = [sys.executable, "-m", "flatout", "watch", str(tmp_path / "later")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "waiting for" in process.stdout.readline()
    (tmp_path / "elsewhere").rename(tmp_path / "later")
    out, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, err) == (0, "")
    assert "later: Finished" in out


def test_criteria_before_the_first_step(tmp_path: Path) -> None:
    run = made.make(tmp_path / "run", steps=0, ended=False)
    assert tell(run).judged == "4 criteria set, none measured yet."
