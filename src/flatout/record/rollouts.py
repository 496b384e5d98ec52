"""The events of reinforcement learning: what was generated in a phase and how it was graded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flatout.files import Count, Finite
from flatout.record.events import Event
from flatout.words import number, percent


@dataclass(frozen=True, kw_only=True)
class TaskRollouts:
    """The completions of one task in a phase, over all ranks."""

    ignores_unknown: ClassVar[bool] = True

    task: str
    prompts: Count
    reward: Finite | None
    accuracy: Finite | None  # share of the completions with the full score
    answered: Finite | None
    length: Finite | None  # tokens, on average
    truncated: Finite | None
    without_signal: Finite | None  # share of the prompts whose completions all got the same reward
    killed: Count = 0  # completions whose grading took too long
    level: Count | None = None
    grading_s: Finite | None = None  # of one completion, on average
    slowest_s: Finite | None = None  # of one completion, at most


@dataclass(frozen=True, kw_only=True)
class RolloutSample:
    """A completion, for the reader of the record. It is model-written text."""

    ignores_unknown: ClassVar[bool] = True

    task: str
    question: int
    completion: str
    reward: Finite
    grading_s: Finite | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutsGraded(Event, kind="rollouts"):
    """A phase of rollouts, before its steps."""

    tasks: tuple[TaskRollouts, ...]
    tokens: Count
    seconds: Finite
    grading_s: Finite  # waited for after the last completion
    queue_s: Finite | None = None  # of that, until the last one was being graded
    rows: Count | None = None
    samples: tuple[RolloutSample, ...] = ()

    @property
    def reward(self) -> float | None:
        """The mean over tasks."""
        known = [one.reward for one in self.tasks if one.reward is not None]
        return sum(known) / len(known) if known else None

    def sentence(self) -> str:
        parts = [
            f"{one.task}{'' if one.level is None else f' level {one.level}'} reward {number(one.reward, digits=3)}, "
            f"{percent(one.accuracy)} correct, {number(one.length)} tokens"
            for one in self.tasks
        ]
        return f"rollouts: {'; '.join(parts)}; {number(self.tokens / max(self.seconds, 1e-9))} tokens/s"
