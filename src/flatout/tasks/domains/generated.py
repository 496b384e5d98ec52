"""A domain as a task: `math`, `math:train`, `logic:train?level=2&size=2000&shots=4`.

`train` never ends, unless `size` says so. `valid` has 200 different questions. A question belongs to one of them by a
hash of its words in any order, so 3 + 5 and 5 + 3 are never in different splits. An index means the same question in
every process, on every version of Python.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from random import Random

from flatout.errors import UsageError
from flatout.tasks import grade
from flatout.tasks.base import Message, Messages, assistant, system, user
from flatout.tasks.domains import arithmetic, logic, simulation, stem, tables
from flatout.tasks.domains.made import ByLevel, Made, Maker
from flatout.tasks.prompts import shots_of, size_of
from flatout.tasks.verifiers import MARKED, VERIFIERS

LEVELS = 5
NUM_HELD_OUT = 200
# One question in this many is held out.
HELD_OUT_SHARE = 8
# Enough for any domain with a few thousand questions at each level.
MOST_ATTEMPTS = 10_000
SEED = 20251116
SPLITS = ("train", "valid")

DOMAINS: Mapping[str, Maker] = {
    "math": arithmetic.make,
    "logic": logic.make,
    "simulation": simulation.make,
    "table": tables.make,
    "stem": stem.make,
}
# These also accept \\boxed{} instead of the tags.
BOXED = ("math", "table")
SYSTEM = "Put the final answer in <answer> tags."


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The questions of a domain. Without a level, question i has level 1 + i % 5."""

    name: str
    split: str = "valid"
    level: int | None = None
    most: int | None = None  # questions; None: all
    shots: int = 0  # solved examples before each question

    @classmethod
    def open(
        cls, name: str, split: str, *, level: str | None = None, size: str | None = None, shots: str = "0"
    ) -> Generated:
        if split not in SPLITS:
            raise UsageError(f"{name}:{split:.80}: the split must be {' or '.join(SPLITS)}")
        if level is not None and level not in map(str, range(1, LEVELS + 1)):
            raise UsageError(f"level={level:.80}: must be a whole number from 1 to {LEVELS}")
        return cls(
            name=name,
            split=split,
            level=None if level is None else int(level),
            most=size_of(size),
            shots=shots_of(shots),
        )

    @property
    def size(self) -> int | None:
        return self.most if self.split == "train" else min(self.most or NUM_HELD_OUT, NUM_HELD_OUT)

    @property
    def maths(self) -> bool:
        return self.name == "math"

    def difficulty(self, i: int) -> int:
        return self.level or 1 + i % LEVELS

    def question(self, i: int) -> Made:
        if i < 0 or (self.size is not None and i >= self.size):
            raise IndexError(i)
        return _held_out(self.name, self.level)[i] if self.split == "valid" else _train(self, i)

    def prompt(self, i: int) -> Messages:
        return [system(SYSTEM), *self._examples(self.difficulty(i)), user(self.question(i).text)]

    def _examples(self, level: int) -> Iterator[Message]:
        """The same ones for all questions of a level, of one kind after the other; none is held out."""
        for made in (_example(self.name, level, k) for k in range(self.shots)):
            yield user(made.text)
            yield assistant(made.solution)

    def solution(self, i: int) -> str:
        return self.question(i).solution

    def choices(self, i: int) -> None:
        return None

    def answer(self, completion: str) -> str | None:
        return grade.find(completion, MARKED if self.name in BOXED else (grade.tagged,))

    def reward(self, i: int, completion: str) -> float:
        made = self.question(i)
        return VERIFIERS[made.verifier](made.gold, completion) if self.answer(completion) is not None else 0.0


@lru_cache(maxsize=4096)
def _train(task: Generated, i: int) -> Made:
    return _made(DOMAINS[task.name], task.name, task.difficulty(i), i, held_out=False)


@cache
def _held_out(name: str, level: int | None) -> list[Made]:
    task, found, seen = Generated(name=name, level=level), [], set[str]()
    for i in range(NUM_HELD_OUT):
        found.append(_made(DOMAINS[name], name, task.difficulty(i), i, held_out=True, seen=seen))
        seen.add(_words(found[-1].text))
    return found


@cache
def _example(name: str, level: int, number: int) -> Made:
    maker = DOMAINS[name]
    kinds = maker.kinds(level) if isinstance(maker, ByLevel) else [maker]
    return _made(kinds[number % len(kinds)], name, level, f"example {number}", held_out=False)


def _made(
    maker: Maker, name: str, level: int, i: int | str, *, held_out: bool, seen: Collection[str] = frozenset()
) -> Made:
    for attempt in range(MOST_ATTEMPTS):
        made = maker(Random(f"{SEED}:{name}:{level}:{i}:{attempt}"), level=level)
        words = _words(made.text)
        if (hashlib.sha256(words.encode()).digest()[0] % HELD_OUT_SHARE == 0) == held_out and words not in seen:
            return made
    raise AssertionError(f"{name}, level {level}: too few different questions for question {i}")


def _words(text: str) -> str:
    return " ".join(sorted(text.split()))
