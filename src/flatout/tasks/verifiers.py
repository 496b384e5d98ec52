"""Verifiers: each finds the answer in a completion and compares it with the right one.

Answers are untrusted: they are parsed in bounded time and never run. A comparison gives 1 or 0, except for grids of a
zebra puzzle, which give the share of right cells. No answer is ever guessed.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.tasks import grade

LONGEST_LITERAL = 20_000
# Table answers that are not whole numbers may be rounded to three digits.
TABLE_TOLERANCE = 1e-3
NOTHING = object()

_TIMES_TEN = re.compile(r"\s?(?:\\times|\\cdot|×|·|\*|x)\s?10\s?\^\s?(?:\{\s?([-+]?[0-9]{1,3})\s?\}|([-+]?[0-9]{1,3}))")
_LETTER = re.compile(r"\(?([A-Z])\)?[.:]?|\(([A-Z])\)\s.*|([A-Z])[.:)]\s.*", re.IGNORECASE | re.DOTALL)
_WHOLE = re.compile(r"[-+]?[0-9][0-9,]*(?:\.0*)?")
_BRACKETED = re.compile(r"\(\$?\s?([0-9][0-9,.]*)\s?%?\)")
_FENCE = "```"


@dataclass(frozen=True, kw_only=True)
class Verifier:
    """A function of the right answer and a completion to a reward from 0 to 1.

    `read` turns the right answer of a file into the form that `same` takes; a ValueError says what it must be.
    """

    finders: Sequence[grade.Finder]
    read: Callable[[Any], Any]
    same: Callable[[Any, str], float]
    maths: bool = False

    def answer(self, completion: str) -> str | None:
        return grade.find(completion, self.finders)

    def __call__(self, gold: Any, completion: str) -> float:
        found = self.answer(completion)
        return 0.0 if found is None else float(self.same(self.read(gold), found))


# -- the right answer of a file ------------------------------------------------------------------------------


def _text(gold: Any) -> str:
    if isinstance(gold, bool) or not isinstance(gold, str | int | float) or not str(gold).strip():
        raise ValueError("must be text or a number")
    return str(gold).strip()


def _word(gold: Any) -> str:
    text = _text(gold)
    if len(text.split()) != 1:
        raise ValueError("must be one word")
    return text


def _letter(gold: Any) -> str:
    found = letter(_text(gold))
    if found is None:
        raise ValueError("must be the letter of an option")
    return found


def _number(gold: Any) -> tuple[float, float]:
    """A number, or {"value": a number, "tolerance": a share of it}."""
    value, within = (gold.get("value"), gold.get("tolerance", 0)) if isinstance(gold, Mapping) else (gold, 0)
    found = number(_text(value))
    if found is None or isinstance(within, bool) or not isinstance(within, int | float) or not 0 <= within < 1:
        raise ValueError("must be a number, or an object with value and tolerance")
    return found, float(within)


def _cells(gold: Any) -> list[str]:
    cells = [_text(cell) for cell in gold] if isinstance(gold, list | tuple) else _text(gold).split("|")
    if not cells or not all(cell.strip() for cell in cells):
        raise ValueError("must be an answer, or several in a list or separated by |")
    return cells


def _items(gold: Any) -> list[str]:
    items = [_text(item) for item in gold] if isinstance(gold, list | tuple) else listed(_text(gold))
    if not items:
        raise ValueError("must be a list of names")
    return [_plain(item) for item in items]


def _solved(gold: Any) -> tuple[list[str], list[list[str]]]:
    header, rows = _puzzle_grid(literal(gold) if isinstance(gold, str) else gold)
    if header is None or not rows or not header or any(len(row) != len(header) for row in rows):
        raise ValueError("must be an object with header, a list, and rows, a list of lists of the same length")
    return header, rows


def _colours(gold: Any) -> list[list[int]]:
    rows = literal(gold) if isinstance(gold, str) else _lists(gold)
    if not _is_grid(rows):
        raise ValueError("must be a grid: a list of lists of whole numbers, all of one length")
    found: list[list[int]] = rows
    return found


def _value(gold: Any) -> Any:
    """A Python or JSON literal."""
    value = literal(gold) if isinstance(gold, str) else gold
    if value is NOTHING:
        raise ValueError("must be a Python or JSON literal; a text needs quotes")
    return value


def _payload(gold: Any) -> Any:
    """The output of a program in JSON: `"output": …`, `{"output": …}` or the value itself."""
    if not isinstance(gold, str):
        return _normal(gold)
    value = _json(gold)
    return _normal(gold if value is NOTHING else _unwrapped(value))


# -- comparisons ---------------------------------------------------------------------------------------------


def _same_number(gold: tuple[float, float], found: str) -> bool:
    got = number(found)
    return got is not None and grade.close(got, gold[0], relative=gold[1])


def _same_letter(gold: str, found: str) -> bool:
    return letter(found) == gold


def _same_word(gold: str, found: str) -> bool:
    return len(found) <= 2 * len(gold) + 2 and _plain(found) == _plain(gold)


def _same_cells(gold: list[str], found: str) -> bool:
    """The same answers in any order, each once."""
    got = grade.without_text(found).split("|")
    if len(got) != len(gold):
        return False
    for want in gold:
        match = next((cell for cell in got if same_cell(cell, want)), None)
        if match is None:
            return False
        got.remove(match)
    return True


def _same_items(gold: list[str], found: str) -> bool:
    return [_plain(item) for item in listed(found)] == gold


def _share_of_cells(gold: tuple[list[str], list[list[str]]], found: str) -> float:
    """Rows in the order of the puzzle; columns by the header if there is one. Another shape gets 0."""
    header, rows = gold
    own, got = _puzzle_grid(literal(found))
    if got is None or len(got) != len(rows) or any(len(row) != len(header) for row in got):
        return 0.0
    columns = list(range(len(header)))
    if own is not None:
        names, wanted = [_plain(name) for name in own], [_plain(name) for name in header]
        if sorted(names) != sorted(wanted) or len(set(names)) != len(names):
            return 0.0
        columns = [names.index(name) for name in wanted]
    right = sum(
        _plain(mine[column]) == _plain(cell)
        for mine, row in zip(got, rows, strict=True)
        for column, cell in zip(columns, row, strict=True)
    )
    return right / (len(header) * len(rows))


def _same_grid(gold: list[list[int]], found: str) -> bool:
    start, end = found.find("[["), found.rfind("]]")
    if start >= 0:
        value = literal(found[start : end + 2])
    else:  # rows of numbers
        lines = [line.split() for line in found.strip().splitlines()]
        ascii_digits = all(re.fullmatch("[0-9]", cell) for line in lines for cell in line)
        value = [[int(cell) for cell in line] for line in lines] if ascii_digits else NOTHING
    return _is_grid(value) and value == gold


def _same_literal(gold: Any, found: str) -> bool:
    if isinstance(gold, str) and found == gold:  # a text without its quotes
        return True
    value = literal(found)
    return value is not NOTHING and same_value(value, gold)


def _same_payload(gold: Any, found: str) -> bool:
    value = _json(found)
    return value is not NOTHING and same_value(_normal(_unwrapped(value)), gold)


def same_cell(got: str, want: str) -> bool:
    """Whole numbers must be equal; other numbers may be rounded; text is equal except for case and spaces."""
    a, b = _cell_number(got), _cell_number(want)
    if a is None or b is None:
        return grade.same_text(got.strip().strip("\"'*"), want.strip().strip("\"'*"))
    whole = _WHOLE.fullmatch(want.strip().lstrip("$").strip())
    within = 0.0 if whole else TABLE_TOLERANCE
    shares = [a / 100] if "%" in got and "%" not in want else []
    return any(grade.close(value, b, relative=within) for value in [a, *shares])


def same_value(a: Any, b: Any) -> bool:
    """Equal in Python, but True is not 1, and floats may differ in the last digits."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        try:
            return a == b or (isinstance(a + b, float) and math.isclose(a, b, rel_tol=1e-9))
        except OverflowError:
            return False
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    return bool(a == b)


