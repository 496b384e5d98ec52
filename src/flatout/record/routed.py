"""The events of recipe router: the scores of each task after a phase, and how the prompts were routed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flatout.files import Count, Finite
from flatout.record.events import Event
from flatout.words import percent


@dataclass(frozen=True, kw_only=True)
class AdapterScore:
    """The score of one task with the base alone, its own adapter, the chosen one, or the chosen one after phase 3."""

    ignores_unknown = True

    task: str
    how: str  # base, own, routed, joint, joint own
    metric: str
    value: Finite
    low: Finite | None = None
    high: Finite | None = None
    n: Count = 0
    measures: Mapping[str, Finite] | None = None


@dataclass(frozen=True, kw_only=True)
class PhaseScored(Event, kind="phase"):
    """The scores after a phase. `confusion`: for each task, how many of its prompts each adapter got."""

    phase: Count
    folder: str
    names: tuple[str, ...]
    scores: tuple[AdapterScore, ...]
    confusion: tuple[tuple[Count, ...], ...] | None = None
    routed_right: Finite | None = None  # share of the prompts that their own adapter got
    low: Finite | None = None
    high: Finite | None = None
    confidence: Finite | None = None

    def sentence(self) -> str:
        means = []
        for how in dict.fromkeys(score.how for score in self.scores):
            values = [score.value for score in self.scores if score.how == how]
            means.append(f"{how} {sum(values) / len(values):.3f}")
        said = f"phase {self.phase} scored on {len(self.names)} tasks, mean of their metrics: {', '.join(means)}"
        if self.routed_right is None:
            return said
        return f"{said}; {percent(self.routed_right)} of the prompts to their own adapter"
