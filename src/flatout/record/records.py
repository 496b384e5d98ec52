"""The records of a run folder: steps, their phases, and findings; and the interface of sinks.

Records hold raw facts; readers derive tokens per second, MFU and shares from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from flatout.files import Count, Finite, typed
from flatout.record.events import Event
from flatout.record.schemas import Scalar

# Phases that are not training; the speed of a step does not include them.
BESIDE = ("eval", "save", "profile")
# Before the name of a phase: its peak memory in a step's record.
PEAK = "peak_gib"
# Steps at the start of an attempt that compile, warm caches and fill queues; they do not count towards speed.
WARM_STEPS = 3


def training_s(seconds: float, phases: Mapping[str, float]) -> float:
    """Seconds without the phases that are not training."""
    return max(seconds - sum(phases.get(phase, 0.0) for phase in BESIDE), 1e-9)


@dataclass(frozen=True, kw_only=True)
class Span:
    """Time of one phase in a step, over all its micro-batches; `role` tells actor from critic in RL."""

    phase: str
    seconds: Finite
    role: str = "train"
    tokens: Count | None = None


@dataclass(frozen=True, kw_only=True)
class StepExtra:
    """Additional facts about a step; None if they do not apply."""

    ignores_unknown: ClassVar[bool] = True

    lr: float | None = None
    grad_norm: float | None = None
    targets: Count | None = None  # tokens that the loss covers
    skipped: bool = False  # the update was skipped because its gradient was not finite
    loss_scale: float | None = None
    graphs: Count | None = None  # compiled so far in this process
    stage: str | None = None  # of a watched script, as are its micro-batches
    micro_batches: Count | None = None
    profiled: bool = False  # the profiler ran, so that its time says nothing about training
    metrics: Mapping[str, float] = field(default_factory=dict)  # an objective's, by their names

    def to_json(self) -> dict[str, Any]:
        """The known facts, as they are written."""
        return {
            name: value
            for name, value in vars(self).items()
            if value is not None and value is not False and value != {}
        }

    def numbers(self) -> dict[str, float]:
        """All numbers that can be averaged, by name."""
        own = {name: value for name, value in self.to_json().items() if isinstance(value, int | float)}
        return {**self.metrics, **own}


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step of one rank."""

    attempt: Count
    step: Count
    time: Finite  # unix seconds at the end of the step
    seconds: Finite
    tokens: Count  # useful ones, without padding, over all ranks
    padded_tokens: Count
    loss: float | None
    spans: tuple[Span, ...] = ()
    # allocated_gib, reserved_gib, peak_gib, total_gib; peak_gib/PHASE where a phase needed more than ever before
    memory: Mapping[str, Finite] = field(default_factory=dict)
    utilisation: Mapping[str, Finite] = field(default_factory=dict)  # fractions: gpu, cpu, ram
    extra: StepExtra = field(default_factory=StepExtra)

    @property
    def num_steps(self) -> int:
        return 1

    @property
    def phases(self) -> Mapping[str, float]:
        """Seconds by phase; by role/phase where the role is not "train"."""
        spent: dict[str, float] = defaultdict(float)
        for span in self.spans:
            spent[span.phase if span.role == "train" else f"{span.role}/{span.phase}"] += span.seconds
        return spent

    @property
    def training_s(self) -> float:
        return training_s(self.seconds, self.phases)

    @property
    def profiled(self) -> bool:
        return self.extra.profiled


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause of lost time, or of a risk: what it costs, how that is known, and what to change."""

    cause: str  # a stable id, such as data-starvation
    sentence: str  # the cause in plain words
    share: Finite | None  # of step time that is lost to it; None if it does not cost time
    gain: Finite | None  # share of step time that the fix saves
    status: Literal["estimated", "measured", "refuted"]  # refuted: its own measurement shows that the fix is slower
    evidence: tuple[str, ...]
    fix: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The doctor's result: a verdict sentence, the distance from the limit, and the causes, costliest first."""

    verdict: str
    limit: Mapping[str, Scalar]  # tokens_per_s, ceiling_tokens_per_s, share, and where the ceiling comes from
    findings: tuple[Finding, ...]


class Sink(Protocol):
    """Receives every record as it is written: a tracker or a progress line."""

    def step(self, record: StepRecord) -> None: ...

    def event(self, event: Event) -> None: ...

    def close(self) -> None: ...


def step_to_json(record: StepRecord) -> dict[str, Any]:
    return {
        "attempt": record.attempt,
        "step": record.step,
        "time": record.time,
        "seconds": record.seconds,
        "tokens": record.tokens,
        "padded_tokens": record.padded_tokens,
        "loss": record.loss,
        "spans": [_span_to_json(span) for span in record.spans],
        "memory": dict(record.memory),
        "utilisation": dict(record.utilisation),
        "extra": record.extra.to_json(),
    }


def step_from_json(value: Mapping[str, Any], *, source: str) -> StepRecord:
    return typed(StepRecord, value, source=source)


def _span_to_json(span: Span) -> dict[str, Any]:
    # Defaults are left out: a million steps have ten million spans.
    value: dict[str, Any] = {"phase": span.phase, "seconds": span.seconds}
    if span.role != "train":
        value["role"] = span.role
    if span.tokens is not None:
        value["tokens"] = span.tokens
    return value
