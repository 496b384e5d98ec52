"""Replaces a task's prompt: `NAME?prompt=FILE` puts another system text and worked examples before the question.

The file is YAML: `system` (a text), `examples` (a list of `question` and `answer`), `question` (a text with
{question} in it); each may be left out. `prompt=bare` gives only the question.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flatout.errors import UsageError, first_line
from flatout.tasks.base import Messages, Task, assistant, system, user
from flatout.tasks.files import is_text, read_text, text_of

BARE = "bare"
PLACE = "{question}"
MOST_BYTES = 1 << 20
_SHOWN = 120


def shots_of(text: str) -> int:
    """The number of solved examples before each question."""
    if not re.fullmatch("[0-9]|1[0-6]", text):
        raise UsageError(f"shots={text:.80}: must be a number of examples from 0 to 16")
    return int(text)


def size_of(text: str | None) -> int | None:
    """The number of questions of a task, from the first on; None: all."""
    if text is not None and not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise UsageError(f"size={text:.80}: must be a number of questions, such as 2000")
    return None if text is None else int(text)


class _Loader(yaml.SafeLoader):
    """Without aliases, because a few lines of them can expand to gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported, write the text out")
        found: yaml.Node | None = super().compose_node(parent, index)
        return found


@dataclass(frozen=True, kw_only=True)
class Template:
    system: str | None = None
    examples: tuple[tuple[str, str], ...] = ()
    question: str = PLACE

    @classmethod
    def open(cls, name: str) -> Template:
        if name == BARE:
            return cls()
        path = Path(os.path.expanduser(name))
        try:
            value = yaml.load(read_text(path, limit=MOST_BYTES), Loader=_Loader)  # noqa: S506 it is the safe one, less aliases
        except RecursionError:
            raise UsageError(f"{path} is not usable YAML: nested too deeply") from None
        except (yaml.YAMLError, ValueError, OverflowError) as error:  # also invalid dates and numbers
            raise UsageError(f"{path} is not valid YAML: {first_line(error)[:_SHOWN]}") from None
        if not isinstance(value, dict) or not value or not set(value) <= {"system", "examples", "question"}:
            raise UsageError(f"{path}: a prompt may have system, examples and question, and nothing else")
        made = cls(
            system=_text(value.get("system"), f"{path}: system"),
            examples=_examples(value.get("examples") or [], path),
            question=_text(value.get("question"), f"{path}: question") or PLACE,
        )
        if PLACE not in made.question:
            raise UsageError(f"{path}: question must contain {PLACE} where the question goes")
        return made

    def messages(self, question: str) -> Messages:
        said = [] if self.system is None else [system(self.system)]
        for asked, answered in self.examples:
            said += [user(self.question.replace(PLACE, asked)), assistant(answered)]
        return [*said, user(self.question.replace(PLACE, question))]


@dataclass(frozen=True, kw_only=True)
class Prompted:
    """A task with another prompt; its rewards do not change."""

    task: Task
    template: Template

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def size(self) -> int | None:
        return self.task.size

    def prompt(self, i: int) -> Messages:
        return self.template.messages(self.task.prompt(i)[-1]["content"])

    def choices(self, i: int) -> Sequence[str] | None:
        return self.task.choices(i)

    def answer(self, completion: str) -> str | None:
        return self.task.answer(completion)

    def reward(self, i: int, completion: str) -> float:
        return self.task.reward(i, completion)

    def __getattr__(self, name: str) -> Any:
        """The attributes that only some tasks have, such as the level of a question."""
        return getattr(self.task, name)


def _examples(value: object, path: Path) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not all(
        isinstance(one, dict) and set(one) == {"question", "answer"} and all(map(is_text, one.values()))
        for one in value
    ):
        raise UsageError(f"{path}: examples must be a list, each with question and answer, both texts")
    where = f"{path}: examples"
    return tuple((text_of(one["question"], where=where), text_of(one["answer"], where=where)) for one in value)


def _text(value: object, where: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{where} must be a text")
    return None if value is None else text_of(value, where=where)
