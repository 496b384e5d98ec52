"""`flatout doctor RUN`: run folders of our own, and of scripts that were watched."""

import math
from pathlib import Path

import pytest

from flatout.cost import ModelShape, Rates, flops_per_token
from flatout.errors import UsageError
from flatout.insight.diagnose import runs
from flatout.record import Diagnosis, Run, Span, StepRecord

SHAPE = ModelShape(layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, intermediate=128, vocab=256, positions=128)
RATES = Rates(flops=flops_per_token(SHAPE, sequence_length=128), peak_flops=1e12)


def made(
    folder: Path,
    *,
    spans: dict[str, float],
    decisions: dict[str, object] | None = None,
    peak_gib: float = 60.0,
    padded: int = 1000,
    bad_from: int | None = None,
    config: dict[str, object] | None = None,
) -> Run:
    plan = {
        "rates": RATES.to_json(),
        "decisions": {"workers": 2, "recompute": "none", "accumulation": 1, **(decisions or {})},
    }
    run = Run.create(folder, config_text="a: 1\n", config=config or {}, plan=plan, hardware={}, environment={})
    with run.lock(), run.recorder() as recorder:
        for step in range(40):
            loss = math.nan if bad_from is not None and step >= bad_from else 4.0 - step / 40
            recorder.step(
                StepRecord(
                    attempt=recorder.attempt,
                    step=step,
                    time=float(step),
                    seconds=1.0,
                    tokens=1000,
                    padded_tokens=padded,
                    loss=loss,
                    spans=tuple(Span(phase=phase, seconds=seconds) for phase, seconds in spans.items()),
                    memory={"peak_gib": peak_gib, "total_gib": 80.0},
                )
            )
    return run


HEALTHY = {"data": 0.01, "forward": 0.3, "backward": 0.6, "optimize": 0.08}


def test_a_healthy_run_is_left_alone(tmp_path: Path) -> None:
    found = runs.diagnose(made(tmp_path, spans=HEALTHY))
    assert found.findings == ()
    assert found.limit["tokens_per_s"] == pytest.approx(1000)
    assert found.limit["share"] == pytest.approx(1000 * RATES.flops.done / 1e12)


@pytest.mark.parametrize(
    ("cause", "given"),
    [
        ("data-starvation", {"spans": {**HEALTHY, "data": 0.4, "backward": 0.2}}),
        ("evaluation", {"spans": {**HEALTHY, "eval": 0.3, "backward": 0.3}}),
        ("checkpointing", {"spans": {**HEALTHY, "save": 0.3, "backward": 0.3}}),
        ("host-sync", {"spans": {**HEALTHY, "backward": 0.2}}),
        ("padding", {"spans": HEALTHY, "padded": 2000}),
        ("oom-risk", {"spans": HEALTHY, "peak_gib": 79.0}),
        ("needless-recompute", {"spans": HEALTHY, "peak_gib": 9.0, "decisions": {"recompute": "full"}}),
        ("small-batch", {"spans": HEALTHY, "peak_gib": 9.0, "decisions": {"accumulation": 16}}),
        ("unstable-loss", {"spans": HEALTHY, "bad_from": 30}),
    ],
)
def test_what_a_run_shows_is_named(tmp_path: Path, cause: str, given: dict) -> None:
    found = runs.diagnose(made(tmp_path, **given))
    assert [finding.cause for finding in found.findings] == [cause]
    assert found.findings[0].evidence


def falling(folder: Path, *, to: float, steps: int) -> Run:
    """A validation loss that falls evenly to that value, in a run with a target of 3."""
    config = {"target": {"val_loss": 3.0}, "train": {"lr": 1e-5, "warmup_steps": 0, "batch_tokens": 65536}}
    run = made(folder, spans=HEALTHY, config=config)
    with run.lock(), run.recorder() as recorder:
        recorder.event("start", total_steps=steps)
        for step in range(10, 41, 5):
            recorder.event("eval", step=step, val_loss=to + (40 - step) * 0.01)
    return run


def test_a_target_out_of_reach_is_slow_convergence(tmp_path: Path) -> None:
    found = runs.diagnose(falling(tmp_path / "late", to=3.5, steps=60))
    assert [finding.cause for finding in found.findings] == ["slow-convergence"]
    assert "needs 50 more" in found.findings[0].evidence[0]
    assert "train.lr=1e-05" in found.findings[0].evidence[1]


def test_a_target_within_reach_or_reached_is_none(tmp_path: Path) -> None:
    assert runs.diagnose(falling(tmp_path / "longer", to=3.5, steps=100)).findings == ()
    assert runs.diagnose(falling(tmp_path / "there", to=2.9, steps=60)).findings == ()


def test_a_watched_script_keeps_what_was_said(tmp_path: Path) -> None:
    run = Run.create(tmp_path, config_text="a: 1\n", config={}, plan={"foreign": True}, hardware={}, environment={})
    with pytest.raises(UsageError, match="watch it again"):
        runs.diagnose(run)
    said = Diagnosis(verdict="nothing is wrong, 50.0% of the limit", limit={"share": 0.5}, findings=())
    run.write_diagnosis(said)
    assert runs.diagnose(run) == said


def test_too_few_steps_say_nothing(tmp_path: Path) -> None:
    run = Run.create(tmp_path, config_text="a: 1\n", config={}, plan={}, hardware={}, environment={})
    with pytest.raises(UsageError, match="too few steps"):
        runs.diagnose(run)
