"""Grades completions of one task in a process that can be killed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flatout.errors import RunFailed
from flatout.tasks import judge
from flatout.tasks.grade import tail
from flatout.tasks.workers import TIMEOUT_S, Killed, Worker

# A trivial answer may take this long to grade on a busy machine; if it takes longer, the grader is broken.
PROBE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Graded:
    """A reward. `killed` means that grading took too long or crashed: the reward is 0, and it is counted."""

    reward: float
    answered: bool
    status: Literal["graded", "killed"] = "graded"
    seconds: float | None = field(default=None, compare=False)  # that grading took; None: unknown
    measures: Mapping[str, Any] = field(default_factory=dict, compare=False)  # see `base.Measured`


class Grader:
    """Rebuilds the task from its spec in a worker; may be called from any thread."""

    def __init__(self, spec: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self.spec = spec
        self._worker = Worker(timeout_s=timeout_s, variables=judge.variables(spec))

    def grade(self, i: int, completion: str) -> Graded:
        """Raises RunFailed if no completion at all can be graded: that is not a score of 0."""
        (graded,) = self.grade_each([(i, completion)])
        return graded

    def grade_each(self, several: Sequence[tuple[int, str]]) -> list[Graded]:
        """Several completions in one request, which costs less; each has the whole time limit."""
        replies = self._worker.call_each("reward", [(self.spec, i, tail(completion)) for i, completion in several])
        if any(isinstance(reply, Killed) for reply in replies):
            self.probe()
        killed = Graded(reward=0.0, answered=False, status="killed")
        return [killed if isinstance(reply, Killed) else self._graded(reply) for reply in replies]

    def probe(self) -> None:
        """Raises RunFailed if not even a trivial answer can be graded."""
        if isinstance(self._worker.call("probe", self.spec, timeout_s=PROBE_S), Killed):
            raise RunFailed(
                f"the grader of {self.spec} does not work: even a trivial answer is not graded within "
                f"{PROBE_S:g} s{self._worker.stderr_end()}"
            )

    def _graded(self, reply: Any) -> Graded:
        match reply:
            case {"reward": int() | float() as reward, "answered": bool(answered)} if math.isfinite(reward):
                took = reply.get("seconds")
                seconds = float(took) if isinstance(took, int | float) else None
                return Graded(
                    reward=min(1.0, max(0.0, float(reward))),
                    answered=answered,
                    seconds=seconds,
                    measures=reply.get("measures") or {},
                )
        raise RunFailed(f"the grader of {self.spec} gave {str(reply)[:200]} where a reward from 0 to 1 is expected")

    def close(self) -> None:
        self._worker.close()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
