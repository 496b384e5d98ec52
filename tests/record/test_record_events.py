"""Events: each kind is written and read as its own dataclass, and damaged or foreign data is met with care."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from flatout.files import BadFile
from flatout.record import Event, Run, StepExtra, event_from_json
from flatout.record.events import EVENTS, Evaluated, Facts, MicroBatchSearched, Other, SaveFailed, TasksScored, Trial

OUTCOME = {"stopped_by": "end", "val_losses": [3.0, 2.0], "speed": {"steps": 4, "tokens_per_s": 9.5}}
TASK = {"task": "t", "spec": "t", "metric": "accuracy", "value": 0.5, "low": 0.4, "high": 0.6, "n": 9, "samples": 1}
ROLLOUTS = {"task": "t", "prompts": 2, "reward": 0.5, "accuracy": 0.5, "answered": 1.0, "length": 9.0, "truncated": 0.0}
# A value for each field that has no default, by its name.
VALUES: dict[str, Any] = {
    **dict.fromkeys(
        ("source", "tokenizer", "checkpoint", "folder", "sink", "text", "path", "task", "model", "on"), "x"
    ),
    "outcome": OUTCOME,
    "verdicts": [{"criterion": "mfu", "wanted": "at least 0.5", "got": "0.6", "met": True}],
    "tasks": [TASK],
    "trials": [{"micro_batch": 2, "tokens_per_s": None, "first_s": 0.5}],
    "details": {"answered": 0.5},
    "memory": {"peak_gib": 1.5, "total_gib": 3.0},
    "difference": {"value": 0.1, "low": -0.1, "high": 0.3, "p": None, "n": 40},
    "names": ["a"],
    "scores": [{"task": "a", "how": "own", "metric": "accuracy", "value": 0.5}],
    "adaptive": True,
    "error": "full",
}


def data_of(kind: str) -> dict[str, Any]:
    known = EVENTS[kind]
    if issubclass(known, Facts):
        return {"device": {"ran": "CPU"} if kind == "ran" else "CPU"}
    own = {"rollouts": {"tasks": [ROLLOUTS | {"without_signal": 0.0}]}, "hang": {"phase": "forward", "silent": True}}
    values = VALUES | own.get(kind, {})
    return {one.name: values.get(one.name, 1) for one in fields(known) if one.name not in ("attempt", "time", "step")}


@pytest.mark.parametrize("kind", EVENTS)
def test_every_kind_comes_back_as_it_was_written(tmp_path: Path, kind: str) -> None:
    run = Run.create(tmp_path / "run", config_text="", config={}, plan={}, hardware={}, environment={})
    needed = {
        one.name
        for one in fields(EVENTS[kind])
        if repr(one.default) == repr(one.default_factory)  # both MISSING
    }
    data = {name: value for name, value in data_of(kind).items() if name in needed or name == "device"}
    line = {"attempt": 1, "time": 5.0, "kind": kind, "step": 7, "data": data}
    event = event_from_json(line, source="here")
    assert type(event) is EVENTS[kind]
    with run.recorder() as recorder:
        recorder.event(event)
    *_, written = run.events()
    assert type(written) is EVENTS[kind]
    assert (written.kind, written.step, written.data) == (kind, 7, event.data)
    assert data.keys() <= event.data.keys()
    told = event.sentence()
    assert told is None or (told and "None" not in told)


def test_a_kind_of_another_version_is_read_and_its_fields_are_kept() -> None:
    line = {"attempt": 1, "time": 5.0, "kind": "of-tomorrow", "step": None, "data": {"anything": [1]}}
    event = event_from_json(line, source="here")
    assert isinstance(event, Other)
    assert (event.kind, event.data, event.sentence()) == ("of-tomorrow", {"anything": [1]}, None)
    assert event.to_json() == line


def test_a_field_of_another_version_does_no_harm() -> None:
    line = {"attempt": 1, "time": 5.0, "kind": "eval", "step": 3, "data": {"val_loss": 2.0, "colour": "blue"}}
    assert event_from_json(line, source="here") == Evaluated(attempt=1, time=5.0, step=3, val_loss=2.0)


@pytest.mark.parametrize(
    ("kind", "data"),
    [("eval", {"val_loss": "low"}), ("eval", {}), ("tasks", {"tasks": [{}]}), ("micro_batch", {"trials": 3})],
)
def test_damaged_data_is_refused_with_its_place(kind: str, data: dict[str, Any]) -> None:
    line = {"attempt": 1, "time": 5.0, "kind": kind, "step": 3, "data": data}
    with pytest.raises(BadFile, match=f"events.jsonl, line 3 an event '{kind}'"):
        event_from_json(line, source="events.jsonl, line 3")


def test_secrets_in_an_event_are_masked_for_the_file_and_for_sinks(run: Run) -> None:
    told: list[Event] = []

    class Ear:
        def step(self, record: object) -> None: ...

        def event(self, event: Event) -> None:
            told.append(event)

        def close(self) -> None: ...

    with run.recorder(sinks=[Ear()]) as recorder:
        recorder.event(SaveFailed(step=1, error="s3://me:hunter-secret@bucket is full"))
    assert [event.sentence() for event in told[1:]] == ["NOT saved, training continues: s3://***@bucket is full"]
    assert b"hunter" not in run.file("events", 0).read_bytes()


def test_a_kind_with_its_fields_makes_the_same_event(run: Run) -> None:
    trials = [{"micro_batch": 2, "tokens_per_s": 10.5, "first_s": 0.5}]
    with run.recorder() as recorder:
        recorder.event("micro_batch", trials=trials, seconds=2.0, compile_seconds=0.5)
        recorder.event("no-such-kind", step=2, why="x")
    _, searched, other = run.events()
    assert isinstance(searched, MicroBatchSearched)
    assert searched.trials == (Trial(micro_batch=2, tokens_per_s=10.5, first_s=0.5),)
    assert searched.sentence() == "micro-batch search took 2.0 s, 0.5 s of it in first passes: 2 10 tokens/s"
    assert (other.kind, other.step, other.data) == ("no-such-kind", 2, {"why": "x"})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "t accuracy 50.0 % (40.0 % to 60.0 %), n 9"),
        ({"details": {"killed": 2}}, "t accuracy 50.0 % (40.0 % to 60.0 %), 2 not graded, n 9"),
        ({"metric": "accuracy, 20 % not graded"}, "t accuracy, 20 % not graded 50.0 % (40.0 % to 60.0 %), n 9"),
        ({"metric": "accuracy, 100 % not graded"}, "t accuracy, 100 % not graded not graded, n 9"),
    ],
)
def test_a_score_names_its_metric_and_what_was_not_graded(changes: dict[str, Any], says: str) -> None:
    line = {"attempt": 1, "time": 5.0, "kind": "tasks", "step": 3, "data": {"tasks": [TASK | changes]}}
    event = event_from_json(line, source="here")
    assert isinstance(event, TasksScored)
    assert event.sentence() == says


def test_what_else_a_step_holds_is_written_only_where_it_is_known() -> None:
    extra = StepExtra(lr=0.5, skipped=True, graphs=0, metrics={"kl": 0.25})
    assert extra.to_json() == {"lr": 0.5, "skipped": True, "graphs": 0, "metrics": {"kl": 0.25}}
    assert extra.numbers() == {"kl": 0.25, "lr": 0.5, "skipped": True, "graphs": 0}
