"""Reinforcement learning on embedded tasks: phases of rollouts, steps, several tasks, resumed bit for bit."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from flatout.config import from_mapping
from flatout.errors import UsageError
from flatout.recipes import rl, run
from flatout.recipes.rollouts import RolloutBatches
from flatout.record import Run
from flatout.record.events import RolloutsGraded

CONFIG: dict[str, Any] = {
    "recipe": "rl",
    "model": {"layers": 2, "hidden": 32, "heads": 2, "positions": 512},
    "data": {"sequence_length": 512},
    "rl": {"tasks": ["sums:train", "sums:shown"], "prompts": 4, "samples": 3, "updates": 2},
    "sample": {"max_tokens": 8, "temperature": 1.0},
    "train": {"steps": 6, "lr": 1e-3},
    "plan": {"precision": "fp32", "threads": 1, "micro_batch": 2},
    "save": {"every": 2},
}


def settings(**changes: Any) -> Any:
    return from_mapping({**CONFIG, **{key: {**CONFIG.get(key, {}), **value} for key, value in changes.items()}})


def weights(folder: Path) -> str:
    newest = max((folder / "checkpoints").glob("step-*"))
    return hashlib.sha256((newest / "weights-rank00000.safetensors").read_bytes()).hexdigest()


def partly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that a random model can get: completions are graded by how many of their characters are letters."""
    from flatout.recipes import rollouts
    from flatout.tasks import Graded

    class Done:
        def __init__(self, text: str) -> None:
            self.text = text

        def result(self) -> Graded:
            share = sum(c.isalpha() for c in self.text) / max(1, len(self.text))
            return Graded(reward=share, answered=True, status="graded")

    monkeypatch.setattr(rollouts.Graders, "grade", lambda self, i, text: Done(text))


@pytest.mark.parametrize("method", ["mixed", "equal", "pcgrad"])
def test_killed_between_and_inside_phases_it_resumes_to_the_same_bits(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partly(monkeypatch)
    chosen = settings(mtl={"method": method})
    run(chosen, folder=tmp_path / "whole")
    plain = RolloutBatches.next

    def fails(self: RolloutBatches, step: int) -> Any:
        if step == 3:
            raise ConnectionResetError
        return plain(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(RolloutBatches, "next", fails)
        with pytest.raises(ConnectionResetError):
            run(chosen, folder=tmp_path / "cut")
    run(chosen, folder=tmp_path / "cut", resume=True)
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    phases = [event for event in Run.open(tmp_path / "whole").events() if isinstance(event, RolloutsGraded)]
    assert [phase.step for phase in phases] == [0, 2, 4]
    assert all(task.prompts == 2 for phase in phases for task in phase.tasks)


def test_the_reward_rises_where_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partly(monkeypatch)
    longer = settings(
        rl={"prompts": 8, "samples": 8, "updates": 1}, train={"steps": 24, "lr": 1e-2}, save={"every": None}
    )
    run(longer, folder=tmp_path / "run")
    phases = [event for event in Run.open(tmp_path / "run").events() if isinstance(event, RolloutsGraded)]
    rewards = [sum(task.reward or 0.0 for task in phase.tasks) / len(phase.tasks) for phase in phases]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rl": {"tasks": []}}, "rl.tasks: missing"),
        ({"rl": {"prompts": 5}}, "5 must be a multiple"),
        ({"rl": {"samples": 1}}, "rl.samples"),
        ({"sample": {"temperature": 0}}, "identical"),
        ({"train": {"steps": 5}}, "5 must be a multiple"),
        ({"rl": {"tasks": ["units:train"]}, "mtl": {"method": "pcgrad"}}, "at least two tasks"),
        ({"rl": {"tasks": ["unitz"]}}, "unitz"),
    ],
)
def test_mistakes_are_named_before_anything_is_made(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        rl.run(settings(**changes), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
