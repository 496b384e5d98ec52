"""Compares ranks: finds stragglers, and steps whose tokens are distributed unevenly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

Steps = Sequence[Mapping[str, Any]]

# Phases in which ranks wait for each other, because gradients are reduced or sharded weights gathered.
_TOGETHER = ("forward", "backward", "optimizer")
# A rank that is slower by less than this share of a step is not a straggler.
_BEHIND = 0.08


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    alone_s: float  # per step, in its own work
    others_s: float  # the same for the other ranks
    step_s: float

    @property
    def sentence(self) -> str:
        return (
            f"rank {self.rank} is the straggler: {self.alone_s * 1e3:.0f} ms per step of its own work, "
            f"{self.others_s * 1e3:.0f} ms on the other ranks, of {self.step_s * 1e3:.0f} ms (phases of every rank)"
        )


def straggler(ranks: Mapping[int, Steps]) -> Straggler | None:
    """The straggler; None if no rank is slower, or if the others do not wait for it."""
    if len(ranks) < 2:
        return None
    alone = {rank: fmean(_alone_s(step) for step in steps) for rank, steps in ranks.items()}
    together = {rank: fmean(_together_s(step) for step in steps) for rank, steps in ranks.items()}
    last = max(alone, key=lambda rank: alone[rank])
    others_s = median(alone[rank] for rank in ranks if rank != last)
    behind_s = alone[last] - others_s
    waited_s = median(together[rank] for rank in ranks if rank != last) - together[last]
    step_s = fmean(float(step["seconds"]) for step in ranks[last])
    if behind_s < _BEHIND * step_s or waited_s < behind_s / 2:
        return None
    return Straggler(rank=last, alone_s=alone[last], others_s=others_s, step_s=step_s)


@dataclass(frozen=True, kw_only=True)
class Uneven:
    """The tokens of a step are distributed unevenly, so every rank waits for the one with the most."""

    wasted: float  # share of computing that the ranks wait, on average
    sentence: str


def uneven(ranks: Mapping[int, Steps]) -> Uneven | None:
    """None if the ranks have equal work, or if no token ids were observed."""
    by_rank = {rank: {step["step"]: _tokens(step) for step in steps} for rank, steps in ranks.items()}
    common = set.intersection(*(set(found) for found in by_rank.values())) if len(by_rank) > 1 else set()
    rows = [{rank: found[step] for rank, found in by_rank.items()} for step in sorted(common)]
    rows = [row for row in rows if all(row.values())]
    if not rows:
        return None
    most, mean = sum(max(row.values()) for row in rows), sum(fmean(row.values()) for row in rows)
    leaders = [max(row, key=lambda rank: row[rank]) for row in rows]
    rank = max(set(leaders), key=leaders.count)
    told = f"{most / len(rows):,.0f} tokens per step on the rank with the most, {mean / len(rows):,.0f} on average"
    told += f"; rank {rank} has the most in {leaders.count(rank)} of {len(rows)} steps"
    return Uneven(wasted=1 - mean / most, sentence=told)


def slower(ranks: Mapping[int, Steps]) -> tuple[int, float] | None:
    """The rank that is slowest for the same work, and the ratio to the others."""
    if len(ranks) < 2:
        return None
    spent = {rank: fmean(_phases(step).get("forward", 0.0) for step in steps) for rank, steps in ranks.items()}
    last = max(spent, key=lambda rank: spent[rank])
    usual = median(spent[rank] for rank in ranks if rank != last)
    return (last, spent[last] / usual) if usual > 0 else None


def _phases(step: Mapping[str, Any]) -> Mapping[str, float]:
    found: Mapping[str, float] = step["device"] or step["host"]
    return found


def _together_s(step: Mapping[str, Any]) -> float:
    return sum(_phases(step).get(phase, 0.0) for phase in _TOGETHER)


def _alone_s(step: Mapping[str, Any]) -> float:
    return sum(_phases(step).values()) - _together_s(step)


def _tokens(step: Mapping[str, Any]) -> int:
    return sum(micro["tokens"] or 0 for micro in step["micro"])
