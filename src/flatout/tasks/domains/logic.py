"""Logic: true or false, orderings, paths in graphs, and small zebra puzzles."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from itertools import pairwise, permutations, product
from random import Random

from flatout.tasks.domains.made import NAMES, ByLevel, Made, several

PAIRS = (("taller", "tallest", "shortest"), ("older", "oldest", "youngest"), ("faster", "fastest", "slowest"))
ATTRIBUTES = {
    "name": ("Ann", "Bob", "Cid", "Dora"),
    "pet": ("cat", "dog", "fish", "owl"),
    "drink": ("tea", "milk", "juice", "water"),
    "colour": ("red", "blue", "green", "white"),
}
ORDINALS = ("first", "second", "third", "fourth")

Grid = tuple[tuple[str, ...], ...]  # an attribute's values by house, for each attribute
Clue = tuple[str, Callable[[Grid], bool]]


def _comparison(chance: Random) -> tuple[str, bool]:
    a, b = several(chance, range(60), 2)
    sign = chance.choice("<>")
    return f"{a} {sign} {b}", a < b if sign == "<" else a > b


def _one_comparison(chance: Random, /, *, level: int) -> Made:
    text, value = _comparison(chance)
    return Made(text=f"{text} ? true or false", gold=_truth(value), verifier="word")


def _boolean(chance: Random, /, *, level: int) -> Made:
    """Comparisons joined from the left, each join in brackets."""
    text, value = _comparison(chance)
    steps = [f"{text} is {_truth(value)}."]
    for at in range(level - 1):
        other, truth = _comparison(chance)
        steps.append(f"{other} is {_truth(truth)}.")
        if negated := level > 2 and chance.random() < 0.4:
            other, truth = f"not ({other})", not truth
            steps.append(f"not {_truth(not truth)} is {_truth(truth)}.")
        sign = chance.choice(("and", "or", "xor") if level > 3 else ("and", "or"))
        joined = {"and": value and truth, "or": value or truth, "xor": value != truth}[sign]
        steps.append(f"{_truth(value)} {sign} {_truth(truth)} is {_truth(joined)}.")
        text, value = f"{f'({text})' if at or negated else text} {sign} {other}", joined
    return Made(text=f"{text} ? true or false", gold=_truth(value), verifier="word", steps=" ".join(steps))


def _who(chance: Random, /, *, level: int) -> Made:
    """Two or three people, and who comes first or last."""
    people = several(chance, NAMES, level + 1)
    more, most, least = chance.choice(PAIRS)
    clues = [f"{a} is {more} than {b}." for a, b in pairwise(people)]
    chance.shuffle(clues)
    first = chance.random() < 0.5
    steps = "" if level == 1 else f"From {most} to {least}: {', '.join(people)}."
    text = f"{' '.join(clues)} Who is {most if first else least}?"
    return Made(text=text, gold=people[0 if first else -1], verifier="word", steps=steps)


def _ordering(chance: Random, /, *, level: int) -> Made:
    people = several(chance, NAMES, level + 1)
    more, most, least = chance.choice(PAIRS)
    clues = [f"{a} is {more} than {b}." for a, b in pairwise(people)]
    for _ in range(level - 3):  # true, and not needed
        i, j = sorted(several(chance, range(len(people)), 2))
        if j > i + 1 and (extra := f"{people[i]} is {more} than {people[j]}.") not in clues:
            clues.append(extra)
    chance.shuffle(clues)
    steps = " ".join(f"{a}, then {b}." for a, b in pairwise(people))
    text = f"{' '.join(clues)} List all of them from {most} to {least}, separated by commas."
    return Made(text=text, gold=list(people), verifier="ordering", steps=steps, answer=", ".join(people))


def _path(chance: Random, /, *, level: int) -> Made:
    """Whether a node of a directed graph can be reached; as often as not it can."""
    nodes = several(chance, "ABCDEFGHJKLMNPQRSTUVWXYZ", 2 * level)
    start, goal = nodes[0], nodes[-1]
    middle = nodes[1:-1]
    linked = chance.random() < 0.5
    on_the_way = several(chance, middle, max(1, level - 1))
    way = [start, *on_the_way, goal]
    edges = set(pairwise(way))
    if not linked:
        edges.discard(chance.choice(sorted(edges)))
    for _ in range(level):
        a, b = several(chance, nodes, 2)
        edge = (a, b)
        if linked or goal not in _reached(start, edges | {edge})[0]:
            edges.add(edge)
    order = sorted(edges)
    chance.shuffle(order)
    reached, walk = _reached(start, edges)
    text = f"One-way roads: {', '.join(f'{a}->{b}' for a, b in order)}. Can you get from {start} to {goal}? yes or no"
    steps = " ".join(walk) or f"No road leaves {start}."
    return Made(text=text, gold="yes" if goal in reached else "no", verifier="word", steps=steps)


def _reached(start: str, edges: set[tuple[str, str]]) -> tuple[set[str], list[str]]:
    """The nodes that can be reached, and the roads taken, in an order that does not depend on hashes."""
    reached, walk, waiting = {start}, [], [start]
    while waiting:
        here = waiting.pop(0)
        for a, b in sorted(edges):
            if a == here and b not in reached:
                reached.add(b)
                waiting.append(b)
                walk.append(f"{a}->{b}.")
    return reached, walk


def _zebra(chance: Random, /, *, level: int) -> Made:
    houses = 2 if level == 3 else 3
    kinds = several(chance, sorted(ATTRIBUTES), 2 if level < 5 else 3)
    columns = [several(chance, ATTRIBUTES[kind], houses) for kind in kinds]
    truth: Grid = tuple(map(tuple, columns))
    possible: list[Grid] = list(product(*(list(permutations(sorted(column))) for column in columns)))
    clues = _clues(truth)
    chance.shuffle(clues)
    said = []
    for text, holds in clues:
        left = [grid for grid in possible if holds(grid)]
        if len(left) < len(possible):
            possible = left
            said.append(text)
        if len(possible) == 1:
            break
    rows = [list(row) for row in zip(*truth, strict=True)]
    values = ", ".join(value for column in columns for value in sorted(column))
    gold = {"header": kinds, "rows": rows}
    text = (
        f"{houses} houses in a row, left to right. Each has one {' and one '.join(kinds)}, all different: {values}. "
        f"{' '.join(said)} Give the houses in order as JSON: "
        f'{{"header": {json.dumps(kinds)}, "rows": [{json.dumps(["..."] * len(kinds))}, ...]}}'
    )
    steps = " ".join(f"The {ORDINALS[at]} house: {', '.join(row)}." for at, row in enumerate(rows))
    return Made(text=text, gold=gold, verifier="zebra", steps=steps)


def _clues(truth: Grid) -> list[Clue]:
    """Every true clue: together they leave only this grid."""
    place = {value: (at, house) for at, column in enumerate(truth) for house, value in enumerate(column)}
    clues: list[Clue] = []
    for a, (i, house) in place.items():
        clues.append((f"{a.capitalize()} is in the {ORDINALS[house]} house.", _in_house(i, a, house)))
        for b, (j, other) in place.items():
            if i < j:
                same = house == other
                words = f"{a.capitalize()} and {b} are {'' if same else 'not '}in the same house."
                clues.append((words, _houses(i, a, j, b, operator.eq if same else operator.ne)))
            if i != j and other == house + 1:
                words = f"{a.capitalize()} is directly left of {b}."
                clues.append((words, _houses(i, a, j, b, lambda left, right: left + 1 == right)))
    return clues


def _in_house(i: int, a: str, house: int) -> Callable[[Grid], bool]:
    return lambda grid: grid[i][house] == a


def _houses(i: int, a: str, j: int, b: str, fits: Callable[[int, int], bool]) -> Callable[[Grid], bool]:
    return lambda grid: fits(grid[i].index(a), grid[j].index(b))


def _truth(value: bool) -> str:
    return "true" if value else "false"


make = ByLevel(
    [_one_comparison, _who],
    [_boolean, _who, _path],
    [_boolean, _ordering, _path, _zebra],
    [_boolean, _ordering, _path, _zebra],
    [_boolean, _ordering, _path, _zebra],
)
