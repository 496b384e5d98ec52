"""Generated sums of two two-digit numbers, for models that are trained from scratch.

`shown` questions come with a worked solution, digit by digit; of `train` only the answers are known; `valid` is held
out. No sum is in two of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from flatout.errors import UsageError
from flatout.tasks import grade
from flatout.tasks.base import Messages, assistant, system, user

SIZES = {"valid": 600, "shown": 150, "train": 2400}
SEED = 20250301
SMALLEST, LARGEST = 10, 99

SYSTEM = "You add numbers digit by digit, from the right, and put the sum in <answer> tags."
# Longer than the questions, so that no example contains an answer.
EXAMPLES = ((123, 88), (507, 715))


@dataclass(frozen=True, kw_only=True)
class Sums:
    split: str = "valid"
    name: str = "sums"

    def __post_init__(self) -> None:
        if self.split not in SIZES:
            raise UsageError(f"sums:{self.split}: the split must be one of {', '.join(SIZES)}")

    @property
    def size(self) -> int:
        return SIZES[self.split]

    def numbers(self, i: int) -> tuple[int, int]:
        return _pools()[self.split][i]

    def prompt(self, i: int) -> Messages:
        examples = [message for a, b in EXAMPLES for message in (user(_question(a, b)), assistant(_worked(a, b)))]
        return [system(SYSTEM), *examples, user(_question(*self.numbers(i)))]

    def solution(self, i: int) -> str:
        return _worked(*self.numbers(i))

    def choices(self, i: int) -> None:
        return None

    def answer(self, completion: str) -> str | None:
        return grade.find(completion, [grade.tagged])

    def reward(self, i: int, completion: str) -> float:
        found = self.answer(completion)
        return float(found is not None and grade.number(found) == sum(self.numbers(i)))


@cache
def _pools() -> dict[str, list[tuple[int, int]]]:
    """Disjoint, also where the two numbers change places."""
    chance, seen = random.Random(SEED), set[tuple[int, int]]()
    pools: dict[str, list[tuple[int, int]]] = {name: [] for name in SIZES}
    for name, size in SIZES.items():
        while len(pools[name]) < size:
            a, b = (chance.randint(SMALLEST, LARGEST) for _ in range(2))
            if (min(a, b), max(a, b)) not in seen:
                seen.add((min(a, b), max(a, b)))
                pools[name].append((a, b))
    return pools


def _question(a: int, b: int) -> str:
    return f"{a} + {b} = ?"


def _worked(a: int, b: int) -> str:
    """The digits of each place and what is carried: 47 + 85 is `7+5=12 4+8+1=13`."""
    steps, carried, left, right = [], 0, a, b
    while left or right:
        digits = [left % 10, right % 10, *([carried] if carried else [])]
        steps.append(f"{'+'.join(map(str, digits))}={sum(digits)}")
        carried, left, right = sum(digits) // 10, left // 10, right // 10
    return f"{' '.join(steps)} <answer>{a + b}</answer>"
