import pytest

from flatout.config.settings import TrainSettings
from flatout.optim import schedule


def test_cosine_warms_up_and_ends_at_the_floor() -> None:
    rate = schedule(TrainSettings(lr=1.0, warmup_steps=10, min_lr_ratio=0.1), total_steps=100)
    assert rate(0) == pytest.approx(1 / 11)
    assert rate(10) == pytest.approx(1.0)
    assert rate(99) == pytest.approx(0.1)
    values = [rate(step) for step in range(10, 100)]
    assert values == sorted(values, reverse=True)


def test_wsd_is_flat_then_falls_linearly() -> None:
    train = TrainSettings(lr=1.0, warmup_steps=5, schedule="wsd", decay_share=0.2, min_lr_ratio=0.0)
    rate = schedule(train, total_steps=100)
    assert rate(5) == rate(50) == rate(79) == 1.0
    assert rate(89) == pytest.approx(0.5)
    assert rate(99) == 0.0


def test_constant_stays() -> None:
    rate = schedule(TrainSettings(lr=0.5, schedule="constant"), total_steps=10)
    assert {rate(step) for step in range(10)} == {0.5}
