"""Runs against each other: what is faster, what learns better, and what the evidence does not decide."""

from __future__ import annotations

import html
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flatout.cli import app
from flatout.errors import UsageError
from flatout.insight.compare import compare, loss_before, sides_of
from flatout.insight.report import render
from flatout.insight.story import tell
from flatout.record import WARM_STEPS, Run, Span, StepRecord

TOKENS = 1000


def made(
    folder: Path,
    *,
    seed: int = 0,
    lr: float = 1e-3,
    step_s: float = 0.1,
    loss: float = 1.0,
    steps: int = 160,
    start: float = 1.0,
    **facts: Any,
) -> Run:
    """A run whose steps scatter by 2 %, the first ones `start` times as long, and whose loss falls with the tokens."""
    chance = random.Random(f"{folder.name}{seed}")
    config = {"recipe": "pretrain", "seed": seed, "train": {"lr": lr}}
    run = Run.create(
        folder, config_text="", **{"config": config, "plan": {}, "hardware": {}, "environment": {}, **facts}
    )
    with run.recorder() as recorder:
        for step in range(steps):
            seconds = step_s * math.exp(chance.gauss(0, 0.02)) * (start if step < WARM_STEPS else 1)
            recorder.step(
                StepRecord(
                    attempt=recorder.attempt,
                    step=step,
                    time=1.79e9 + step,
                    seconds=seconds,
                    tokens=TOKENS,
                    padded_tokens=TOKENS,
                    loss=loss * (2 + 3 / (1 + step / 20)) * math.exp(chance.gauss(0, 0.001)),
                    spans=(Span(phase="forward", seconds=seconds / 2),),
                    memory={"peak_gib": 2.0 if lr == 1e-3 else 3.0},
                )
            )
    return run


def test_a_faster_run_is_called_faster(tmp_path: Path) -> None:
    found = compare([made(tmp_path / "a"), made(tmp_path / "b", lr=2e-3, step_s=0.08, start=20.0)], price=3.0)
    (against,) = found.against
    assert against.time.verdict == "faster"
    assert against.time.ratio == pytest.approx(0.8, rel=0.01)
    assert (against.unit, against.time.pairs) == ("blocks of 10 steps", 15)
    assert (against.loss, against.loss_verdict) == (None, "not enough evidence")
    first, second = found.sides
    assert second.tokens_per_s == pytest.approx(1.25 * (first.tokens_per_s or 0), rel=0.02)
    assert (first.peak_gib, second.peak_gib) == (2.0, 3.0)
    assert second.phases["forward"] == pytest.approx(0.04, rel=0.02)
    assert first.cost == pytest.approx(3.0 * 16 / 3600, rel=0.02)
    assert list(found.settings) == [("train.lr", [1e-3, 2e-3])]


def test_the_same_thing_twice_is_not_faster(tmp_path: Path) -> None:
    found = compare([made(tmp_path / "a"), made(tmp_path / "b", lr=2e-3)])
    assert found.against[0].time.verdict == "no effect shown"


def test_losses_are_those_at_equal_tokens_and_at_equal_time(tmp_path: Path) -> None:
    slow, fast = made(tmp_path / "a"), made(tmp_path / "b", lr=2e-3, step_s=0.05, steps=320)
    found = compare([slow, fast])
    assert found.tokens == 160 * TOKENS
    assert found.seconds == pytest.approx(16, rel=0.02)
    first, second = found.sides
    assert second.loss_at_equal_tokens == pytest.approx(first.loss_at_equal_tokens, rel=1e-3)
    assert (second.loss_at_equal_time or 9) < 0.93 * (first.loss_at_equal_time or 0)
    by_hand = [step.loss for step in fast.latest_steps() if 144 <= step.step < 160]
    assert loss_before(tell(fast), tokens=160 * TOKENS) == pytest.approx(sum(map(float, by_hand)) / 16, rel=5e-3)


@pytest.mark.parametrize(("loss", "verdict"), [(1.0, "equal"), (1.004, "equal"), (1.03, "higher"), (0.97, "lower")])
def test_runs_that_differ_in_their_seed_are_repeats(tmp_path: Path, loss: float, verdict: str) -> None:
    runs = [
        made(tmp_path / f"{name}{seed}", seed=seed, lr=lr, loss=factor, step_s=step_s)
        for name, lr, factor, step_s in (("a", 1e-3, 1.0, 0.1), ("b", 2e-3, loss, 0.09))
        for seed in range(3)
    ]
    found = compare(runs)
    assert [(side.name, side.runs) for side in found.sides] == [("a0", 3), ("b0", 3)]
    (against,) = found.against
    assert (against.unit, against.time.pairs, against.time.verdict) == ("runs", 3, "faster")
    assert against.loss_verdict == verdict
    assert against.loss is not None
    assert against.loss.low <= loss <= against.loss.high or abs(against.loss.ratio - loss) < 2e-3


def test_a_loss_that_is_not_positive_gets_no_verdict(tmp_path: Path) -> None:
    runs = [made(tmp_path / f"{lr}-{seed}", seed=seed, lr=lr, loss=-1.0) for lr in (1e-3, 2e-3) for seed in range(3)]
    (against,) = compare(runs).against
    assert (against.loss, against.loss_verdict) == (None, "not enough evidence")


