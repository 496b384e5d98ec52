"""Reinforcement learning, killed while it generates, grades, updates or saves, goes on to the same bits."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from recipes_processes import trajectory, weights_hash
from tests.waiting import wait_until
from tests.warm import Started, flatout

from flatout.record import Run
from flatout.record.rollouts import RolloutsGraded

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"rl": {"updates": 2}},
    "ppo": {"rl": {"algorithm": "ppo", "updates": 2}},
    "pcgrad": {"mtl": {"method": "pcgrad"}},
}
# Each holds the run at a place after its second checkpoint; the file says that it is there.
PLACES = {
    "generation": "count(rollouts, 'text_of', at=300)",  # a completion is done, others are being written
    "grading": "count(rollouts.RolloutBatches, '_graded', at=3)",  # the grading processes are at work
    "update": "count(Engine, '_gradients', at=6)",
    "save": "count(pieces, '_write_file', at=5)",  # the third checkpoint: one of its files is not there yet
}
SCRIPT = """
import time
from pathlib import Path
from flatout.cli import main
from flatout.engine import pieces
from flatout.engine.step import Engine
from flatout.recipes import rollouts

def count(owner, name, *, at):
    plain, calls = getattr(owner, name), []
    def method(*arguments, **named):
        calls.append(name)
        if len(calls) == at:
            Path("there").touch()
            time.sleep(600)
        return plain(*arguments, **named)
    setattr(owner, name, method)

PLACE
main()
"""


def config(folder: Path, changes: dict[str, Any]) -> Path:
    """Answers that a random model hits now and then: the last number of a text is a certain digit."""
    tasks = []
    for digit in (3, 7):
        rows = [{"question": f"{i}?", "answer": f"#### {digit}"} for i in range(64)]
        (folder / f"{digit}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tasks.append(f"gsm8k:{folder / f'{digit}.jsonl'}?prompt=bare")
    values: dict[str, Any] = {
        "recipe": "rl",
        "model": {"layers": 1, "hidden": 32, "heads": 2},
        "data": {"sequence_length": 48},
        "rl": {"tasks": tasks, "prompts": 16, "samples": 8},
        "sample": {"max_tokens": 12},
        "train": {"steps": 8, "lr": 1e-3},
        "plan": {"precision": "fp32", "threads": 1},
        "save": {"every": 2},
    }
    for key, value in changes.items():
        values[key] = {**values.get(key, {}), **value}
    (folder / "job.yaml").write_text(json.dumps(values))  # JSON is YAML
    return folder / "job.yaml"


def goes_on_exactly(folder: Path, changes: dict[str, Any], place: str) -> None:
    job, whole, broken = config(folder, changes), folder / "whole", folder / "broken"
    done = flatout("train", job, "--run", whole, cwd=folder)
    assert done.returncode == 0, done.stderr
    started = Started("train", job, "--run", broken, cwd=folder, script=SCRIPT.replace("PLACE", PLACES[place]))
    wait_until((folder / "there").exists, process=started)
    started.send_signal(signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL
    resumed = flatout("train", job, "--run", broken, "--resume", cwd=folder)
    assert resumed.returncode == 0, resumed.stderr
    assert trajectory(broken) == trajectory(whole)
    assert weights_hash(broken) == weights_hash(whole)
    assert rewards(broken) == rewards(whole)
    last = [event for event in Run.open(broken).events() if isinstance(event, RolloutsGraded)][-1]
    assert all(0 <= (task.grading_s or 0) <= (task.slowest_s or -1) for task in last.tasks), "grading is timed"
    assert any(reward not in (None, 0.0) for found in rewards(whole).values() for reward in found), "nothing was learnt"


def rewards(folder: Path) -> dict[int | None, list[float | None]]:
    """The rewards of each phase by task; of a phase that was repeated, the last."""
    events = [event for event in Run.open(folder).events() if isinstance(event, RolloutsGraded)]
    return {event.step: [task.reward for task in event.tasks] for event in events}


def test_killed_while_generating_it_goes_on_exactly(tmp_path: Path) -> None:
    goes_on_exactly(tmp_path, ALGORITHMS["grpo"], "generation")


@pytest.mark.faults
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_killed_everywhere_it_goes_on_exactly(name: str, place: str, tmp_path: Path) -> None:
    goes_on_exactly(tmp_path, ALGORITHMS[name], place)
