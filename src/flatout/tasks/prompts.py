"""How a task asks, replaced: `NAME?prompt=FILE` puts other words and worked examples before the question.

The file is YAML: `system` (a text), `examples` (a list of `question` and `answer`), `question` (a text with
{question} in it); each may be left out. `prompt=bare` asks the question and says nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from flatout.errors import UsageError
from flatout.tasks.base import Messages, Task, assistant, system, user
from flatout.tasks.files import read_text

BARE = "bare"
PLACE = "{question}"


@dataclass(frozen=True, kw_only=True)
class Template:
    system: str | None = None
    examples: tuple[tuple[str, str], ...] = ()
    question: str = PLACE

    @classmethod
    def open(cls, name: str) -> Template:
        if name == BARE:
            return cls()
        path = Path(name)
        try:
            value = yaml.safe_load(read_text(path))
        except (yaml.YAMLError, RecursionError) as error:
            raise UsageError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from None
        if not isinstance(value, dict) or not value or not set(value) <= {"system", "examples", "question"}:
            raise UsageError(f"{path}: a prompt has some of system, examples and question, and nothing else")
        made = cls(
            system=_text(value.get("system"), f"{path}: system"),
            examples=_examples(value.get("examples") or [], path),
            question=_text(value.get("question"), f"{path}: question") or PLACE,
        )
        if PLACE not in made.question:
            raise UsageError(f"{path}: question must hold {PLACE} where the question goes")
        return made

    def around(self, question: str) -> Messages:
        said = [] if self.system is None else [system(self.system)]
        for asked, answered in self.examples:
            said += [user(self.question.replace(PLACE, asked)), assistant(answered)]
        return [*said, user(self.question.replace(PLACE, question))]


@dataclass(frozen=True, kw_only=True)
class Prompted:
    """A task that asks in other words; what it pays for is its own."""

    task: Task
    template: Template

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def size(self) -> int | None:
        return self.task.size

    @property
    def maths(self) -> bool:
        return bool(getattr(self.task, "maths", False))

    def prompt(self, i: int) -> Messages:
        return self.template.around(self.task.prompt(i)[-1]["content"])

    def choices(self, i: int) -> Sequence[str] | None:
        return self.task.choices(i)

    def answer(self, completion: str) -> str | None:
        return self.task.answer(completion)

    def reward(self, i: int, completion: str) -> float:
        return self.task.reward(i, completion)


def _examples(value: object, path: Path) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not all(
        isinstance(one, dict) and set(one) == {"question", "answer"} for one in value
    ):
        raise UsageError(f"{path}: examples are a list, each with question and answer")
    return tuple((str(one["question"]), str(one["answer"])) for one in value)


def _text(value: object, where: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{where} must be a text")
    return value
