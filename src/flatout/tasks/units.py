"""Generated unit conversions: 1,000 questions to train on, 1,000 held out, disjoint.

A question is an amount from 1 to 10, a unit and another unit of the same quantity, in one of two dozen phrasings.
The answer is correct within 5 % after rounding to three decimals.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from itertools import permutations

from flatout.errors import UsageError
from flatout.tasks import grade
from flatout.tasks.base import Messages, assistant, system, user

TOLERANCE = 0.05
NUM_QUESTIONS = 1000
SEED = 20240607

# Each quantity's units, in multiples of its first.
QUANTITIES: dict[str, dict[str, float]] = {
    "time": {
        "second": 1.0,
        "millisecond": 1e-3,
        "minute": 60.0,
        "hour": 3600.0,
        "day": 86400.0,
        "week": 7 * 86400.0,
        "month": 365.2421988 * 86400.0 / 12,
        "year": 365.2421988 * 86400.0,
        "decade": 10 * 365.2421988 * 86400.0,
    },
    "mass": {
        "gram": 1.0,
        "milligram": 1e-3,
        "kilogram": 1e3,
        "tonne": 1e6,
        "pound": 453.59237,
        "ounce": 28.349523125,
        "stone": 6350.29318,
    },
    "volume": {
        "litre": 1.0,
        "millilitre": 1e-3,
        "cubic metre": 1e3,
        "US gallon": 3.785411784,
        "US quart": 0.946352946,
        "US pint": 0.473176473,
        "US cup": 0.2365882365,
        "US fluid ounce": 0.0295735295625,
    },
    "length": {
        "metre": 1.0,
        "millimetre": 1e-3,
        "centimetre": 1e-2,
        "kilometre": 1e3,
        "inch": 0.0254,
        "foot": 0.3048,
        "yard": 0.9144,
        "mile": 1609.344,
        "nautical mile": 1852.0,
    },
    "speed": {
        "metre per second": 1.0,
        "kilometre per hour": 1 / 3.6,
        "mile per hour": 0.44704,
        "knot": 1852 / 3600,
        "foot per second": 0.3048,
    },
    "data": {
        "byte": 1.0,
        "bit": 1 / 8,
        "kB": 1e3,
        "MB": 1e6,
        "GB": 1e9,
        "kibibyte": 1024.0,
        "mebibyte": 1024.0**2,
        "gibibyte": 1024.0**3,
    },
}

_IRREGULAR = {"inch": "inches", "foot": "feet", "kB": "kB", "MB": "MB", "GB": "GB"}

# {n} the amount, {u} its unit, {v} the target unit.
TEMPLATES = (
    "Convert {n} {u} to {v}.",
    "Convert {n} {u} into {v}.",
    "Can you convert {n} {u} to {v}?",
    "Please convert {n} {u} to {v}.",
    "How many {v} are there in {n} {u}?",
    "How many {v} is {n} {u}?",
    "How many {v} make {n} {u}?",
    "How many {v} do {n} {u} correspond to?",
    "What is {n} {u} in {v}?",
    "What is {n} {u} when given in {v}?",
    "What are {n} {u} expressed in {v}?",
    "What do {n} {u} come to in {v}?",
    "Express {n} {u} in {v}.",
    "Express {n} {u} as a number of {v}.",
    "Give {n} {u} in {v}.",
    "Give me the number of {v} in {n} {u}.",
    "State {n} {u} in {v}.",
    "Write {n} {u} in {v}.",
    "Change {n} {u} to {v}.",
    "Tell me how many {v} there are in {n} {u}.",
    "I have {n} {u}. How many {v} is that?",
    "If something measures {n} {u}, what is that in {v}?",
    "Find the equivalent of {n} {u} in {v}.",
    "{n} {u} is how many {v}?",
)

SYSTEM = "You convert units. Say how many of one unit make the other, multiply, and put the number in <answer> tags."
# Amounts outside the questions' range, so that no example contains an answer.
EXAMPLES = (
    ("How many grams is 12 kilograms?", "1 kilogram = 1000 grams. 12 * 1000 = 12000. <answer>12000</answer>"),
    ("Convert 20 minutes to hours.", "1 minute = 0.016667 hours. 20 * 0.016667 = 0.333. <answer>0.333</answer>"),
    ("What is 15 inches in centimetres?", "1 inch = 2.54 centimetres. 15 * 2.54 = 38.1. <answer>38.1</answer>"),
)


@dataclass(frozen=True, kw_only=True)
class Question:
    text: str
    answer: float
    solution: str


@dataclass(frozen=True, kw_only=True)
class Units:
    """`split`: train, valid, or endless (from the same pool as train, never held-out questions)."""

    split: str = "valid"
    name: str = "units"

    def __post_init__(self) -> None:
        if self.split not in ("train", "valid", "endless"):
            raise UsageError(f"units:{self.split}: the split must be train, valid or endless")

    @property
    def size(self) -> int | None:
        return None if self.split == "endless" else NUM_QUESTIONS

    def question(self, i: int) -> Question:
        held_out, to_train = _pools()
        if self.split != "endless":
            if not 0 <= i < NUM_QUESTIONS:
                raise IndexError(i)
            return _put(*(held_out if self.split == "valid" else to_train)[i], chance=random.Random(f"{SEED}/{i}"))
        chance = random.Random(f"{SEED}/endless/{i}")
        return _put(*chance.choice(to_train), chance=chance)

    def prompt(self, i: int) -> Messages:
        examples = [message for q, a in EXAMPLES for message in (user(q), assistant(a))]
        return [system(SYSTEM), *examples, user(self.question(i).text)]

    def solution(self, i: int) -> str:
        return self.question(i).solution

    def choices(self, i: int) -> None:
        return None

    def answer(self, completion: str) -> str | None:
        return grade.find(completion, [grade.tagged])

    def reward(self, i: int, completion: str) -> float:
        found = self.answer(completion)
        got = None if found is None else grade.amount(found)
        if got is None:
            return 0.0
        want = round(self.question(i).answer, 3)
        return float(abs(round(got, 3) - want) < TOLERANCE * abs(want))


@cache
def _pools() -> tuple[list[tuple[int, str, str]], list[tuple[int, str, str]]]:
    """(amount, from, to) held out and for training, disjoint."""
    every = [
        (n, u, v)
        for units in QUANTITIES.values()
        for u, v in permutations(units, 2)
        for n in range(1, 11)
        # Below this, rounding to three decimals alone would exceed the tolerance.
        if 0.02 <= n * units[u] / units[v] < 1e9
    ]
    random.Random(SEED).shuffle(every)
    return every[:NUM_QUESTIONS], every[NUM_QUESTIONS:]


def _put(n: int, u: str, v: str, *, chance: random.Random) -> Question:
    text = chance.choice(TEMPLATES).format(n=n, u=u if n == 1 else plural(u), v=plural(v))
    factors = next(units for units in QUANTITIES.values() if u in units)
    factor = factors[u] / factors[v]
    one, all_of_them = _written(factor), _written(n * factor)
    solution = f"1 {u} = {one} {plural(v)}. {n} * {one} = {all_of_them}. <answer>{all_of_them}</answer>"
    return Question(text=text, answer=n * factor, solution=solution)


def _written(number: float) -> str:
    """Six digits, never with an exponent."""
    return format(Decimal(f"{number:.6g}"), "f")


def plural(unit: str) -> str:
    head, per, rest = unit.partition(" per ")
    return _IRREGULAR.get(head, head + "s") + per + rest
