"""What a run folder says: the same numbers the run itself came to, and n/a for what it does not say."""

from __future__ import annotations

import io
import json
import math
import os
import time
from pathlib import Path

import pytest
from rich.console import Console
from tests.insight import made

from flatout.insight import numbers
from flatout.insight.diagnose.runs import findings_of
from flatout.insight.report import render
from flatout.insight.story import tell
from flatout.insight.watch import run_view
from flatout.record import Diagnosis, Finding, Run, Span, StepRecord, event_of
from flatout.record.events import Ended
from flatout.verdict import Speedometer


def step(number: int, *, attempt: int = 1, **changes) -> StepRecord:
    values = {
        "attempt": attempt,
        "step": number,
        "time": time.time(),
        "seconds": 0.5,
        "tokens": 100,
        "padded_tokens": 100,
        "loss": 2.0,
        "spans": (Span(phase="data", seconds=0.1), Span(phase="forward", seconds=0.3)),
    }
    return StepRecord(**{**values, **changes})


def test_the_speed_is_the_one_the_run_ended_with(h200: Run):
    story = tell(h200)
    (ended,) = [event.outcome.speed for event in h200.events() if isinstance(event, Ended)]
    assert ended.steps == 597
    measured, recorded = ({**vars(speed)} for speed in (story.speed, ended))
    assert measured.pop("phases_s") == pytest.approx(recorded.pop("phases_s"))
    assert measured == pytest.approx(recorded)


def test_a_resumed_run_is_timed_without_the_warm_up_of_each_attempt(tmp_path: Path):
    run = made.make(tmp_path / "run", steps=300, ended=False)
    plan = made.h200_plan(300)
    with run.recorder() as recorder:
        recorder.event("resume", step=200, checkpoint="step-00000200")
        for number in range(200, 320):
            recorder.step(made.h200_step(number, attempt=2, clock=made.BEGAN, steps=320, spike_at=None))
    meters = [Speedometer(plan.rates), Speedometer(plan.rates)]
    for record in run.latest_steps():
        meters[record.attempt - 1].see(record)
    story = tell(run)
    assert story.speed.steps == sum(meter.steps for meter in meters) == 197 + 117
    assert story.speed.tokens_per_s == pytest.approx(
        sum(meter.tokens for meter in meters) / sum(meter.seconds for meter in meters)
    )
    assert (story.num_attempts, story.num_steps) == (2, 320)


def test_figures_name_their_source(h200: Run):
    for figure in numbers.figures(tell(h200)):
        assert any(word in figure.source for word in ("steps", "events.jsonl", "plan.json", "monitor.jsonl")), figure


def test_a_foreign_run_says_na_for_what_it_does_not_know(bare: Run):
    with bare.recorder() as recorder:
        for number in range(10):
            recorder.step(step(number, spans=(), loss=None))
    story = tell(bare)
    texts = {figure.key: figure.text for figure in numbers.figures(story)}
    for key in ("mfu", "mfu_common", "data_share", "unattributed_share", "peak_gib", "loss", "val_loss", "left_s"):
        assert texts[key] == "n/a", key
    assert texts["tokens_per_s"] == "200"
    assert (story.choices, story.forecasts, story.criteria, story.total_steps) == ([], [], [], None)
    assert story.judged == "No criteria were set."


def test_a_run_without_a_step_is_told(bare: Run):
    story = tell(bare)
    assert story.state.kind == "waiting"
    assert story.num_steps == 0
    assert numbers.figure(story, "tokens_per_s").text == "n/a"


def test_evaluations_after_the_step_a_run_went_back_to_are_forgotten(bare: Run):
    with bare.recorder() as recorder:
        for at, loss in ((0, 5.0), (10, 4.0), (20, 3.0)):
            recorder.event("eval", step=at, val_loss=loss)
    with bare.recorder() as recorder:
        recorder.event("resume", step=10, checkpoint="step-00000010")
        recorder.event("eval", step=15, val_loss=3.5)
    assert [(found.step, found.val_loss) for found in tell(bare).evaluations] == [(0, 5.0), (10, 4.0), (15, 3.5)]


def test_phases_add_up_and_what_is_missing_is_named(bare: Run):
    with bare.recorder() as recorder:
        for number in range(8):
            recorder.step(step(number))
    phases = {phase.name: phase for phase in tell(bare).phases}
    assert phases["unattributed"].share == pytest.approx(0.2)
    assert sum(phase.share for phase in phases.values()) == pytest.approx(1.0)
    assert phases["forward"].seconds == pytest.approx(2.4)


def test_ranks_are_told_apart(bare: Run):
    for rank, seconds in ((0, 0.5), (1, 0.8)):
        with bare.recorder(rank=rank, attempt=1) as recorder:
            for number in range(10):
                recorder.step(step(number, seconds=seconds))
    ranks = tell(bare).ranks
    assert [(rank.rank, rank.steps) for rank in ranks] == [(0, 10), (1, 10)]
    assert ranks[1].step_s == pytest.approx(0.8)


