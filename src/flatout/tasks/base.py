"""What a task is: where a prompt comes from, and what a completion is worth.

Tasks know text and nothing else, no torch and no tokenizer, so that a worker process can rebuild one from its spec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

# A conversation: {"role": "system" | "user" | "assistant", "content": text}, in order.
Message = Mapping[str, str]
Messages = Sequence[Message]


class Task(Protocol):
    """Questions by index. The same index means the same question in every process, always."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int | None:
        """How many questions there are; None where they never end."""
        ...

    def prompt(self, i: int) -> Messages: ...
    def choices(self, i: int) -> Sequence[str] | None:
        """What may be answered, where the answer is one of a few; None where it is written freely."""
        ...

    def answer(self, completion: str) -> str | None:
        """The part of a completion that is its answer; None where it gives none."""
        ...

    def reward(self, i: int, completion: str) -> float:
        """From 0 to 1. The completion is hostile text: it is looked at, never run."""
        ...


@runtime_checkable
class Worked(Protocol):
    """A task that also says how its questions are solved, as a model should write it."""

    def solution(self, i: int) -> str: ...


@runtime_checkable
class Texts(Protocol):
    """Text whose likelihood is measured; nothing is asked."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    def text(self, i: int) -> str: ...


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}
