"""One run folder, one speed: whoever prints it prints the same number."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.insight import made

from flatout import trackers
from flatout.config.settings import CriteriaSettings
from flatout.cost import Rates
from flatout.insight import doctor, logs
from flatout.insight.diagnose import runs
from flatout.insight.diagnose.runs import findings_of
from flatout.insight.report import render
from flatout.insight.story import tell
from flatout.insight.watch import line, run_view
from flatout.record import Event, Outcome, Run, Span, StepRecord
from flatout.record.events import Ended, Evaluated, HardwareFound, Planned, Resumed, Saved, Started
from flatout.terminal import View
from flatout.verdict import LossTrend, Speedometer, judge
from flatout.words import number, percent

PLAN = made.h200_plan(32)
HARDWARE = {**PLAN.job.hardware.to_json(), "measured": {"flops": {"bf16": 8e14}}}
PEAK = "989 TFLOPS bf16 (datasheet); 800 measured here"
# 1000 tokens in an eighth of a second of training, beside slow first steps, an evaluation and a save.
SPANS = {"data": 0.0125, "forward": 0.0375, "backward": 0.075}
TOKENS_PER_S, SLOW, BESIDE = 8000.0, (0, 1, 2, 20, 21, 22), {10: {"eval": 2.0}, 15: {"save": 5.0}}


def step(at: int, *, attempt: int) -> StepRecord:
    spans = {**SPANS, **BESIDE.get(at, {}), **({"forward": 3.0} if at in SLOW else {})}
    return StepRecord(
        attempt=attempt,
        step=at,
        time=1000.0 + at,
        seconds=sum(spans.values()),
        tokens=1000,
        padded_tokens=1000,
        loss=5.0 - at / 10,
        spans=tuple(Span(phase=phase, seconds=seconds) for phase, seconds in spans.items()),
    )


class Tracker:
    """What a tracker shows of the whole run."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def step(self, record: StepRecord) -> None: ...

    def event(self, event: Event) -> None:
        self.found |= trackers.event_scalars(event)

    def close(self) -> None: ...


@pytest.fixture
def resumed(tmp_path: Path) -> tuple[Run, str, dict[str, float]]:
    """A run killed at step 25 and resumed at step 20, with its last lines in the terminal and what a tracker shows."""
    kept: dict[str, Any] = {"config_text": "", "config": {}, "plan": PLAN.to_json(), "environment": {}}
    run = Run.create(tmp_path / "run", hardware=HARDWARE, **kept)
    with run.recorder() as recorder:
        for at in range(25):
            recorder.step(step(at, attempt=recorder.attempt))
        recorder.event(Evaluated(step=10, val_loss=4.0))
        recorder.event(Saved(step=15, checkpoint="step-15"))
    meter, trend = Speedometer(PLAN.rates), LossTrend()
    earlier = [record for record in run.latest_steps() if record.step < 20]
    paper, tracker = Console(file=io.StringIO(), width=200), Tracker()
    with run.recorder(sinks=[View(paper), tracker]) as recorder:
        recorder.event(HardwareFound(facts=HARDWARE))
        recorder.event(Planned(facts=PLAN.to_json()))
        recorder.event(Resumed(step=20, checkpoint="step-20"))
        recorder.event(Started(total_steps=32, folder="run"))
        for at in range(20, 32):
            recorder.step(step(at, attempt=recorder.attempt))
        for record in [*earlier, *(step(at, attempt=recorder.attempt) for at in range(20, 32))]:
            meter.see(record)
            trend.see(record.loss or 0.0)
        first, last = trend.ends()
        outcome = Outcome(stopped_by="end", steps=32, speed=meter.read(), loss_first_tenth=first, loss_last_tenth=last)
        recorder.event(Ended(step=32, outcome=outcome, verdicts=()))
    assert isinstance(paper.file, io.StringIO)
    return run, paper.file.getvalue(), tracker.found


