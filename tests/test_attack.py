"""A few of the attacks of `make test-attacks`, of every kind that is quick."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.attacks import Trial, attempt
from tests.attacks.campaign import campaign, report

QUICK = ("settings-text", "settings-file", "counts", "logs", "history")


def test_thirty_attacks_find_nothing(tmp_path: Path) -> None:
    found = campaign(folder=tmp_path, trials=30, seed=44, jobs=1, kinds=QUICK)
    assert len(found) == 30
    assert not [result for result in found if result.faults], report(found, seed=44)
    assert {path.name for path in tmp_path.iterdir()} == {"ground", "seed-44"}
    assert list((tmp_path / "seed-44").iterdir()) == []  # nothing is kept of what failed to find anything


def test_a_fault_of_each_sort_is_seen(tmp_path: Path) -> None:
    """The judge itself: files that are lost or changed, code that ran, a trial that breaks."""

    def loses(trial: Trial) -> None:
        for name in ("gone", "changed"):
            trial.keep(trial.write(name, "x"))
        (trial.folder / "gone").unlink()
        trial.write("changed", "y")
        trial.write("deep/EXECUTED", "")

    def breaks(trial: Trial) -> None:
        raise KeyError("x")

    ground = tmp_path / "ground"
    ground.mkdir()
    lost = attempt("lost/1", loses, seed=1, ground=ground, folder=tmp_path)
    assert lost.faults == ["lost: gone", "changed: changed", "code ran"]
    assert (tmp_path / "lost-1").is_dir()  # kept, to look at
    assert "KeyError" in attempt("broken/1", breaks, seed=1, ground=ground, folder=tmp_path).faults[0]
    shutil.rmtree(tmp_path / "lost-1")


def test_a_trial_is_the_same_every_time(tmp_path: Path) -> None:
    def drawn(trial: Trial) -> None:
        trial.commands.append(str(trial.random.random()))

    ways = {"seed": 3, "ground": tmp_path, "folder": tmp_path / "x"}
    first, again, other = (attempt(name, drawn, **ways) for name in ("a/1", "a/1", "a/2"))  # type: ignore[arg-type]
    assert first.commands == again.commands != other.commands
