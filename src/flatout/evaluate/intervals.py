"""95 % confidence intervals, and the paired difference of two models on the same questions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Z = 1.959963984540054  # 95 % of a normal distribution is within this many standard deviations
RESAMPLES = 2000
SEED = 0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Second minus first; `p` is McNemar's exact test if every reward is 0 or 1, otherwise None."""

    value: float
    low: float
    high: float
    n: int
    p: float | None


def wilson(successes: int, n: int) -> Interval:
    """The Wilson interval of a proportion, which is also valid at 0 and n, and for small n."""
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"{successes} of {n}")
    share = successes / n
    centre = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    reach = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return Interval(low=max(0.0, centre - reach), high=min(1.0, centre + reach))


def mean_interval(values: Sequence[float]) -> Interval | None:
    """The interval of a mean: Wilson's if every value is 0 or 1, otherwise by bootstrap; None for a single value."""
    if values and all(value in (0.0, 1.0) for value in values):
        return wilson(round(sum(values)), len(values))
    return bootstrap(values, lambda drawn: sum(drawn) / len(drawn))


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> Interval | None:
    """The interval of sum(above) / sum(below) over pairs, such as losses and tokens of windows."""
    pairs = list(zip(above, below, strict=True))
    return bootstrap(pairs, lambda drawn: sum(a for a, _ in drawn) / sum(b for _, b in drawn))


def bootstrap(values: Sequence[T], statistic: Callable[[Sequence[T]], float]) -> Interval | None:
    """The middle 95 % of the statistic on resampled values; None if there are too few to resample."""
    if len(values) < 2:
        return None
    chance = random.Random(SEED)
    found = sorted(statistic(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    cut = round(0.025 * RESAMPLES)
    return Interval(low=found[cut], high=found[-1 - cut])


def paired(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """Mean reward of the second minus that of the first on the same questions, which are resampled together."""
    differences = [b - a for a, b in zip(first, second, strict=True)]
    interval = bootstrap(differences, lambda drawn: sum(drawn) / len(drawn))
    if interval is None:
        return None
    binary = all(value in (0.0, 1.0) for value in (*first, *second))
    return Difference(
        value=sum(differences) / len(differences),
        low=interval.low,
        high=interval.high,
        n=len(differences),
        p=mcnemar(differences.count(1.0), differences.count(-1.0)) if binary else None,
    )


def mcnemar(gained: int, lost: int) -> float:
    """The probability of a split at least this uneven if gains and losses were equally likely (exact, two-sided)."""
    n, fewer = gained + lost, min(gained, lost)
    return min(1.0, sum(math.comb(n, k) for k in range(fewer + 1)) / 2.0 ** (n - 1))