# -- reading answers -----------------------------------------------------------------------------------------


def number(text: str) -> float | None:
    """A number in a few words, also as 3 × 10^8."""
    if len(text) > 4 * grade.LONGEST_NUMBER:
        return None
    plain = grade.without_text(text.replace("−", "-").replace("{,}", ",").replace("\\,", " ").replace("~", " "))
    return grade.amount(_TIMES_TEN.sub(lambda match: f"e{match[1] or match[2]}", plain))


def letter(text: str) -> str | None:
    """The option in `B`, `(B)`, `B.` or `B) the text of the option`."""
    found = _LETTER.fullmatch(grade.without_text(text).strip(" *$\n")) if len(text) <= 1000 else None
    return None if found is None else next(group for group in found.groups() if group).upper()


def listed(text: str) -> list[str]:
    """The items of `['a', 'b']`, `[a, b]` or `a, b`."""
    text = text.strip()
    if len(text) > LONGEST_LITERAL:
        return []
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    items = [item.strip().strip("'\"").strip() for item in text.split(",")]
    return items if all(items) else []


def literal(text: Any) -> Any:
    """A JSON value or Python literal; NOTHING if the text is neither. Names, calls and arithmetic are neither."""
    if not isinstance(text, str) or len(text) > LONGEST_LITERAL or not text.strip():
        return NOTHING
    text = _unfenced(text).strip()
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return NOTHING


