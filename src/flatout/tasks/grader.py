"""What completions of one task are worth, found in a process that can be killed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flatout.tasks.grade import tail
from flatout.tasks.workers import TIMEOUT_S, Killed, Worker


@dataclass(frozen=True, kw_only=True)
class Graded:
    """`killed` ones took too long or crashed the grader: worth nothing, and counted."""

    reward: float
    answered: bool
    status: Literal["graded", "killed"] = "graded"


class Grader:
    """Rebuilds the task from its spec in a worker; may be called from any thread."""

    def __init__(self, spec: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self.spec = spec
        self._worker = Worker(timeout_s=timeout_s)

    def grade(self, i: int, completion: str) -> Graded:
        reply = self._worker.call("reward", self.spec, i, tail(completion))
        if isinstance(reply, Killed):
            return Graded(reward=0.0, answered=False, status="killed")
        return Graded(reward=min(1.0, max(0.0, float(reply["reward"]))), answered=bool(reply["answered"]))

    def close(self) -> None:
        self._worker.close()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