# Whether it goes on


def attempt(run: Run, *, pid: int, host: str, ago_s: float = 0.0) -> None:
    when = time.time() - ago_s
    with run.file("events", 0).open("a") as file:
        file.write(
            f'{{"attempt":1,"time":{when},"kind":"attempt","step":null,"data":{{"pid":{pid},"host":"{host}"}}}}\n'
        )


def test_a_live_process_is_running_and_a_dead_one_lost(bare: Run):
    here = os.uname().nodename
    attempt(bare, pid=os.getpid(), host=here)
    assert tell(bare).state.kind == "running"
    attempt(bare, pid=2**22 + 1, host=here)
    assert tell(bare).state.kind == "lost"


def test_a_process_that_was_given_an_old_number_does_not_count(bare: Run):
    attempt(bare, pid=os.getpid(), host=os.uname().nodename, ago_s=10 * 365 * 86400)
    assert tell(bare).state.kind == "lost"


def test_elsewhere_only_silence_tells(bare: Run):
    attempt(bare, pid=1, host="elsewhere")
    assert tell(bare).state.kind == "running"
    assert tell(bare, now=time.time() + 3600).state.kind == "silent"


@pytest.mark.parametrize(("by", "kind"), [("end", "finished"), ("target", "finished"), ("SIGTERM", "stopped")])
def test_how_it_ended(bare: Run, by: str, kind: str):
    with bare.recorder() as recorder:
        recorder.event("end", step=1, outcome={"stopped_by": by}, verdicts=[])
    assert tell(bare).state.kind == kind


def test_a_script_under_the_doctor_is_over_when_the_doctor_has_seen_it(bare: Run):
    with bare.recorder() as recorder:
        recorder.step(step(0, padded_tokens=400))
        assert tell(bare).state.kind == "running"
        recorder.event("observed", state="stopped")
    story = tell(bare)
    assert (story.state.sentence, story.grade) == ("Watched by the doctor", "open")
    assert numbers.figure(story, "padding_share").text == "75.0 %"


def test_an_end_before_the_last_attempt_is_no_end(bare: Run):
    with bare.recorder() as recorder:
        recorder.event("end", step=1, outcome={"stopped_by": "SIGTERM"}, verdicts=[])
    with bare.recorder():
        assert tell(bare).state.kind == "running"


# Criteria and grade


def test_a_run_under_way_is_judged_so_far(tmp_path: Path):
    story = tell(made.make(tmp_path / "run", steps=100, ended=False))
    assert {verdict.criterion: verdict.met for verdict in story.criteria} == {
        "tokens_per_s": True,
        "mfu": True,
        "memory_share": True,
        "loss_falling": True,
    }
    assert story.grade != "good"  # nothing is good before its end


def test_one_criterion_that_is_not_met_is_not_good(tmp_path: Path):
    run = made.make(tmp_path / "run", steps=20, ended=False)
    with run.recorder() as recorder:
        verdicts = [{"criterion": "mfu", "wanted": "at least 0.5", "got": "0.4", "met": False}]
        recorder.event("end", step=20, outcome={"stopped_by": "end"}, verdicts=verdicts)
    story = tell(run)
    assert story.grade == "bad"
    assert story.judged == "0 of 1 criteria met, 1 not met."


# Findings


def test_a_healthy_run_has_no_finding_but_its_power_cap(h200: Run):
    assert {finding.cause for finding in findings_of(tell(h200))} <= {"throttled"}


def test_waiting_for_data_is_found_with_its_share(bare: Run):
    with bare.recorder() as recorder:
        for number in range(10):
            recorder.step(step(number))
    (finding,) = [found for found in findings_of(tell(bare)) if found.cause == "data-starvation"]
    assert finding.share == pytest.approx(0.2)
    assert finding.status == "estimated"
    assert "20.0 %" in finding.sentence


def test_a_loss_that_is_not_finite_is_found_and_bad(bare: Run):
    with bare.recorder() as recorder:
        for number in range(5):
            recorder.step(step(number, loss=math.nan if number >= 3 else 2.0, spans=()))
    story = tell(bare)
    assert [finding.cause for finding in findings_of(story)] == ["unstable-loss"]
    assert story.grade == "bad"


def test_a_run_that_stands_still_is_found(bare: Run):
    with bare.recorder() as recorder:
        for number in range(5):
            recorder.step(step(number, spans=()))
        assert findings_of(tell(bare)) == ()
        late = tell(bare, now=time.time() + 600)
    assert [finding.cause for finding in findings_of(late)] == ["stalled"]


def test_recomputing_with_room_to_spare_is_found(tmp_path: Path):
    plan = made.h200_plan(20).to_json()
    plan["decisions"]["recompute"] = "full"
    run = made.make(tmp_path / "run", steps=20, plan=plan, ended=False)
    with run.recorder() as recorder:
        recorder.event("plan", **plan)
    assert "needless-recompute" in {finding.cause for finding in findings_of(tell(run))}