def test_few_steps_decide_nothing(tmp_path: Path) -> None:
    found = compare([made(tmp_path / "a", steps=20), made(tmp_path / "b", lr=2e-3, step_s=0.01, steps=20)])
    assert found.against[0].time.verdict == "too few pairs"
    assert found.to_json()["against"][0]["time"]["high"] is None


def test_equal_names_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    runs = [made(tmp_path / "run"), made(tmp_path / "x" / "run", lr=2e-3)]
    sides = sides_of(runs, [tell(run) for run in runs])
    assert [side.name for side in sides] == ["run", "run (2)"]


def said(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    return done.exit_code, done.output


def test_what_the_command_says(tmp_path: Path) -> None:
    runs = [made(tmp_path / "a"), made(tmp_path / "b", lr=2e-3, step_s=0.08)]
    code, text = said(*(run.path for run in runs), "--price", 3)
    assert code == 0
    for part in ("train.lr", "b against a:", "Speed: faster; 1.2", "did not take turns", "three runs of each", "cost"):
        assert part in text
    code, text = said(*(run.path for run in runs), "--json")
    read: dict[str, Any] = json.loads(text)
    assert [side["name"] for side in read["sides"]] == ["a", "b"]
    assert read["against"][0]["time"]["verdict"] == "faster"


@pytest.mark.parametrize("format", ["html", "md"])
def test_a_report_of_several_runs_says_the_same(format: Any, tmp_path: Path) -> None:
    runs = [made(tmp_path / "a"), made(tmp_path / "b", lr=2e-3, step_s=0.08)]
    found = compare(runs)
    text = html.unescape(render(runs, format=format))
    assert all(sentence in text for sentence in found.sentences(found.against[0]))
    repeats = [made(tmp_path / f"c{seed}", seed=seed) for seed in range(2)]
    assert "did not take turns" not in render(repeats, format=format)


@pytest.mark.parametrize("format", ["html", "md"])
def test_a_report_has_every_number_of_the_comparison(format: Any, tmp_path: Path) -> None:
    runs = [made(tmp_path / "a"), made(tmp_path / "b", lr=2e-3, step_s=0.08)]
    text = html.unescape(render(runs, format=format)).replace("\\", "")
    for table in compare(runs).tables():
        for name, cells in table.rows:
            assert name in text
            assert all(cell in text for cell in cells)
    assert "loss at 160,000 tokens" in text
    assert "device hours" in text


def test_the_same_settings_with_other_versions_or_devices_are_compared(tmp_path: Path) -> None:
    old, new = {"packages": {"torch": "2.11.0"}}, {"packages": {"torch": "2.13.0"}}
    here, there = {"gpu": "NVIDIA H100"}, {"gpu": "NVIDIA H200"}
    first = made(tmp_path / "a", environment=old, hardware=here)
    found = compare([first, made(tmp_path / "b", step_s=0.08, environment=new, hardware=here)])
    assert found.settings == [("torch", ["2.11.0", "2.13.0"])]
    assert found.against[0].time.verdict == "faster"
    found = compare([first, made(tmp_path / "c", environment=old, hardware=there)])
    assert found.settings == [("device", ["NVIDIA H100", "NVIDIA H200"])]


def test_decisions_of_the_plans_that_differ_are_shown(tmp_path: Path) -> None:
    plans = [{"decisions": {"precision": precision, "tf32": True}} for precision in ("fp32", "bf16")]
    runs = [made(tmp_path / f"r{at}", lr=1e-3 * (at + 1), plan=plan) for at, plan in enumerate(plans)]
    assert compare(runs).decisions == [("precision", ["fp32", "bf16"])]
    code, text = said(*(run.path for run in runs))
    assert code == 0
    assert "Decisions that differ" in text


def test_two_runs_of_a_watched_script_are_compared_without_settings(tmp_path: Path) -> None:
    watched = {"plan": {"foreign": True}, "config": {}}
    runs = [made(tmp_path / "before", **watched), made(tmp_path / "after", step_s=0.05, **watched)]
    found = compare(runs)
    assert found.against[0].time.verdict == "faster"
    assert found.settings == found.decisions == []
    ours = compare([runs[0], made(tmp_path / "ours", step_s=0.05)])
    assert ours.settings == [], "a script has no settings of flatout"


@pytest.mark.parametrize(("margin", "verdict"), [(0.05, "equal"), (0.0001, "not enough evidence")])
def test_the_margin_of_losses_is_the_users(tmp_path: Path, margin: float, verdict: str) -> None:
    runs = [made(tmp_path / f"{lr}-{seed}", seed=seed, lr=lr) for lr in (1e-3, 2e-3) for seed in range(4)]
    assert compare(runs, loss_margin=margin).against[0].loss_verdict == verdict


def test_mistakes_are_named(tmp_path: Path) -> None:
    one, again = made(tmp_path / "a"), made(tmp_path / "b", seed=1)
    with pytest.raises(UsageError, match="differ in nothing but their seed"):
        compare([one, again])
    with pytest.raises(UsageError, match="no steps yet"):
        compare([one, made(tmp_path / "c", lr=2e-3, steps=0)])
    done = CliRunner().invoke(app, ["compare", str(one.path)])
    assert isinstance(done.exception, UsageError)
    assert "at least two run folders" in str(done.exception)
