"""Mathematics: sums, equations, remainders, divisors, fractions and word problems."""

from __future__ import annotations

import math
from fractions import Fraction
from random import Random

from flatout.tasks.domains.made import NAMES, ByLevel, Made

SIGNS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
THINGS = ["apples", "books", "cards", "coins", "eggs", "keys", "nuts", "pens", "pears", "shells", "stamps", "toys"]


def _one_step(chance: Random, /, *, level: int) -> Made:
    sign = chance.choice("++--*")
    a, b = (chance.randint(2, 9), chance.randint(2, 9)) if sign == "*" else _pair(chance)
    return _exact(f"{a} {sign} {b} = ?", SIGNS[sign](a, b))


def _pair(chance: Random) -> tuple[int, int]:
    small, large = sorted((chance.randint(0, 60), chance.randint(0, 39)))
    return large, small


def _chain(chance: Random, /, *, level: int) -> Made:
    """Additions and subtractions, from the left; at higher levels of products."""
    steps: list[str] = []
    total, text = 0, ""
    for at in range(level + 1):
        factor, term = (
            (chance.randint(2, 9) if level > 2 and chance.random() < 0.5 else 1),
            chance.randint(2, 10 * level),
        )
        word = f"{factor} * {term}" if factor > 1 else f"{term}"
        if factor > 1:
            steps.append(f"{word} = {factor * term}.")
        sign = "+" if at == 0 or chance.random() < 0.6 else "-"
        after = SIGNS[sign](total, factor * term)
        if at:
            steps.append(f"{total} {sign} {factor * term} = {after}.")
        total, text = after, f"{text} {sign} {word}" if at else word
    return _exact(f"{text} = ?", total, *steps)


def _linear(chance: Random, /, *, level: int) -> Made:
    """a x + b = c, at higher levels with x on both sides."""
    x, b = chance.randint(1, 6 * level), chance.randint(1, 9 * level)
    a = 1 if level == 2 else chance.randint(2, 3 * level)
    left = f"{'' if a == 1 else a}x"
    if level < 4:
        c = a * x + b
        steps = [f"{left} = {c} - {b} = {c - b}.", *([f"x = {c - b} / {a} = {x}."] if a > 1 else [])]
        return _exact(f"{left} + {b} = {c}. x = ?", x, *steps)
    d = chance.randint(1, a - 1)
    c = (a - d) * x + b
    steps = [f"{a}x - {d}x = {c} - {b}.", f"{a - d}x = {c - b}.", f"x = {c - b} / {a - d} = {x}."]
    return _exact(f"{a}x + {b} = {d}x + {c}. x = ?", x, *steps)


def _remainder(chance: Random, /, *, level: int) -> Made:
    n = chance.randint(3, 9 + 2 * level)
    if level < 4:
        a = chance.randint(n, 20 * level)
        return _exact(f"{a} mod {n} = ?", a % n, f"{a} = {a // n} * {n} + {a % n}.")
    base, power = chance.randint(2, 12), chance.randint(3, level + 2)
    value, steps = 1, []
    for _ in range(power):
        steps.append(f"{value} * {base} = {value * base}, mod {n} it is {value * base % n}.")
        value = value * base % n
    return _exact(f"{base}^{power} mod {n} = ?", value, *steps)


def _divisor(chance: Random, /, *, level: int) -> Made:
    common = chance.randint(2, 4 * level)
    a, b = (common * chance.randint(1, 3 * level) for _ in range(2))
    steps, x, y = [], max(a, b), min(a, b)
    while y:
        steps.append(f"{x} mod {y} = {x % y}.")
        x, y = y, x % y
    if level < 4 or chance.random() < 0.5:
        return _exact(f"gcd({a}, {b}) = ?", x, *steps)
    return _exact(f"lcm({a}, {b}) = ?", a * b // x, *steps, f"gcd = {x}.", f"{a} * {b} / {x} = {a * b // x}.")


def _fractions(chance: Random, /, *, level: int) -> Made:
    parts = [Fraction(chance.randint(1, 2 * level), chance.randint(2, 3 * level)) for _ in range(level - 2)]
    total, steps = parts[0], []
    for part in parts[1:]:
        below = math.lcm(total.denominator, part.denominator)
        above = [f.numerator * (below // f.denominator) for f in (total, part)]
        steps.append(f"{total} + {part} = {above[0]}/{below} + {above[1]}/{below} = {total + part}.")
        total += part
    return _exact(
        f"{' + '.join(map(str, parts))} = ? Give a fraction in lowest terms or a whole number.", total, *steps
    )


def _story(chance: Random, /, *, level: int) -> Made:
    """A word problem of level - 1 steps."""
    name, other = chance.sample(NAMES, 2)
    thing, total = chance.choice(THINGS), chance.randint(5, 30)
    said, steps = [f"{name} has {total} {thing}."], []
    for _ in range(level - 1):
        kind = chance.choice(("gets", "gives", "loses", "bags", "doubles"))
        n, before = chance.randint(2, 9), total
        if kind in ("gives", "loses"):
            n = min(n, total - 1) if total > 1 else 0
            total -= n
            said.append(f"{name} gives {other} {n}." if kind == "gives" else f"{name} loses {n}.")
            steps.append(f"{before} - {n} = {total}.")
        elif kind == "gets":
            total += n
            said.append(f"{other} gives {name} {n} more.")
            steps.append(f"{before} + {n} = {total}.")
        elif kind == "bags":
            m = chance.randint(2, 6)
            total += n * m
            said.append(f"{name} buys {n} bags of {m} {thing} each.")
            steps.append(f"{n} * {m} = {n * m}. {before} + {n * m} = {total}.")
        else:
            total *= 2
            said.append(f"Then {name} doubles the number of {thing}.")
            steps.append(f"{before} * 2 = {total}.")
    return _exact(f"{' '.join(said)} How many {thing} does {name} have now?", total, *steps)


def _system(chance: Random, /, *, level: int) -> Made:
    x, y = chance.randint(1, 20), chance.randint(1, 20)
    a = chance.randint(2, 5)
    b, c = a * x + y, x + y
    steps = [f"Subtract: {a}x - x = {b} - {c}.", f"{a - 1}x = {b - c}.", f"x = {x}.", f"y = {c} - {x} = {y}."]
    product = f"{x} * {y} = {x * y}."
    return _exact(f"{a}x + y = {b} and x + y = {c}. What is x * y?", x * y, *steps, product)


def _exact(text: str, value: int | Fraction, *steps: str) -> Made:
    return Made(text=text, gold=str(value), verifier="math", steps=" ".join(steps))


make = ByLevel(
    [_one_step],
    [_chain, _linear, _remainder, _divisor, _story],
    [_chain, _linear, _remainder, _divisor, _story],
    [_chain, _linear, _remainder, _divisor, _story, _fractions],
    [_chain, _linear, _remainder, _divisor, _story, _fractions, _system],
)