def fenced(text: str) -> str | None:
    """The text inside the last ```…```."""
    end = text.rfind(_FENCE)
    start = text.rfind(_FENCE, 0, max(0, end))
    return text[start : end + len(_FENCE)] if start >= 0 else None


def last_object(text: str) -> str | None:
    """The last {…} in a text, by balanced braces outside of strings, read from its end; not a part of a longer one."""
    end = text.rfind("}")
    depth, quoted = 0, False
    for at in range(end, -1, -1):
        if text[at] == '"' and (at == 0 or text[at - 1] != "\\"):
            quoted = not quoted
        elif not quoted:
            depth += (text[at] == "}") - (text[at] == "{")
            if depth == 0:
                whole = text[at] == "{" and text.count("{", 0, at) <= text.count("}", 0, at)
                return text[at : end + 1] if whole else None
    return None


def _unfenced(text: str) -> str:
    text = text.strip()
    if not (text.startswith(_FENCE) and text.endswith(_FENCE) and len(text) >= 2 * len(_FENCE)):
        return text
    inner = text[len(_FENCE) : -len(_FENCE)]
    head, newline, rest = inner.partition("\n")
    return rest if newline and head.strip().isalpha() else inner.removeprefix("json").removeprefix("python")


def _json(text: str) -> Any:
    """A JSON value, also a pair `"output": 5` without its braces."""
    if len(text) > LONGEST_LITERAL:
        return NOTHING
    text = _unfenced(text).strip()
    for candidate in (text, f"{{{text}}}"):
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):
            continue
    return NOTHING


def _unwrapped(value: Any) -> Any:
    return value.get("output", value.get("input", value)) if isinstance(value, dict) else value


def _normal(value: Any, *, depth: int = 0) -> Any:
    """JSON inside of strings is read, and "true" is true."""
    if depth > 50:
        return NOTHING
    if isinstance(value, str):
        text = value.strip()
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        if text[:1] + text[-1:] in ("[]", "{}") and (inner := _json(text)) is not NOTHING:
            return _normal(inner, depth=depth + 1)
        return value
    if isinstance(value, list | tuple):
        return [_normal(one, depth=depth + 1) for one in value]
    if isinstance(value, dict):
        return {str(key): _normal(one, depth=depth + 1) for key, one in value.items()}
    return value


def _cell_number(cell: str) -> float | None:
    cell = cell.strip().replace("−", "-")
    if negative := _BRACKETED.fullmatch(cell):  # as accountants write it
        cell = f"-{negative[1]}"
    return grade.number(cell)


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _lists(value: Any) -> Any:
    """Rows as lists: Parquet files may give other sequences."""
    return [list(row) if isinstance(row, list | tuple) else row for row in value] if isinstance(value, list) else value


def _is_grid(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(row, list) and row and len(row) == len(value[0]) for row in value)
        and all(isinstance(cell, int) and not isinstance(cell, bool) for row in value for cell in row)
    )


def _puzzle_grid(value: Any) -> tuple[list[str] | None, list[list[str]] | None]:
    """The header, if there is one, and the rows of a grid; (None, None) if it is not a grid of texts."""
    header, rows = (value.get("header"), value.get("rows")) if isinstance(value, dict) else (None, value)
    if header is not None and not (isinstance(header, list) and all(map(_is_cell, header))):
        return None, None
    if not isinstance(rows, list) or not all(isinstance(row, list) and all(map(_is_cell, row)) for row in rows):
        return None, None
    try:
        return (
            None if header is None else [str(name) for name in header],
            [[str(cell) for cell in row] for row in rows],
        )
    except ValueError:  # a number with more digits than Python prints
        return None, None


def _is_cell(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


MARKED = (grade.tagged, grade.boxed)
VERIFIERS: dict[str, Verifier] = {
    "math": Verifier(finders=MARKED, read=_text, same=lambda gold, got: grade.same_maths(got, gold), maths=True),
    "number": Verifier(finders=MARKED, read=_number, same=_same_number),
    "letter": Verifier(finders=MARKED, read=_letter, same=_same_letter),
    "text": Verifier(finders=MARKED, read=_text, same=lambda gold, got: grade.same_text(got, gold)),
    "word": Verifier(finders=(grade.tagged,), read=_word, same=_same_word),
    "ordering": Verifier(finders=(grade.tagged,), read=_items, same=_same_items),
    "zebra": Verifier(finders=(grade.tagged,), read=_solved, same=_share_of_cells),
    "grid": Verifier(finders=(grade.tagged,), read=_colours, same=_same_grid),
    "table": Verifier(finders=MARKED, read=_cells, same=_same_cells),
    "literal": Verifier(finders=(grade.tagged,), read=_value, same=_same_literal),
    "json": Verifier(finders=(grade.tagged, fenced, grade.boxed, last_object), read=_payload, same=_same_payload),
}
