import pytest

from flatout.recipes.validation import since_best

NAN = float("nan")


@pytest.mark.parametrize(
    ("losses", "min_delta", "expected"),
    [
        ([], 0.0, 0),
        ([3.0], 0.0, 0),
        ([3.0, 2.0, 1.0], 0.0, 0),
        ([3.0, 3.0, 3.0], 0.0, 2),
        ([3.0, 2.95, 2.9], 0.2, 2),
        ([3.0, 2.0, 2.5, 2.4], 0.0, 2),
        ([3.0, NAN, NAN], 0.0, 2),
        ([NAN, 3.0], 0.0, 0),
    ],
)
def test_a_plateau_and_a_nan_are_no_improvement(losses: list[float], min_delta: float, expected: int) -> None:
    assert since_best(losses, min_delta) == expected
