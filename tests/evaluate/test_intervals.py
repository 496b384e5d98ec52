"""Intervals against known values, and against what they promise: to hold the truth 95 times in 100."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.evaluate.intervals import bootstrap, mcnemar, mean_interval, paired, ratio_interval, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Newcombe 1998, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_published(successes: int, n: int, low: float, high: float) -> None:
    interval = wilson(successes, n)
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


@given(st.integers(min_value=1, max_value=5000), st.data())
def test_wilson_holds_the_share(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(min_value=0, max_value=n))
    interval = wilson(successes, n)
    assert 0 <= interval.low <= successes / n + 1e-12
    assert successes / n - 1e-12 <= interval.high <= 1
    assert interval.low < interval.high


def test_an_impossible_share_is_refused() -> None:
    with pytest.raises(ValueError, match="3 of 2"):
        wilson(3, 2)


def test_a_single_value_has_no_interval() -> None:
    assert mean_interval([0.3]) is None
    assert ratio_interval([2.0], [5.0]) is None
    assert paired([1.0], [0.0]) is None


def test_resampling_holds_the_truth_about_as_often_as_it_says() -> None:
    chance, held = random.Random(1), 0
    for _ in range(60):
        interval = bootstrap([chance.gauss(5, 2) for _ in range(40)], lambda drawn: sum(drawn) / len(drawn))
        assert interval is not None
        held += interval.low <= 5 <= interval.high
    assert 50 <= held <= 60


def test_resampling_is_the_same_every_time() -> None:
    values = [0.1, 0.5, 0.9, 0.2]
    assert mean_interval(values) == mean_interval(values)


def test_pairs_say_more_than_two_intervals() -> None:
    chance = random.Random(0)
    first = [float(chance.random() < 0.5) for _ in range(300)]
    second = [1.0 if a == 0 and chance.random() < 0.15 else a for a in first]
    apart = [mean_interval(first), mean_interval(second)]
    assert apart[0] is not None
    assert apart[1] is not None
    assert apart[0].high > apart[1].low, "the intervals alone overlap"
    difference = paired(first, second)
    assert difference is not None
    assert difference.low > 0
    assert difference.value == pytest.approx((sum(second) - sum(first)) / 300)
    assert difference.p is not None
    assert difference.p < 1e-3


def test_graded_rewards_have_no_mcnemar() -> None:
    difference = paired([0.5, 0.0, 1.0], [0.5, 0.5, 1.0])
    assert difference is not None
    assert difference.p is None


@pytest.mark.parametrize(("gained", "lost", "p"), [(0, 0, 1.0), (5, 5, 1.0), (1, 9, 22 / 1024), (10, 0, 2 / 1024)])
def test_mcnemar_by_hand(gained: int, lost: int, p: float) -> None:
    assert mcnemar(gained, lost) == pytest.approx(p)
    assert mcnemar(lost, gained) == pytest.approx(p)