def test_all_who_show_a_run_show_the_same_speed(resumed: tuple[Run, str, dict[str, float]]) -> None:
    run, last_lines, tracked = resumed
    story, diagnosis = tell(run), runs.diagnose(run)
    assert story.speed.steps == 32 - 6
    told = Console(file=io.StringIO(), width=300)
    told.print(run_view(story))
    doctor.say(diagnosis, console=told)
    assert isinstance(told.file, io.StringIO)
    watched, diagnosed = told.file.getvalue().split("Doctor")
    [document] = json.loads(render([run], format="json"))
    places = {
        "the terminal's last lines": re.findall(r"speed +([\d,]+) tokens/s", last_lines),
        "watch": re.findall(r"speed +([\d,]+) tok/s", watched),
        "watch in a pipe": re.findall(r"([\d,]+) tok/s", line(story)),
        "the doctor": re.findall(r"([\d,]+) tokens/s of a ceiling of", diagnosed),
        "the report": re.findall(r"<dt>tokens/s</dt><dd>([\d,]+)</dd>", render([run], format="html")),
        "the report as text": re.findall(r"\| tokens/s \| ([\d,]+) \|", render([run], format="md"))[:1],
        "the report for programs": [number(document["figures"]["tokens_per_s"]["value"])],
        "a tracker": [number(tracked["run/tokens_per_s"])],
    }
    assert places == {place: [number(TOKENS_PER_S)] for place in places}


def test_a_compilation_is_in_no_speed_that_is_shown(tmp_path: Path) -> None:
    """Twenty steps, of which the first compiles for a minute: watch and the live lines leave it out, as all do."""
    kept: dict[str, Any] = {"config_text": "", "config": {}, "plan": PLAN.to_json(), "environment": {}}
    run = Run.create(tmp_path / "run", hardware=HARDWARE, **kept)
    paper = Console(file=io.StringIO(), width=200)
    with run.recorder(sinks=[View(paper, every=5)]) as recorder:
        recorder.event(Planned(facts=PLAN.to_json()))
        recorder.event(Started(total_steps=40, folder="run"))
        for at in range(20):
            seconds = 60.0 if at == 0 else 0.5
            record = StepRecord(
                attempt=recorder.attempt,
                step=at,
                time=1000.0 + at,
                seconds=seconds,
                tokens=500,
                padded_tokens=500,
                loss=5.0,
                spans=(Span(phase="forward", seconds=seconds),),
            )
            recorder.step(record)
        story = tell(run)
    assert isinstance(paper.file, io.StringIO)
    assert re.findall(r"([\d,]+) tok/s", paper.file.getvalue()) == ["1,000"] * 4
    log = tmp_path / "train.log"
    log.write_text(paper.file.getvalue())
    assert (logs.diagnose(log).limit["kind"], logs.diagnose(log).limit["tokens_per_s"]) == ("flatout", 1000)
    assert logs.diagnose(run.file("steps", 0)).limit["tokens_per_s"] == pytest.approx(1000)
    assert (story.speed.tokens_per_s, story.recent.tokens_per_s) == pytest.approx((1000.0, 1000.0))
    assert story.recent.steps == 17


