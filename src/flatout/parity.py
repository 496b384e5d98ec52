"""Whether one of two ways of doing the same work is faster, decided from repeated measurements.

A machine drifts, and its steps have spikes. Two ways A and B are therefore measured in pairs, in the order A B, B A,
A B, and so on (ABBA). One measurement is the median of the logarithms of many step times (`typical`), and the unit of
evidence is the difference of the two logarithms of one pair. A t interval of these differences holds its level under
independent noise, drift and spikes, which bootstrap intervals of few pairs and unpaired comparisons do not.

Looking at the data again and again finds a difference sooner or later. So the looks are planned: after 4, 8 and 16
pairs, with a third of the error each. Between two looks the answer is that of the last one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median, stdev
from typing import Literal

ALPHA = 0.05
LOOKS = (4, 8, 16)
# Two pairs give no useful interval: it would be 13 standard errors wide.
FEWEST_PAIRS = 3
# The Hodges-Lehmann estimate differs from the median only with a few more.
FEWEST_FOR_MIDDLE = 6
# An interval that contains no difference is an answer if it is no wider than this on either side.
MARGIN = 0.03

Verdict = Literal["faster", "slower", "no effect shown", "too noisy to tell", "too few pairs"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """B against A: the ratio of their times with its interval. Below 1, B is faster."""

    ratio: float
    low: float  # of the interval, 0 if there is none
    high: float  # infinite if there is none
    pairs: int  # that were used
    verdict: Verdict
    needed_more: int  # pairs until the next planned look; 0 after the last one, or if the verdict is final
    p: float  # two-sided, corrected for the number of looks; 1 if there is no interval
    middle: float | None = None  # Hodges-Lehmann: the ratio that single spikes do not move

    @property
    def decided(self) -> bool:
        return self.verdict in ("faster", "slower")


def typical(seconds: Sequence[float]) -> float:
    """The median logarithm of positive times: one measurement of a run of many steps."""
    return median(math.log(value) for value in seconds)


def paired(
    a_logs: Sequence[float],
    b_logs: Sequence[float],
    *,
    looks: Sequence[int] = LOOKS,
    alpha: float = ALPHA,
    margin: float = MARGIN,
    floor: float = 0.0,
) -> Difference:
    """Compares measurements taken in pairs, as logarithms of times; `looks=(n,)` plans a single look.

    `floor` is the difference, as a logarithm, that two runs of the same thing show: nothing smaller is decided.
    """
    if len(a_logs) != len(b_logs):
        raise ValueError(f"{len(a_logs)} and {len(b_logs)} measurements are not pairs")
    if not looks or list(looks) != sorted(set(looks)):
        raise ValueError(f"looks {tuple(looks)} must be increasing")
    every = [b - a for a, b in zip(a_logs, b_logs, strict=True)]
    if not all(map(math.isfinite, every)):
        raise ValueError("a measurement is not finite: leave out a run that failed, and its partner")
    past = [look for look in looks if look <= len(every)]
    ahead = next((look - len(every) for look in looks if look > len(every)), 0)
    logs = every[: past[-1]] if past else every
    ratio = math.exp(fmean(logs)) if logs else 1.0
    middle = math.exp(hodges_lehmann(logs)) if len(logs) >= FEWEST_FOR_MIDDLE else None
    if not past or len(logs) < FEWEST_PAIRS:
        return Difference(
            ratio=ratio, low=0.0, high=math.inf, pairs=len(logs), verdict="too few pairs", needed_more=ahead, p=1.0
        )
    centre, error = fmean(logs), stdev(logs) / math.sqrt(len(logs))
    half = t_quantile(len(logs) - 1, level=1 - alpha / len(looks)) * error
    low, high = centre - half, centre + half
    verdict: Verdict
    if (low > 0 or high < 0) and abs(centre) > floor:
        verdict = "faster" if centre < 0 else "slower"
    elif max(-low, high) <= math.log1p(margin):
        verdict = "no effect shown"
    else:
        verdict = "too noisy to tell"
    p = t_tail(centre / error, len(logs) - 1) if error > 0 else float(centre == 0)
    return Difference(
        ratio=ratio,
        low=math.exp(low),
        high=math.exp(high),
        pairs=len(logs),
        verdict=verdict,
        needed_more=ahead if verdict == "too noisy to tell" else 0,
        p=min(1.0, p * len(looks)),
        middle=middle,
    )


def enough(
    found: Difference, *, looks: Sequence[int] = LOOKS, alpha: float = ALPHA, margin: float = MARGIN
) -> int | None:
    """About how many pairs in all would decide, by the spread of those so far; None if there is no interval.

    It is a planned look, or beyond the last one a multiple of it.
    """
    if found.low <= 0 or not math.isfinite(found.high):
        return None
    level = 1 - alpha / len(looks)
    half = math.log(found.high / found.low) / 2
    spread = half / t_quantile(found.pairs - 1, level=level) * math.sqrt(found.pairs)
    centre = abs(math.log(found.ratio))
    count = next((look for look in looks if look > found.pairs), 2 * found.pairs)
    while True:
        half = t_quantile(count - 1, level=level) * spread / math.sqrt(count)
        if half < centre or centre + half <= math.log1p(margin):
            return count
        count = next((look for look in looks if look > count), 2 * count)


def equivalent(a_logs: Sequence[float], b_logs: Sequence[float], *, margin: float, alpha: float = ALPHA) -> bool:
    """Two one-sided tests (TOST): whether the ratio is shown to lie within 1 / (1 + margin) and 1 + margin."""
    found = paired(a_logs, b_logs, looks=(max(1, len(a_logs)),), alpha=2 * alpha)
    return found.low > 1 / (1 + margin) and found.high < 1 + margin


def holm(found: Mapping[str, Difference], *, alpha: float = ALPHA) -> set[str]:
    """Which of several differences remain when all are judged together (Holm): one false one in 1 / alpha families."""
    remaining: set[str] = set()
    for place, (name, difference) in enumerate(sorted(found.items(), key=lambda item: item[1].p)):
        if difference.p > alpha / (len(found) - place):
            break
        if difference.decided:
            remaining.add(name)
    return remaining


def hodges_lehmann(values: Sequence[float]) -> float:
    """The median of the means of all pairs of values, each value with itself among them."""
    return median((values[i] + values[j]) / 2 for i in range(len(values)) for j in range(i, len(values)))


def t_tail(t: float, df: int) -> float:
    """Two-sided p value of Student's t, exactly, for a whole number of degrees of freedom (A&S 26.7.3 and 26.7.4)."""
    theta = math.atan(abs(t) / math.sqrt(df))
    sine, cosine = math.sin(theta), math.cos(theta)
    term = total = cosine if df % 2 else 1.0
    for k in range(3 if df % 2 else 2, df - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    if df % 2 == 0:
        return max(0.0, 1.0 - sine * total)
    return max(0.0, 1.0 - 2 / math.pi * (theta + (sine * total if df > 1 else 0.0)))


@lru_cache(maxsize=256)
def t_quantile(df: int, *, level: float) -> float:
    """The t beyond which, on both sides together, lies 1 - level."""
    low, high = 0.0, 1.0
    while t_tail(high, df) > 1 - level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, df) > 1 - level else (low, middle)
    return (low + high) / 2
