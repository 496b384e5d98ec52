"""Several ranks side by side: the one the others wait for, and steps whose tokens are shared out unevenly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

Steps = Sequence[Mapping[str, Any]]

# Phases in which ranks wait for each other: gradients are summed there, and sharded weights gathered.
_TOGETHER = ("forward", "backward", "optimizer")
# Behind by less than this share of a step, a rank is as fast as the others.
_BEHIND = 0.08


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    alone_s: float  # a step, in what it does on its own
    others_s: float  # the same of the others
    step_s: float

    @property
    def sentence(self) -> str:
        return (
            f"seen on rank {self.rank}, which the other ranks wait for: {self.alone_s * 1e3:.0f} ms a step on its own, "
            f"{self.others_s * 1e3:.0f} ms on theirs, of {self.step_s * 1e3:.0f} ms (phases of every rank)"
        )


def straggler(ranks: Mapping[int, Steps]) -> Straggler | None:
    """None where no rank is behind, or where the others do not wait for it."""
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
    """Tokens of a step shared out unevenly: every rank waits for the one that has most."""

    wasted: float  # share of computing that the ranks wait, on average
    sentence: str


def uneven(ranks: Mapping[int, Steps]) -> Uneven | None:
    """None where ranks have equal work, or no token ids were seen."""
    by_rank = {rank: {step["step"]: _tokens(step) for step in steps} for rank, steps in ranks.items()}
    common = set.intersection(*(set(found) for found in by_rank.values())) if len(by_rank) > 1 else set()
    rows = [{rank: found[step] for rank, found in by_rank.items()} for step in sorted(common)]
    rows = [row for row in rows if all(row.values())]
    if not rows:
        return None
    most, mean = sum(max(row.values()) for row in rows), sum(fmean(row.values()) for row in rows)
    leaders = [max(row, key=lambda rank: row[rank]) for row in rows]
    rank = max(set(leaders), key=leaders.count)
    told = f"{most / len(rows):,.0f} tokens a step on the fullest rank, {mean / len(rows):,.0f} on average"
    told += f"; rank {rank} has most in {leaders.count(rank)} of {len(rows)} steps"
    return Uneven(wasted=1 - mean / most, sentence=told)


def slower(ranks: Mapping[int, Steps]) -> tuple[int, float] | None:
    """The rank that takes longest for the same work, and how many times as long as the others."""
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
