from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from flatout.config.settings import CriteriaSettings
from flatout.cost import Flops, Rates
from flatout.record import WARM_STEPS, Outcome, Span, Speed, StepRecord, Verdict
from flatout.verdict import LossTrend, Speedometer, judge

RATES = Rates(flops=Flops(forward=1.0, backward=2.0, recomputed=1.0, common=4.0), peak_flops=1000.0)


def step(seconds: float, **phases: float) -> StepRecord:
    spans = tuple(Span(phase=phase, seconds=spent) for phase, spent in phases.items())
    return StepRecord(
        attempt=0, step=0, time=0.0, seconds=seconds, tokens=100, padded_tokens=100, loss=1.0, spans=spans
    )


# Speed


def test_warm_up_is_not_speed() -> None:
    meter = Speedometer(RATES)
    for _ in range(WARM_STEPS):
        meter.see(step(1000.0))
    assert meter.read() == Speed(steps=0)
    assert meter.read().tokens_per_s is None

    meter.see(step(2.0))
    meter.see(step(0.5))
    assert meter.read().steps == 2
    assert meter.read().tokens_per_s == pytest.approx(200 / 2.5)
    assert meter.read().step_s == pytest.approx(1.25)


@pytest.mark.parametrize("phase", ["eval", "save", "profile"])
def test_what_is_beside_training_does_not_slow_it(phase: str) -> None:
    meter = Speedometer(RATES, warm_steps=0)
    meter.see(step(1.0, forward=1.0))
    meter.see(step(10.0, forward=1.0, **{phase: 9.0}))
    speed = meter.read()
    assert speed.tokens_per_s == pytest.approx(100.0)
    assert speed.unattributed_share == pytest.approx(0.0)


def test_shares_of_the_peak_and_of_the_step() -> None:
    meter = Speedometer(RATES, warm_steps=0)
    meter.see(step(1.0, data=0.1, forward=0.3, backward=0.5))
    meter.see(step(3.0, data=0.1, forward=0.3, backward=0.5, save=2.0))
    speed = meter.read()
    assert (speed.mfu, speed.hfu, speed.mfu_common) == pytest.approx((0.3, 0.4, 0.4))
    assert speed.data_share == pytest.approx(0.2 / 2.0)
    assert speed.unattributed_share == pytest.approx(0.2 / 4.0)


def test_an_unknown_peak_leaves_the_speed_known() -> None:
    meter = Speedometer(Rates(flops=RATES.flops, peak_flops=None), warm_steps=0)
    meter.see(step(1.0))
    assert (meter.read().mfu, meter.read().hfu, meter.read().mfu_common) == (None, None, None)
    assert meter.read().tokens_per_s == pytest.approx(100.0)


# Verdicts


def outcome(*, speed: Speed | None = None, **known: Any) -> Outcome:
    return Outcome(stopped_by="end", steps=10, tokens=1000, hours=2.0, speed=speed or Speed(steps=0), **known)


FAST = Speed(steps=5, tokens_per_s=1000.0, mfu=0.3, mfu_common=0.4)


@pytest.mark.parametrize(
    ("criterion", "met", "missed", "known"),
    [
        ("tokens_per_s", 1000.0, 1001.0, {"speed": FAST}),
        # The common convention, not the headline's 0.3.
        ("mfu", 0.4, 0.41, {"speed": FAST}),
        ("utilisation", 0.9, 0.95, {"utilisation": 0.9}),
        ("memory_share", 0.8, 0.79, {"memory_share": 0.8}),
        ("hours", 2.0, 1.9, {}),
        ("saves", 3, 4, {"saves": 3}),
        ("loss_falling", True, False, {"loss_first_tenth": 5.0, "loss_last_tenth": 4.0}),
        ("loss_falling", False, True, {"loss_first_tenth": 4.0, "loss_last_tenth": 4.0}),
        # The ends count, not the best in between.
        ("validation_improving", True, False, {"val_losses": (3.0, 1.0, 2.9)}),
        ("validation_improving", False, True, {"val_losses": (3.0, 2.0, 3.1)}),
        ("validation_improving", True, False, {"task_scores": (0.1, 0.0, 0.3)}),
        ("validation_improving", False, True, {"task_scores": (0.3, 0.4, 0.3)}),
        ("validation_improving", True, False, {"val_losses": (3.0, 2.9), "task_scores": (0.3, 0.1)}),
    ],
)
def test_a_criterion_is_met_up_to_its_value(criterion: str, met: Any, missed: Any, known: dict[str, Any]) -> None:
    for wanted, expected in ((met, True), (missed, False)):
        (verdict,) = judge(CriteriaSettings(**{criterion: wanted}), outcome(**known))
        assert (verdict.criterion, verdict.met) == (criterion, expected)


@pytest.mark.parametrize(
    ("criterion", "wanted"),
    [
        ("tokens_per_s", 1.0),
        ("mfu", 0.1),
        ("utilisation", 0.1),
        ("memory_share", 0.9),
        ("loss_falling", True),
        ("validation_improving", False),
    ],
)
def test_what_was_not_measured_is_neither_met_nor_missed(criterion: str, wanted: Any) -> None:
    (verdict,) = judge(CriteriaSettings(**{criterion: wanted}), outcome(val_losses=(3.0,)))
    assert (verdict.met, verdict.got) == (None, "not measured")


def test_the_wording_says_which_way_a_criterion_goes() -> None:
    known = outcome(speed=FAST, loss_first_tenth=5.0, loss_last_tenth=4.25)
    asked = CriteriaSettings(tokens_per_s=1500, hours=8, loss_falling=True)
    assert judge(asked, known) == [
        Verdict(criterion="tokens_per_s", wanted="at least 1,500 in total", got="1,000", met=False),
        Verdict(criterion="hours", wanted="at most 8", got="2", met=True),
        Verdict(criterion="loss_falling", wanted="true", got="5.0000 to 4.2500", met=True),
    ]


def test_no_criteria_no_verdicts_and_none_is_forgotten() -> None:
    assert judge(CriteriaSettings(), outcome()) == []
    every: dict[str, Any] = {
        f.name: True if f.name in ("loss_falling", "validation_improving") else 1 for f in fields(CriteriaSettings)
    }
    assert [v.criterion for v in judge(CriteriaSettings(**every), outcome())] == list(every)


# Losses


def trend(losses: list[float]) -> tuple[float | None, float | None]:
    seen = LossTrend()
    for loss in losses:
        seen.see(loss)
    return seen.ends()


def test_a_trend_is_the_means_of_the_first_and_the_last_tenth_of_what_was_done() -> None:
    assert trend([float(n) for n in range(30)]) == (1.0, 28.0)
    assert trend([float(n) for n in range(10)]) == (0.0, 9.0)
    assert trend([3.0, 2.0, 1.0]) == (3.0, 1.0)


def test_one_step_is_no_trend() -> None:
    assert trend([]) == (None, None)
    assert trend([3.0]) == (None, None)
