"""The task interface: prompts, and rewards for completions.

Tasks handle only text, without torch or a tokenizer, so that a worker process can rebuild one from its spec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

# A conversation: {"role": "system" | "user" | "assistant", "content": text}, in order.
Message = Mapping[str, str]
Messages = Sequence[Message]


class Task(Protocol):
    """Questions by index. An index always means the same question, in every process.

    A task may also have `timeout_s`, the seconds that grading an answer may take if the usual limit is too short;
    `prepare()`, work of a grading process before it forks; `probe()`, which raises in a grading process if no answer
    can be graded; and `maths`, if it compares formulas.
    """

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int | None:
        """The number of questions; None if it is endless."""
        ...

    def prompt(self, i: int) -> Messages: ...
    def choices(self, i: int) -> Sequence[str] | None:
        """The possible answers of a multiple-choice question; None if the answer is free text."""
        ...

    def answer(self, completion: str) -> str | None:
        """The answer in a completion; None if there is no answer."""
        ...

    def reward(self, i: int, completion: str) -> float:
        """From 0 to 1. The completion is untrusted text: it is parsed, and run only in the sandbox."""
        ...


@runtime_checkable
class Worked(Protocol):
    """A task that also has a worked solution for each question, as a model should write it."""

    def solution(self, i: int) -> str: ...


@runtime_checkable
class Levelled(Protocol):
    """A task whose questions have levels, from 1 (easy) to 5."""

    def difficulty(self, i: int) -> int: ...


@runtime_checkable
class Named(Protocol):
    """A task whose metric has a name of its own."""

    @property
    def metric(self) -> str: ...


@runtime_checkable
class Measured(Protocol):
    """A task whose completions are measured in more ways than by their reward, which has a name of its own."""

    @property
    def metric(self) -> str: ...
    def measures(self, i: int, completion: str) -> Mapping[str, float | Sequence[int]]:
        """By name: a number, whose mean is reported; or counts, which are summed over completions."""
        ...

    def summed(self, counts: Sequence[Sequence[int]]) -> float:
        """The number that the counts of all completions make."""
        ...


@runtime_checkable
class Texts(Protocol):
    """Texts whose likelihood is measured, without questions."""

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
