"""How fast a run went: from its roll-ups, so that a million steps cost no more than a few thousand lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from flatout.cost import Rates, Shares
from flatout.record import BESIDE, WARM_STEPS, Rollup, Run, Speed, StepRecord


def speed_of(parts: Iterable[Rollup], *, rates: Rates | None, warm: Sequence[StepRecord] = ()) -> Speed:
    """Training speed of whole roll-ups without the steps that warmed up, evaluations and saves apart."""
    steps, tokens = -len(warm), -sum(step.tokens for step in warm)
    wall, seconds = -sum(step.seconds for step in warm), -sum(step.training_s for step in warm)
    spans: dict[str, float] = defaultdict(float)
    for step in warm:
        for span in step.spans:
            spans[span.phase] -= span.seconds
    for part in parts:
        steps, tokens, wall = steps + part.num_steps, tokens + part.tokens, wall + part.seconds
        seconds += training_s(part)
        for phase, spent in part.spans.items():
            spans[phase] += spent
    return _speed(steps, tokens=tokens, seconds=seconds, wall=wall, spans=spans, rates=rates)


def speed_of_steps(records: Sequence[StepRecord], *, rates: Rates | None) -> Speed:
    """The same of a few steps, warm or not: how fast it goes now."""
    spans: dict[str, float] = defaultdict(float)
    for record in records:
        for span in record.spans:
            spans[span.phase] += span.seconds
    return _speed(
        len(records),
        tokens=sum(record.tokens for record in records),
        seconds=sum(record.training_s for record in records),
        wall=sum(record.seconds for record in records),
        spans=spans,
        rates=rates,
    )


def _speed(
    steps: int, *, tokens: int, seconds: float, wall: float, spans: Mapping[str, float], rates: Rates | None
) -> Speed:
    if steps <= 0 or seconds <= 0:
        return Speed(steps=0)
    shares = rates.shares(tokens=tokens, seconds=seconds) if rates else Shares()
    return Speed(
        steps=steps,
        tokens_per_s=tokens / seconds,
        step_s=seconds / steps,
        mfu=shares.mfu,
        hfu=shares.hfu,
        mfu_common=shares.mfu_common,
        data_share=spans["data"] / seconds if "data" in spans else None,
        unattributed_share=1 - sum(spans.values()) / wall if spans and wall > 0 else None,
    )


def training_s(part: Rollup) -> float:
    """Seconds of a roll-up without what was done beside training."""
    return max(part.seconds - sum(part.spans.get(phase, 0.0) for phase in BESIDE), 1e-9)


def warm_steps(run: Run, parts: Sequence[Rollup], *, rank: int = 0) -> list[StepRecord]:
    """The first steps of each attempt that still count."""
    first: dict[int, Rollup] = {}
    for part in parts:
        first.setdefault(part.attempt, part)
    return [step for part in first.values() for step in islice(run.steps_in(part, rank=rank), WARM_STEPS)]


def loss_ends(parts: Sequence[Rollup]) -> tuple[float | None, float | None]:
    """Mean loss of about the first and the last tenth of the steps."""
    losses = [(part.loss, part.num_steps - part.num_non_finite) for part in parts if part.loss is not None]
    if len(losses) < 2:
        return None, None
    tenth = max(1, len(losses) // 10)

    def mean(some: Sequence[tuple[float, int]]) -> float:
        return sum(loss * count for loss, count in some) / sum(count for _, count in some)

    return mean(losses[:tenth]), mean(losses[-tenth:])
