"""Tables: a small markdown table and a question about it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from flatout.tasks.domains.made import NAMES, Made, several

CITIES = ["Bern", "Cork", "Graz", "Kiel", "Lyon", "Oslo", "Pisa", "Riga", "Rome", "Turin"]
COLUMNS = {"age": (5, 90), "score": (0, 99), "price": (1, 80), "count": (1, 60), "weight": (3, 99)}

Row = dict[str, str | int]
Asked = tuple[str, list[str], str]  # the question, the answers, the way there


def make(chance: Random, /, *, level: int) -> Made:
    """Level 1 has two rows and two columns; each level adds a row and every second one a column."""
    numbers = several(chance, sorted(COLUMNS), 1 + level // 2)
    header = ["name", *(["city"] if level > 1 else []), *numbers]
    rows: list[Row] = [
        {"name": name, "city": chance.choice(CITIES)} | {key: chance.randint(*COLUMNS[key]) for key in numbers}
        for name in several(chance, NAMES, level + 1)
    ]
    question, answers, steps = chance.choice(KINDS[level - 1])(chance, rows, numbers)
    lines = [header, ["---"] * len(header), *([str(row[key]) for key in header] for row in rows)]
    text = "\n".join("|" + "|".join(line) + "|" for line in lines)
    return Made(text=f"{text}\n{question}", gold=answers, verifier="table", steps=steps, answer="|".join(answers))


def _lookup(chance: Random, rows: list[Row], numbers: list[str]) -> Asked:
    row, key = chance.choice(rows), chance.choice(numbers)
    return f"What is the {key} of {row['name']}?", [str(row[key])], ""


def _city(chance: Random, rows: list[Row], numbers: list[str]) -> Asked:
    row = chance.choice(rows)
    return f"What is the city of {row['name']}?", [str(row["city"])], ""


def _sum(chance: Random, rows: list[Row], numbers: list[str]) -> Asked:
    key = chance.choice(numbers)
    values = [int(row[key]) for row in rows]
    total = sum(values)
    return f"What is the sum of the {key} column?", [str(total)], f"{' + '.join(map(str, values))} = {total}."


def _largest(chance: Random, rows: list[Row], numbers: list[str]) -> Asked:
    """All names with the largest or smallest value; mostly one."""
    key, most = chance.choice(numbers), chance.random() < 0.5
    best = (max if most else min)(int(row[key]) for row in rows)
    names = [str(row["name"]) for row in rows if row[key] == best]
    word = "largest" if most else "smallest"
    return f"Who has the {word} {key}? {SEVERAL}", names, f"The {word} {key} is {best}."


def _count(chance: Random, rows: list[Row], numbers: list[str]) -> Asked:
    names, key, limit = _above(chance, rows, numbers)
    return f"How many rows have a {key} above {limit}?", [str(len(names))], f"{', '.join(names) or 'No one'}."


def _which(chance: Random, rows: list[Row], numbers: list[str]) -> Asked:
    names, key, limit = _above(chance, rows, numbers)
    steps = " ".join(f"{row['name']} {row[key]}." for row in rows)
    return f"Which names have a {key} above {limit}? {SEVERAL} If none, answer none.", names or ["none"], steps


def _sum_of_city(chance: Random, rows: list[Row], numbers: list[str]) -> Asked:
    key, city = chance.choice(numbers), chance.choice(rows)["city"]
    values = [int(row[key]) for row in rows if row["city"] == city]
    steps = f"{' + '.join(map(str, values))} = {sum(values)}."
    return f"What is the sum of the {key} of all rows with city {city}?", [str(sum(values))], steps


def _difference(chance: Random, rows: list[Row], numbers: list[str]) -> Asked:
    key = chance.choice(numbers)
    values = [int(row[key]) for row in rows]
    high, low = max(values), min(values)
    words = f"What is the difference between the largest and the smallest {key}?"
    return words, [str(high - low)], f"Largest {high}, smallest {low}. {high} - {low} = {high - low}."


def _mean(chance: Random, rows: list[Row], numbers: list[str]) -> Asked:
    key = chance.choice(numbers)
    values = [int(row[key]) for row in rows]
    mean = f"{sum(values) / len(values):.2f}"
    steps = f"{' + '.join(map(str, values))} = {sum(values)}. {sum(values)} / {len(values)} = {mean}."
    return f"What is the mean {key}, rounded to two decimals?", [mean], steps


def _above(chance: Random, rows: list[Row], numbers: list[str]) -> tuple[list[str], str, int]:
    key = chance.choice(numbers)
    limit = int(chance.choice(rows)[key])
    return [str(row["name"]) for row in rows if int(row[key]) > limit], key, limit


SEVERAL = "Separate several answers by |."
KINDS: tuple[tuple[Callable[[Random, list[Row], list[str]], Asked], ...], ...] = (
    (_lookup,),
    (_lookup, _city, _sum),
    (_lookup, _sum, _largest, _count),
    (_sum, _largest, _count, _which, _sum_of_city, _difference),
    (_count, _which, _sum_of_city, _difference, _mean),
)
