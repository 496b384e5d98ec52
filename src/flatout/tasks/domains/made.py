"""One generated question."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, TypeVar

NAMES = [
    "Ann",
    "Bob",
    "Cid",
    "Dan",
    "Eve",
    "Fay",
    "Gus",
    "Hal",
    "Ida",
    "Jay",
    "Kim",
    "Lea",
    "Max",
    "Ned",
    "Ola",
    "Pam",
    "Quin",
    "Ray",
    "Sam",
    "Tia",
    "Una",
    "Vic",
    "Wes",
    "Yan",
    "Zoe",
    "Amy",
    "Ben",
    "Cal",
    "Dora",
    "Emil",
]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Made:
    """A question, its right answer as the verifier takes it, and the way to it as a model should write it."""

    text: str
    gold: Any
    verifier: str
    steps: str = ""
    answer: str = ""  # the answer inside the tags; "": the right answer as text

    @property
    def solution(self) -> str:
        answer = self.answer or (self.gold if isinstance(self.gold, str) else json.dumps(self.gold))
        return f"{self.steps} <answer>{answer}</answer>".lstrip()


class Maker(Protocol):
    """Makes a question of a level from 1 to 5. All its choices come from `chance`."""

    def __call__(self, chance: Random, /, *, level: int) -> Made: ...


def several(chance: Random, pool: Sequence[T], count: int) -> list[T]:
    """Different members of a pool, in a random order."""
    return chance.sample(list(pool), count)


class ByLevel:
    """A maker that chooses one of the kinds of its level; the last list counts for all further levels."""

    def __init__(self, *levels: Sequence[Maker]) -> None:
        self._levels = levels

    def kinds(self, level: int) -> Sequence[Maker]:
        return self._levels[min(level, len(self._levels)) - 1]

    def __call__(self, chance: Random, /, *, level: int) -> Made:
        return chance.choice(self.kinds(level))(chance, level=level)
