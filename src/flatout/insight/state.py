"""Whether a run goes on, as far as its folder and this machine can tell."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import psutil

from flatout.record import Event, Outcome, StepRecord
from flatout.record.events import AttemptBegan, ScriptWatched
from flatout.words import duration

# Without a sign of life for this long, a run on another machine is no longer called running.
SILENT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class State:
    """What a run is doing, in a word and in a sentence."""

    kind: Literal["waiting", "running", "finished", "stopped", "lost", "silent"]
    sentence: str

    @property
    def over(self) -> bool:
        return self.kind in ("finished", "stopped", "lost")


def state_of(
    attempts: Sequence[AttemptBegan], outcome: Outcome | None, last: StepRecord | None, *, now: float
) -> State:
    if outcome is not None:
        return _ended(outcome.stopped_by)
    if not attempts:
        return State(kind="waiting", sentence="Nothing was recorded yet")
    attempt = attempts[-1]
    seen = max(attempt.time, last.time if last else 0.0)
    host = attempt.host or "another machine"
    if host == socket.gethostname():
        if _alive(attempt.pid, since=attempt.time):
            return State(kind="running", sentence="Running")
        return State(kind="lost", sentence=f"Ended without a last word (killed, or failed) {_ago(now - seen)}")
    if now - seen <= SILENT_S:
        return State(kind="running", sentence=f"Running on {host}")
    return State(kind="silent", sentence=f"No word from {host} since {_ago(now - seen)}")


def watched(events: Sequence[Event]) -> State | None:
    """A foreign script under the doctor says no last word; the doctor says what it saw when it is done."""
    seen = any(isinstance(event, ScriptWatched) for event in events)
    return State(kind="finished", sentence="Watched by the doctor") if seen else None


def _ended(stopped_by: str) -> State:
    match stopped_by:
        case "end":
            return State(kind="finished", sentence="Finished")
        case "target":
            return State(kind="finished", sentence="Finished early: target reached")
        case "patience":
            return State(kind="finished", sentence="Finished early: validation stopped improving")
        case _:
            return State(kind="stopped", sentence=f"Stopped by {stopped_by}")


def _alive(pid: int | None, *, since: float) -> bool:
    """Whether the process still runs; another one that was given its number later does not count."""
    try:
        return pid is not None and psutil.Process(pid).create_time() <= since + 1
    except psutil.Error:
        return False


def _ago(seconds: float) -> str:
    return f"{duration(max(0.0, seconds))} ago"
