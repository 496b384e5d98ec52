"""Whether a run is still going, judged by its folder and this machine."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import psutil

from flatout.record import Event, Outcome, StepRecord
from flatout.record.events import AttemptBegan, ScriptWatched
from flatout.words import duration

# A run on another machine that has recorded nothing for this long is no longer reported as running.
SILENT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a run, as a word and as a sentence."""

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
        return State(kind="waiting", sentence="Nothing has been recorded yet")
    attempt = attempts[-1]
    seen = max(attempt.time, last.time if last else 0.0)
    host = attempt.host or "another machine"
    if host == socket.gethostname():
        if _alive(attempt.pid, since=attempt.time):
            return State(kind="running", sentence="Running")
        return State(kind="lost", sentence=f"Ended unexpectedly (killed or failed) {_ago(now - seen)}")
    if now - seen <= SILENT_S:
        return State(kind="running", sentence=f"Running on {host}")
    return State(kind="silent", sentence=f"Nothing recorded on {host} since {_ago(now - seen)}")


def watched(events: Sequence[Event]) -> State | None:
    """The state of a watched script, which records no end event; the doctor's observations mark its end."""
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
    """Whether the process still runs; a later process with the same number does not count."""
    try:
        return pid is not None and psutil.Process(pid).create_time() <= since + 1
    except psutil.Error:
        return False


def _ago(seconds: float) -> str:
    return f"{duration(max(0.0, seconds))} ago"
