"""A job far below the limit without a known cause: where its time went, what was ruled out, what to measure next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flatout.insight.diagnose.host import WORTH, finding_of, waits
from flatout.insight.diagnose.limit import FAR_BELOW, NOT_OF_SPEED
from flatout.insight.diagnose.observed import Observed
from flatout.record import Finding
from flatout.words import percent


def far_below(share: float | None, found: Sequence[Finding], seen: Observed) -> Finding | None:
    """None if the speed is near the limit, or if a cause was found."""
    if share is None or share >= FAR_BELOW or any(f.cause not in NOT_OF_SPEED for f in found):
        return None
    spent = {phase: seconds / seen.seconds for phase, seconds in seen.phases.items()}
    return low_mfu(share, spent, ruled_out=_ruled_out(seen), next_step=_next_step(seen), gains=_gains(seen))


def low_mfu(
    share: float, spent: Mapping[str, float], *, ruled_out: Sequence[str], next_step: str, gains: Sequence[str] = ()
) -> Finding:
    phases = sorted(spent.items(), key=lambda item: -item[1])
    told = ", ".join(f"{phase} {percent(part)}" for phase, part in phases if part >= 0.005)
    return finding_of(
        "low-mfu",
        f"Training reaches {percent(share)} of the limit, and none of the known causes explains it.",
        None,
        None,
        [
            f"where a step's time goes: {told or 'unknown'}",
            *(f"would gain: {gain}" for gain in gains),
            f"ruled out: {'; '.join(ruled_out) or 'nothing'}",
        ],
        next_step,
    )


def _ruled_out(seen: Observed) -> list[str]:
    told = [f"waiting for data ({percent(seen.activities.get('data', 0.0))})"]
    if seen.idle_share is not None:
        idle = f"GPU idle {percent(seen.idle_share)}, {percent(waits(seen, 'sync'))} of it while the host waits"
        told.append(f"launches and synchronisation ({idle})")
    if (dtype := seen.facts.get("compute_dtype")) is not None:
        told.append(f"precision (matmuls in {dtype})")
    if (larger := _larger_batch(seen)) is not None and larger.saves < WORTH:
        told.append(f"{larger.words} ({percent(max(0.0, larger.saves))} less time per token)")
    if seen.tokens and seen.real_tokens is not None:
        told.append(f"padding ({percent(1 - seen.real_tokens / seen.tokens)})")
    if not seen.counts("recompute"):
        told.append("recomputation (none)")
    elif (gain := seen.replay_gain("recompute")) is not None and not seen.is_open("recompute"):
        told.append(f"recomputation ({percent(gain)} less time without it)")
    told.append(f"the optimizer ({percent(seen.share('optimizer'))})")
    return told


@dataclass(frozen=True, kw_only=True)
class Larger:
    """The replayed batch in which a token took the least time, and how much less than now."""

    words: str
    saves: float


def _larger_batch(seen: Observed) -> Larger | None:
    names = {"batch-4": "a 4 times larger batch", "batch-2": "a larger batch"}
    found = {words: seen.replay(name) for name, words in names.items()}
    larger = [Larger(words=words, saves=1 - taken[1] / taken[0]) for words, taken in found.items() if taken]
    return max(larger, key=lambda batch: batch.saves, default=None)


def _gains(seen: Observed) -> list[str]:
    """What was measured to save time, and is no cause: a larger batch also changes the training."""
    larger = _larger_batch(seen)
    if larger is None or larger.saves < WORTH:
        return []
    return [f"{larger.words}, {percent(larger.saves)} less time per token (replayed); it changes the training"]


def _next_step(seen: Observed) -> str:
    if not seen.facts.get("replays"):
        return f"measure again: no batch was replayed with one thing changed at a time ({seen.no_replays})"
    trace = "record two steps with torch.profiler.profile(with_stack=True) and sort its operators by their time"
    if seen.replay("batch-2") is None:
        return f"measure twice the micro-batch, which could not be replayed here; then {trace}"
    return f"{trace}; if small matmuls lead the list, the model is too small for this device's peak"