@pytest.mark.parametrize(
    ("peak_gib", "accumulation", "cause"), [(138.0, 1, "oom-risk"), (25.0, 8, "small-batch"), (25.0, 1, None)]
)
def test_memory_is_a_finding_only_where_it_could_buy_something(
    tmp_path: Path, peak_gib: float, accumulation: int, cause: str | None
):
    plan = made.h200_plan(20).to_json()
    plan["decisions"]["accumulation"] = accumulation
    run = made.make(tmp_path / "run", steps=4, ended=False, config={"plan": {"micro_batch": 1}})
    with run.recorder() as recorder:
        recorder.event("plan", **plan)
        memory = {"peak_gib": peak_gib, "total_gib": 139.8}
        recorder.step(step(4, attempt=2, memory=memory, spans=()))
    found = {finding.cause for finding in findings_of(tell(run))} & {"oom-risk", "small-batch"}
    assert found == ({cause} if cause else set())


def test_failed_saves_and_dropped_lines_are_found(bare: Run):
    with bare.recorder() as recorder:
        recorder.event("save-failed", step=5, error="disk full")
        recorder.event("lines_dropped", num_lines=7)
    found = {finding.cause: finding for finding in findings_of(tell(bare))}
    assert "disk full" in found["checkpointing"].evidence[0]
    assert "7 lines" in found["logging"].sentence


@pytest.mark.parametrize(("gain", "grade"), [(0.2, "bad"), (0.04, "good"), (None, "good")])
def test_much_to_gain_is_not_good(bare: Run, gain: float | None, grade: str):
    with bare.recorder() as recorder:
        recorder.event("observed", state="stopped")
    finding = Finding(
        cause="small-batch", sentence="s", share=None, gain=gain, status="estimated", evidence=(), fix="f"
    )
    bare.write_diagnosis(Diagnosis(verdict="v", limit={}, findings=(finding,)))
    assert tell(bare).grade == grade


def test_the_doctor_has_the_last_word(bare: Run):
    finding = Finding(
        cause="small-batch", sentence="s", share=0.3, gain=0.2, status="measured", evidence=("e",), fix="f"
    )
    with bare.recorder() as recorder:
        for number in range(10):
            recorder.step(step(number))
    bare.write_diagnosis(Diagnosis(verdict="Too small.", limit={"share": 0.5}, findings=(finding,)))
    story = tell(bare)
    assert (story.verdict, list(findings_of(story))) == ("Too small.", [finding])


def scored(task: str, value: float, **changes) -> dict:
    found = {"task": task, "metric": "accuracy", "value": value, "low": value / 2, "high": value, "n": 50, "samples": 1}
    return found | {"spec": task, "of": 1000, "details": {}} | changes


def test_task_scores_are_those_of_the_weights_as_they_are_now(tmp_path: Path):
    run = made.make(tmp_path / "run", steps=40, ended=False)
    with run.recorder() as recorder:
        recorder.event("tasks", step=10, tasks=[scored("units", 0.1), scored("texts", 9.5, metric="perplexity")])
        recorder.event("tasks", step=30, tasks=[scored("units", 0.9)])
        recorder.event("resume", step=20, checkpoint="step-00000020")
        recorder.event("tasks", step=20, tasks=[scored("units", 0.3)])
    tasks = [scored("units", 0.4), scored("units", 0.5, n=1000)]
    run.note(event_of("tasks", {"tasks": tasks}, step=20, source="here"))
    story = tell(run)
    assert [(s.task, s.step, s.value, s.n) for s in story.tasks] == [
        ("texts", 10, 9.5, 50),
        ("units", 10, 0.1, 50),
        ("units", 20, 0.4, 50),
        ("units", 20, 0.5, 1000),
    ]
    again = made.make(tmp_path / "again", steps=8)
    tasks = [scored("jsonl", 0.1, spec="jsonl:a"), scored("jsonl", 0.2, spec="jsonl:b")]
    again.note(event_of("tasks", {"tasks": tasks}, step=8, source="here"))
    assert [(s.task, s.value) for s in tell(again).tasks] == [("jsonl:a", 0.1), ("jsonl:b", 0.2)]
    [document] = json.loads(render([run], format="json"))
    assert [s["value"] for s in document["tasks"]] == [9.5, 0.1, 0.4, 0.5]
    text = render([run], format="md")
    assert "| units | 20 | accuracy | 40.0 % | 20.0 % to 40.0 % | 50 |" in text
    html = render([run], format="html")
    for words in ('href="#tasks"', "Task scores", "Scores by task and step", "9.5", "40.0 %"):
        assert words in html
    console = Console(width=140, file=io.StringIO())
    console.print(run_view(story))
    assert "units accuracy 10.0 % -> 50.0 % (25.0 % to 50.0 %) at step 20" in console.file.getvalue()
    assert 'href="#tasks"' not in render([made.make(tmp_path / "none", steps=8)], format="html")
