from pathlib import Path

import pytest

from flatout.record import Run, Span, StepExtra, StepRecord


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(
        tmp_path / "run",
        config_text="recipe: pretrain\n",
        config={"recipe": "pretrain"},
        plan={"micro_batch": 4},
        hardware={"gpu": None},
        environment={"python": "3.11"},
    )


@pytest.fixture
def make_step():
    def make(step: int, *, attempt: int = 1, loss: float | None = 2.0, **changes) -> StepRecord:
        values = {
            "attempt": attempt,
            "step": step,
            "time": 1000.0 + step,
            "seconds": 0.5,
            "tokens": 100,
            "padded_tokens": 128,
            "loss": loss,
            "spans": (Span(phase="forward", seconds=0.2), Span(phase="forward", seconds=0.1, role="critic", tokens=7)),
            "memory": {"peak_gib": 1.5},
            "utilisation": {"cpu": 0.5},
            "extra": StepExtra(lr=1e-3, metrics={"kl": 0.5}),
        }
        return StepRecord(**{**values, **changes})

    return make
