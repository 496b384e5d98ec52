"""Tasks and rewards of the user's own: `python:MODULE:FUNCTION?key=value`, and `jsonl:FILE?reward=MODULE:FUNCTION`.

They run where all tasks run: questions in this process, rewards in a grading process that can be killed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flatout import custom
from flatout.errors import FlatoutError, UsageError, first_line
from flatout.tasks.base import Task, Texts

NEEDED = ("prompt", "reward")


def open_own(name: str, options: Mapping[str, str]) -> Task | Texts:
    """The task that the function returns for the options of the spec, which it gets as one mapping."""
    made = custom.function(name, what=f"task python:{name}", keywords=("options",))
    try:
        task = made(options=dict(options))
    except FlatoutError:
        raise
    except Exception as error:  # a user's code may raise anything
        raise UsageError(f"task python:{name}: {type(error).__name__}: {first_line(error)}") from error
    if lacks := [one for one in NEEDED if not callable(getattr(task, one, None))]:
        raise UsageError(
            f"task python:{name} returned {type(task).__name__}, which has no {' and no '.join(lacks)}: a task has "
            "prompt(i) and reward(i, completion), and may have name, size, choices(i) and answer(completion)"
        )
    return _Own(task, name=name)


class _Own:
    """Adds what a task need not have."""

    def __init__(self, task: Any, *, name: str) -> None:
        self._task = task
        self.name: str = str(getattr(task, "name", name))
        self.size: int | None = getattr(task, "size", None)
        if self.size is None and hasattr(task, "__len__"):
            self.size = len(task)

    def __getattr__(self, name: str) -> Any:  # solution, difficulty, measures, timeout_s: where it has them
        return getattr(self.__dict__["_task"], name)

    def prompt(self, i: int) -> Any:
        given = self._task.prompt(i)
        return [{"role": "user", "content": given}] if isinstance(given, str) else given

    def choices(self, i: int) -> Any:
        return self._task.choices(i) if hasattr(self._task, "choices") else None

    def answer(self, completion: str) -> str | None:
        found: str | None = self._task.answer(completion) if hasattr(self._task, "answer") else completion
        return found

    def reward(self, i: int, completion: str) -> float:
        return checked(self._task.reward(i, completion), f"task {self.name}")


def checked(value: Any, what: str) -> float:
    if isinstance(value, bool | int | float) and math.isfinite(value) and 0 <= value <= 1:
        return float(value)
    raise UsageError(f"{what}: a reward of {value!r:.60}; it must be a number from 0 to 1")
