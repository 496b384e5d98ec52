"""How numbers are printed for people."""

import pytest

from flatout import words


@pytest.mark.parametrize(
    ("value", "text"), [(-0.0001, "0.0 %"), (0.0, "0.0 %"), (-0.012, "-1.2 %"), (0.5, "50.0 %"), (None, "n/a")]
)
def test_a_share_is_never_minus_zero(value: float | None, text: str) -> None:
    assert words.percent(value) == text


def test_one_thing_is_not_several() -> None:
    assert [words.counted(n, "thread") for n in (1, 2, 1000)] == ["1 thread", "2 threads", "1,000 threads"]