def test_a_rising_loss_is_told_with_the_same_numbers_at_any_resolution(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", config_text="", config={}, plan={}, hardware={}, environment={})
    with run.recorder() as recorder:
        for at in range(600):
            loss = 4.0 - at / 200 if at < 500 else 20.0 + at / 7
            record = StepRecord(attempt=1, step=at, time=0.0, seconds=1.0, tokens=1, padded_tokens=1, loss=loss)
            recorder.step(record)
    told = [finding for parts in (240, 48, 7) for finding in findings_of(tell(run, num_parts=parts))]
    (sentence,) = {finding.sentence for finding in told if finding.cause == "unstable-loss"}
    assert "training diverges" in sentence


def test_the_peak_is_named_beside_mfu(resumed: tuple[Run, str, dict[str, float]]) -> None:
    run, last_lines, tracked = resumed
    story = tell(run)
    mfu = f"{percent(story.speed.mfu)} of {PEAK}"
    assert tracked["run/mfu/done"] == pytest.approx(story.speed.mfu)
    assert re.search(rf"MFU +{re.escape(mfu)} as done", last_lines)
    told = Console(file=io.StringIO(), width=300)
    told.print(run_view(story))
    doctor.say(runs.diagnose(run), console=told)
    assert isinstance(told.file, io.StringIO)
    assert told.file.getvalue().count(mfu) == 2
    assert mfu in render([run], format="html")
    assert f"MFU {mfu}" in line(story)


def test_the_ends_of_the_loss_are_those_the_run_ended_with(tmp_path: Path) -> None:
    """Also where a tenth ends inside a roll-up, and where losses are not numbers."""
    run = Run.create(tmp_path / "run", config_text="", config={}, plan={}, hardware={}, environment={})
    trend = LossTrend()
    with run.recorder() as recorder:
        for at in range(1003):
            loss = float("nan") if at in (7, 990) else 9.0 - (at / 500) ** 2
            record = StepRecord(attempt=1, step=at, time=0.0, seconds=1.0, tokens=1, padded_tokens=1, loss=loss)
            recorder.step(record)
            trend.see(loss)
    assert tell(run).loss_ends == pytest.approx(trend.ends())
    assert tell(run, num_parts=5).loss_ends == pytest.approx(trend.ends())


def test_speed_is_told_in_total_and_per_device_with_and_without_padding(tmp_path: Path) -> None:
    """Eight devices, 1,000 tokens a second together and 1,250 with padding."""
    facts = PLAN.to_json()
    facts["rates"] = facts["rates"] | {"num_devices": 8}
    run = Run.create(
        tmp_path / "run", hardware=HARDWARE, config_text="", config={"recipe": "sft"}, plan=facts, environment={}
    )
    paper, meter = Console(file=io.StringIO(), width=200), Speedometer(Rates.from_json(facts["rates"]))
    with run.recorder(sinks=[View(paper, every=5)]) as recorder:
        recorder.event(Planned(facts=facts))
        recorder.event(Started(total_steps=20, folder="run"))
        for at in range(20):
            record = StepRecord(
                attempt=recorder.attempt,
                step=at,
                time=1000.0 + at,
                seconds=0.5,
                tokens=500,
                padded_tokens=625,
                loss=5.0,
                spans=(Span(phase="forward", seconds=0.5),),
            )
            recorder.step(record)
            meter.see(record)
        outcome = Outcome(stopped_by="end", steps=20, speed=meter.read())
        wanted = CriteriaSettings(tokens_per_s=900.0, tokens_per_s_per_device=130.0)
        verdicts = tuple(judge(wanted, outcome))
        recorder.event(Ended(step=20, outcome=outcome, verdicts=verdicts))
    assert isinstance(paper.file, io.StringIO)
    lines = paper.file.getvalue()
    both = "1,000 tok/s in total, 125 per device"
    assert lines.count(both) == 4
    assert "1,000 tokens/s in total, 125 per device, 0.5 s a step; 1,250 tokens/s with padding" in lines
    assert [(one.wanted, one.got, one.met) for one in verdicts] == [
        ("at least 900 in total", "1,000", True),
        ("at least 130 per device", "125", False),
    ]
    told = Console(file=io.StringIO(), width=300)
    told.print(run_view(tell(run)))
    assert isinstance(told.file, io.StringIO)
    assert both in told.file.getvalue()
    [document] = json.loads(render([run], format="json"))
    figures = {name: document["figures"][name]["value"] for name in document["figures"] if "tokens_per_s" in name}
    assert figures == {"tokens_per_s": 1000.0, "tokens_per_s_per_device": 125.0, "padded_tokens_per_s": 1250.0}
    report = render([run], format="md")
    assert "| tokens/s per device | 125 |" in report
    assert "| tokens/s with padding | 1,250 |" in report
    log = tmp_path / "train.log"
    log.write_text(lines)
    assert logs.diagnose(log).limit["tokens_per_s"] == 1000
