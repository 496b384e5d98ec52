"""`flatout doctor RUN`: run folders of our own, and of scripts that were watched."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.insight.conftest import Flatout
from tests.test_advice import ADVICE

from flatout.config import load
from flatout.cost import ModelShape, Rates, flops_per_token
from flatout.errors import UsageError
from flatout.insight.diagnose import runs
from flatout.insight.diagnose.host import finding_of
from flatout.record import Diagnosis, Outcome, Run, Span, StepExtra, StepRecord
from flatout.record.events import Ended, MicroBatchSearched

SHAPE = ModelShape(layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, intermediate=128, vocab=256, positions=128)
ENDED = Ended(outcome=Outcome(stopped_by="end"), verdicts=())
PEAK = 5e9  # such that 1000 tokens a second are a fifth of it
RATES = Rates(flops=flops_per_token(SHAPE, sequence_length=128), peak_flops=PEAK)


def made(
    folder: Path,
    *,
    spans: dict[str, float],
    decisions: dict[str, object] | None = None,
    peak_gib: float = 60.0,
    padded: int = 1000,
    bad_from: int | None = None,
    config: dict[str, object] | None = None,
    graphs: Sequence[int] = (),
    search: bool = False,
    tokens: int = 1000,
    gpu: str | None = "X",
    ram_gib: float | None = None,
) -> Run:
    plan = {
        "rates": RATES.to_json(),
        "decisions": {"workers": 2, "recompute": "none", "accumulation": 1, **(decisions or {})},
    }
    run = Run.create(
        folder,
        config_text="a: 1\n",
        config=config or {},
        plan=plan,
        hardware={"gpu": gpu, "ram_gib": ram_gib},
        environment={},
    )
    with run.lock(), run.recorder() as recorder:
        if search:
            recorder.event(MicroBatchSearched(trials=(), seconds=1.0, compile_seconds=0.0))
        for step in range(40):
            loss = math.nan if bad_from is not None and step >= bad_from else 4.0 - step / 40
            recorder.step(
                StepRecord(
                    attempt=recorder.attempt,
                    step=step,
                    time=float(step),
                    seconds=1.0,
                    tokens=tokens,
                    padded_tokens=padded if tokens == 1000 else tokens,
                    loss=loss,
                    spans=tuple(Span(phase=phase, seconds=seconds) for phase, seconds in spans.items()),
                    memory={"peak_gib": peak_gib, "total_gib": 80.0},
                    extra=StepExtra(graphs=graphs[min(step, len(graphs) - 1)] if graphs else None),
                )
            )
        recorder.event(ENDED)
    return run


PINNED = {"plan": {"micro_batch": 1}}
HEALTHY = {"data": 0.01, "forward": 0.3, "backward": 0.6, "optimize": 0.08}


def test_a_healthy_run_is_left_alone(tmp_path: Path) -> None:
    found = runs.diagnose(made(tmp_path, spans=HEALTHY))
    assert found.findings == ()
    assert found.limit["tokens_per_s"] == pytest.approx(1000)
    assert found.limit["share"] == pytest.approx(1000 * RATES.flops.done / PEAK)


def test_a_run_far_below_the_limit_is_told_where_its_time_went(tmp_path: Path) -> None:
    run = made(tmp_path, spans=HEALTHY, tokens=10)
    found = runs.diagnose(run)
    assert found.verdict == f"no cause found, but only {found.limit['share']:.1%} of the limit"
    (finding,) = found.findings
    assert finding.cause == "low-mfu"
    assert "backward 60.0 %, forward 30.0 %, optimize 8.0 %" in finding.evidence[0]
    assert "waiting for data (1.0 %)" in finding.evidence[1]
    assert "profile.steps" in finding.fix


@pytest.mark.parametrize(
    ("cause", "given"),
    [
        ("data-starvation", {"spans": {**HEALTHY, "data": 0.4, "backward": 0.2}}),
        ("evaluation", {"spans": {**HEALTHY, "eval": 0.3, "backward": 0.3}, "config": {"eval": {"every": 5}}}),
        ("checkpointing", {"spans": {**HEALTHY, "save": 0.3, "backward": 0.3}}),
        ("host-sync", {"spans": {**HEALTHY, "backward": 0.2}}),
        ("padding", {"spans": HEALTHY, "padded": 2000}),
        ("oom-risk", {"spans": HEALTHY, "peak_gib": 79.0}),
        ("needless-recompute", {"spans": HEALTHY, "peak_gib": 9.0, "decisions": {"recompute": "full"}}),
        ("small-batch", {"spans": HEALTHY, "peak_gib": 9.0, "decisions": {"accumulation": 16}, "config": PINNED}),
        ("recompiles", {"spans": HEALTHY, "graphs": [3, 3, 3, 5, 9, 12]}),
        ("unstable-loss", {"spans": HEALTHY, "bad_from": 30, "config": {"train": {"lr": 6e-4}}}),
    ],
)
def test_what_a_run_shows_is_named(tmp_path: Path, cause: str, given: dict) -> None:
    found = runs.diagnose(made(tmp_path, **given))
    assert [finding.cause for finding in found.findings] == [cause]
    assert found.findings[0].evidence
    for key, value in ADVICE.findall(found.findings[0].fix):
        load(
            None, overrides=["model.layers=1", "model.hidden=64", "model.heads=1", "train.steps=100", f"{key}={value}"]
        )


@pytest.mark.parametrize("gpu", ["X", None])
def test_recomputation_and_small_micro_batches_are_both_named(tmp_path: Path, gpu: str | None) -> None:
    decisions = {"recompute": "full", "accumulation": 16}
    found = runs.diagnose(made(tmp_path, spans=HEALTHY, peak_gib=9.0, decisions=decisions, config=PINNED, gpu=gpu))
    assert {finding.cause for finding in found.findings} == {"needless-recompute", "small-batch"}


def test_a_container_with_less_memory_than_its_host_is_not_called_empty(tmp_path: Path) -> None:
    given: Any = {"spans": HEALTHY, "peak_gib": 9.0, "decisions": {"recompute": "full"}, "gpu": None}
    assert not runs.diagnose(made(tmp_path / "some", **given, ram_gib=12.0)).findings
    (finding,) = runs.diagnose(made(tmp_path / "little", **given, ram_gib=9.2)).findings
    assert finding.cause == "oom-risk"


@pytest.mark.parametrize(
    "given",
    [
        {"peak_gib": 9.0, "decisions": {"accumulation": 16}},  # the plan took the size
        {"peak_gib": 9.0, "decisions": {"accumulation": 16}, "config": PINNED, "search": True},  # it was measured
        {"graphs": [3, 3, 3, 3, 6]},  # the first evaluation
        {"graphs": [3, 9, 20, 20]},  # the warm-up
        {"spans": {**HEALTHY, "forward": 0.36}},  # two clocks that disagree: the phases are longer than the steps
    ],
)
def test_what_is_as_it_should_be_is_no_finding(tmp_path: Path, given: dict) -> None:
    assert runs.diagnose(made(tmp_path, **{"spans": HEALTHY, **given})).findings == ()


def test_a_share_is_positive_or_none() -> None:
    for share, kept in ((0.2, 0.2), (-0.026, None), (0.0, None), (None, None)):
        assert finding_of("host-sync", "s", share, None, [], "f").share == kept


def falling(folder: Path, *, to: float, steps: int) -> Run:
    """A validation loss that falls evenly to that value, in a run with a target of 3."""
    config = {"target": {"val_loss": 3.0}, "train": {"lr": 1e-5, "warmup_steps": 0, "batch_tokens": 65536}}
    run = made(folder, spans=HEALTHY, config=config)
    with run.lock(), run.recorder() as recorder:
        recorder.event("start", total_steps=steps)
        for step in range(10, 41, 5):
            recorder.event("eval", step=step, val_loss=to + (40 - step) * 0.01)
        recorder.event(ENDED)
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
    with pytest.raises(UsageError, match="run the doctor on the script again"):
        runs.diagnose(run)
    said = Diagnosis(verdict="no problem found, 50.0% of the limit", limit={"share": 0.5}, findings=())
    run.write_diagnosis(said)
    assert runs.diagnose(run) == said


def test_too_few_steps_say_nothing(tmp_path: Path) -> None:
    run = Run.create(tmp_path, config_text="a: 1\n", config={}, plan={}, hardware={}, environment={})
    with pytest.raises(UsageError, match="too few steps"):
        runs.diagnose(run)


@pytest.mark.parametrize("arguments", ["--prove --log train.log", "run other"])
def test_a_log_cannot_be_proved_and_one_folder_is_diagnosed(flatout: Flatout, tmp_path: Path, arguments: str) -> None:
    made(tmp_path / "run", spans=HEALTHY)
    code, _, err = flatout("doctor", *arguments.split())
    assert code == 2
    why = "--prove runs the training again" if "--prove" in arguments else "give one run folder at a time"
    assert why in " ".join(err.split())


@pytest.mark.parametrize("arguments", ["run --json -", "--json - run", "run --steps 9 --json -", "--json=- run"])
def test_options_stand_on_either_side_of_a_run_folder(flatout: Flatout, tmp_path: Path, arguments: str) -> None:
    made(tmp_path / "run", spans=HEALTHY)
    code, out, err = flatout("doctor", *arguments.split())
    assert (code, err) == (0, "")
    assert json.loads(out)["findings"] == []


def test_options_behind_a_command_are_the_command_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flatout.cli import app
    from flatout.insight import doctor

    given: list[object] = []

    def main(what: Sequence[str], *, json_to: str | None, **_: object) -> int:
        given.append((what, json_to))
        return 0

    monkeypatch.setattr(doctor, "main", main)
    monkeypatch.chdir(tmp_path)
    for command in ("--json - -- python x.py --json y", "--json - python x.py --json y"):
        app(["doctor", *command.split()], standalone_mode=False)
    assert given == [(["python", "x.py", "--json", "y"], "-")] * 2
