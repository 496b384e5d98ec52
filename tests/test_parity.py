"""The statistics of step times: their level under noise, drift and spikes, and what they find."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from flatout.parity import LOOKS, enough, equivalent, hodges_lehmann, holm, paired, t_quantile, t_tail, typical

TRIALS, STEPS = 2_000, 12
Noise = Callable[[np.random.Generator, int], np.ndarray]


def iid(random: np.random.Generator, trials: int) -> np.ndarray:
    return random.normal(0, 0.02, (trials, 2 * LOOKS[-1], 1)) + random.normal(0, 0.05, (trials, 2 * LOOKS[-1], STEPS))


def drift(random: np.random.Generator, trials: int) -> np.ndarray:
    """Each trial becomes slower or faster as it goes, by up to 40 % in all."""
    slope = random.uniform(-0.34, 0.34, (trials, 1, 1)) / (2 * LOOKS[-1])
    return iid(random, trials) + slope * np.arange(2 * LOOKS[-1])[None, :, None]


def spikes(random: np.random.Generator, trials: int) -> np.ndarray:
    """One step in ten takes up to five times as long."""
    return iid(random, trials) + (random.random((trials, 2 * LOOKS[-1], STEPS)) < 0.1) * random.uniform(0, 1.6)


def slow_runs(random: np.random.Generator, trials: int) -> np.ndarray:
    """And one run in twenty is slower as a whole, by up to 65 %."""
    return spikes(random, trials) + (random.random((trials, 2 * LOOKS[-1], 1)) < 0.05) * random.uniform(0, 0.5)


def measured(noise: Noise, *, seed: int, trials: int, effect: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """The measurements of A and B in ABBA order; B takes `effect` more, as a logarithm."""
    blocks = np.median(noise(np.random.default_rng(seed), trials), axis=2).reshape(trials, LOOKS[-1], 2)
    a = np.where(np.arange(LOOKS[-1]) % 2 == 0, blocks[..., 0], blocks[..., 1])
    b = np.where(np.arange(LOOKS[-1]) % 2 == 0, blocks[..., 1], blocks[..., 0])
    return a, b + effect


def stopped(a: np.ndarray, b: np.ndarray) -> str:
    """The verdict of somebody who stops at the first look that decides."""
    for look in LOOKS:
        found = paired(a[:look].tolist(), b[:look].tolist())
        if found.decided:
            break
    return found.verdict


@pytest.mark.parametrize("noise", [iid, drift, spikes, slow_runs])
def test_no_difference_is_decided_in_at_most_one_trial_of_twenty(noise: Noise) -> None:
    a, b = measured(noise, seed=1, trials=TRIALS)
    wrong = sum(stopped(*pair) in ("faster", "slower") for pair in zip(a, b, strict=True))
    assert wrong <= 0.05 * TRIALS


@pytest.mark.parametrize("noise", [iid, drift, spikes])
def test_a_gain_of_five_percent_is_found(noise: Noise) -> None:
    a, b = measured(noise, seed=2, trials=200, effect=math.log(0.95))
    assert sum(stopped(*pair) == "faster" for pair in zip(a, b, strict=True)) >= 190


@pytest.mark.parametrize("pairs", [3, 5, 10])
def test_a_single_look_keeps_its_level_too(pairs: int) -> None:
    """Its level is 5 % exactly, so two standard errors of the simulation are allowed."""
    a, b = measured(spikes, seed=3, trials=TRIALS)
    both = ((x[:pairs].tolist(), y[:pairs].tolist()) for x, y in zip(a, b, strict=True))
    most = 0.05 * TRIALS + 2 * math.sqrt(0.05 * 0.95 * TRIALS)
    assert sum(paired(x, y, looks=(pairs,)).decided for x, y in both) <= most


def test_between_two_looks_the_answer_is_that_of_the_last_one() -> None:
    a, b = (values[0].tolist() for values in measured(iid, seed=4, trials=1))
    at_four = paired(a[:4], b[:4])
    assert all(paired(a[:n], b[:n]).ratio == at_four.ratio for n in (5, 6, 7))
    assert paired(a[:3], b[:3]).verdict == "too few pairs"
    assert (paired(a[:3], b[:3]).needed_more, paired(a[:16], b[:16]).needed_more) == (1, 0)


def test_noise_is_told_from_no_effect() -> None:
    quiet, loud = [0.0, 0.001, -0.001, 0.0], [0.0, 0.4, -0.4, 0.1]
    nothing = [0.0] * 4
    assert paired(nothing, quiet).verdict == "no effect shown"
    assert (paired(nothing, loud).verdict, paired(nothing, loud).needed_more) == ("too noisy to tell", 4)
    shifted = [value - 0.02 for value in quiet]
    assert paired(nothing, shifted).verdict == "faster"
    assert paired(nothing, shifted, floor=0.05).verdict == "no effect shown", "smaller than what A against A shows"


def test_two_pairs_have_no_interval() -> None:
    found = paired([0.0, 0.0], [-0.5, -0.5], looks=(2,))
    assert (found.verdict, found.low, found.high) == ("too few pairs", 0.0, math.inf)


def test_the_same_thing_twice_is_no_difference() -> None:
    found = paired([1.0] * 4, [1.0] * 4)
    assert (found.verdict, found.p, found.ratio) == ("no effect shown", 1.0, 1.0)


def test_equivalence_needs_evidence_and_not_its_absence() -> None:
    nothing, quiet, loud = [0.0] * 5, [0.001, -0.002, 0.001, 0.0, 0.0], [0.1, -0.1, 0.1, 0.0, -0.1]
    assert equivalent(nothing, quiet, margin=0.01)
    assert not equivalent(nothing, loud, margin=0.01)
    assert not equivalent(nothing[:2], quiet[:2], margin=0.01)


def test_several_knobs_share_one_error() -> None:
    random = np.random.default_rng(5)
    families = 0
    for _ in range(400):
        found = {
            str(knob): paired([0.0] * 8, random.normal(0, 0.02, 8).tolist(), looks=(8,), margin=0.0)
            for knob in range(6)
        }
        families += bool(holm(found))
    assert families <= 0.05 * 400 + 2 * math.sqrt(0.05 * 0.95 * 400)
    true = paired([0.0] * 8, random.normal(-0.2, 0.02, 8).tolist(), looks=(8,))
    assert holm({"true": true, "false": paired([0.0] * 8, random.normal(0, 0.02, 8).tolist())}) == {"true"}


@pytest.mark.parametrize(
    ("df", "level", "table"),
    [(1, 0.95, 12.706), (2, 0.95, 4.303), (3, 0.95, 3.182), (7, 0.99, 3.499), (15, 0.9, 1.753)],
)
def test_quantiles_are_those_of_the_tables(df: int, level: float, table: float) -> None:
    assert t_quantile(df, level=level) == pytest.approx(table, abs=6e-4)
    assert t_tail(table, df) == pytest.approx(1 - level, abs=1e-4)


def test_one_spike_moves_neither_the_median_nor_hodges_lehmann() -> None:
    assert typical([1.0, 1.0, 1.0, 1.0, 50.0]) == 0.0
    assert hodges_lehmann([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 9.0]) == pytest.approx(0.1)


@pytest.mark.parametrize(("a", "b"), [([0.0], [0.0, 0.0]), ([float("nan")] * 4, [0.0] * 4)])
def test_what_is_no_pair_is_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match=r"pair|finite"):
        paired(a, b)


@pytest.mark.parametrize(("effect", "noise"), [(0.05, 0.03), (0.02, 0.03), (0.0, 0.03), (0.0, 0.1)])
def test_as_many_pairs_as_were_said_to_be_enough_decide(effect: float, noise: float) -> None:
    """In most cases: the spread and the effect are known from eight pairs only."""
    random, decided, said = np.random.default_rng(0), 0, []
    while len(said) < 200:
        found = paired([0.0] * 8, list(random.normal(effect, noise, 8)), looks=(4, 8, 16))
        if found.verdict != "too noisy to tell":
            continue
        said.append(count := enough(found))
        assert count > 8
        true = paired([0.0] * count, list(random.normal(math.log(found.ratio), noise, count)), looks=(4, 8, count))
        decided += true.verdict != "too noisy to tell"
    assert decided >= 120, decided


def test_without_an_interval_nothing_is_known_of_how_many_are_enough() -> None:
    assert enough(paired([0.0, 0.0], [0.1, 0.2])) is None
    assert enough(paired([0.0] * 4, [0.1] * 4)) == 8, "what is certain already stays so at the next look"
