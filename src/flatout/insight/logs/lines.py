"""The named numbers of one printed line.

Lines that a trainer prints in a loop differ in their digits only, so where the numbers stand is found once for each
shape of line. Patterns treat all digits alike, so this gives the same rows as looking at every line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from flatout.insight.logs.names import LONGEST_NUMBER, NUMBER, number_of, reader_of

_WORD = r"(?!(?i:nan|inf)\b)[A-Za-z][\w/.@%-]*+(?:\((?i:ms|s|%|gib|gb|tps|tflops|tflop/s/gpu)\))?+"
_PAIR = re.compile(
    rf"(?:(?<![\w/.@])|(?<=\d/))({_WORD}(?:\x20(?:\((?i:ms|gib|gb|tflop/s/gpu)\)|{_WORD})){{0,5}}+)['\"]?+"
    rf"(?:\s*+[:=]\s*+|\s++)(?:np\.\w++\(|tensor\(|[\[('\"])*+\s*+({NUMBER})"
    r"(?:\s?(%|ms|us|s(?:ec(?:onds?)?)?|[GM]i?B|[kKMB])(?!\w))?+(?!\w|[.:]\d)"
)
_UNIT = r"tok(?:ens?)?/s(?:ec(?:ond)?)?(?:/(?:gpu|device))?|samples/s(?:ec)?|it/s|s/it"
_RATE = rf"({NUMBER})\s?([kKM]?)\s?({_UNIT})(?![\w/])"
# In `loss 3.1 tok/s 5000` the unit is a name: a number before it and one behind it.
_BEFORE_ITS_UNIT = re.compile(rf"(?<![\w.,]){_RATE}(?!\s*+[:=]|\s*+[\d.])|(?<![\w.,:=])(?<![\w:=] ){_RATE}(?!\s*+[:=])")
_MILLISECONDS = re.compile(rf"\|\s*+({NUMBER}) ms\s*+(?:\||$)")
_MFU_FIRST = re.compile(rf"(?<![\w.,])({NUMBER})\s?% (?:\w++ )?MFU\b")
_BRACKETS = re.compile(r"\[\s*+(\d++)\s*+/\s*+(\d++)\s*+\]")
_TOTAL = re.compile(r"\b(?i:step|iter|iteration)s?\b\W{0,4}\d++\s*+/\s*+(\d++)")
_BAR = re.compile(r"(?<!\d)(\d++)/(\d++) \[[\d:]++<[\d:?]++(?:,\s*+([\d.]++)(it/s|s/it))?")
# Bars of something other than training.
_OTHER_BAR = re.compile(r"(?i)load|map|generat|eval|valid|test|download|token|filter|fetch|sanity|predict|sampl|sav")
_USED = re.compile(
    rf"(?i:\b(?:mem(?:ory)?|v?ram|gpu(?:[ _]?(?:\d++|mem(?:ory)?))?))\W{{1,3}}({NUMBER})\s?(?:[GM]i?B)?\s?"
    rf"(?:/\s?({NUMBER})\s?[GM]i?B|[GM]i?B\s?\(({NUMBER})\s?%\))"
)
# A row of the table of nvidia-smi.
_SMI = re.compile(r"\|\s*+(\d++)MiB\s*+/\s*+(\d++)MiB\s*+\|\s*+(\d++)%")

_WORD_WITH_DIGIT = re.compile(r"(?<![A-Za-z_/.@%-])[A-Za-z_][A-Za-z_/.@%-]*+\d[\w/.@%-]*+")
_ZERO = str.maketrans("123456789", "000000000")
_MOST_SHAPES = 1 << 12

Read = Callable[..., float | None]


class Field:
    """A number in a line: its name, where its text stands, and how it is read. It may be read from several texts."""

    __slots__ = ("name", "places", "read")

    def __init__(self, name: str, read: Read, *places: tuple[int, int]) -> None:
        self.name, self.read, self.places = name, read, [slice(*place) for place in places]


@dataclass(kw_only=True, slots=True)
class Shape:
    """Where the numbers of a line stand, and of all lines like it."""

    fields: Sequence[Field]
    same: Sequence[tuple[slice, str]]  # digits that are no numbers
    kind: str | None = None  # of the log, once it was looked up

    def row_of(self, line: str) -> dict[str, float]:
        row: dict[str, float] = {}
        for field in self.fields:
            if field.name in row:
                continue
            places = field.places
            number = field.read(line[places[0]]) if len(places) == 1 else field.read(*(line[at] for at in places))
            if number is not None:
                row[field.name] = number
        return row


def row_of(line: str) -> dict[str, float]:
    """The named numbers of one printed line; of two with the same name, the first."""
    return _shape_of(line).row_of(line)


def _shape_of(line: str) -> Shape:
    found = list(_fields(line))
    return Shape(fields=found, same=list(_digits_of_names(line)))


class Shapes:
    """The shapes of the lines so far. Lines are alike if they are the same with 0 for every digit."""

    def __init__(self) -> None:
        self._known: dict[str, Shape] = {}

    def of(self, line: str) -> Shape:
        zeros = line.translate(_ZERO)
        shape = self._known.get(zeros)
        if shape is None or any(line[place] != text for place, text in shape.same):
            if len(self._known) >= _MOST_SHAPES:
                self._known.clear()
            shape = self._known[zeros] = _shape_of(line)
        return shape


def _digits_of_names(line: str) -> Iterator[tuple[slice, str]]:
    """Digits that do not stand for a number, such as those of bf16_mfu: lines are alike only if these are the same."""
    for word in _WORD_WITH_DIGIT.finditer(line):
        yield slice(*word.span()), word[0]


def _fields(line: str) -> Iterator[Field]:
    # A search for a character is far faster than one for a pattern.
    if smi := ("MiB" in line and _SMI.search(line)) or None:
        yield Field("memory_gib", lambda now: _scaled(1 / 1024, now), smi.span(1))
        yield Field("memory_share", _quotient, smi.span(1), smi.span(2))
        yield Field("gpu_util", partial(_scaled, 0.01), smi.span(3))
    if used := ("B" in line and _USED.search(line)) or None:
        if used[3] is not None:
            yield Field("memory_share", partial(_scaled, 0.01), used.span(3))
        else:
            yield Field("memory_share", _quotient, used.span(1), used.span(2))
    if (bar := ("<" in line and _BAR.search(line)) or None) and not _OTHER_BAR.search(line[: bar.start()][-80:]):
        yield Field("step", _whole, bar.span(1))
        yield Field("total", _whole, bar.span(2))
        if bar[3]:
            yield Field("seconds", _scaled_bar if bar[4] == "s/it" else _inverse, bar.span(3))
    pairs = line
    if "/s" in line or "s/it" in line:
        for rate in _BEFORE_ITS_UNIT.finditer(line):
            yield _rate(rate)
        pairs = _BEFORE_ITS_UNIT.sub(lambda found: "|" * len(found[0]), line)
    for pair in _PAIR.finditer(pairs):
        if (read := reader_of(pair[1], pair[3] or "")) is not None:
            yield Field(*read, pair.span(2))
    if plain := "| " in line and _MILLISECONDS.search(line):
        yield Field("seconds", partial(_scaled, 1e-3), plain.span(1))
    if first := "MFU" in line and _MFU_FIRST.search(line):
        yield Field("mfu", partial(_scaled, 0.01), first.span(1))
    if "/" not in line:
        return
    if total := _TOTAL.search(line):
        yield Field("total", _whole, total.span(1))
    for place in _BRACKETS.finditer(line):
        if not re.search(r"(?i)epoch\W*$", line[max(0, place.start() - 10) : place.start()]):
            yield Field("step", _whole, place.span(1))
            yield Field("total", _whole, place.span(2))


def _rate(found: re.Match[str]) -> Field:
    """A speed that stands before its unit."""
    at = 1 if found[1] is not None else 4
    many, unit = found[at + 1].lower(), found[at + 2]
    name = "tokens_per_s" if unit.startswith("tok") else "samples_per_s" if unit.startswith("sam") else "steps_per_s"
    name = "gpu_tokens_per_s" if unit.endswith(("/gpu", "/device")) else "seconds" if unit == "s/it" else name
    return Field(name, partial(_scaled, {"k": 1e3, "m": 1e6}.get(many, 1.0)), found.span(at))


def _scaled(factor: float, text: str) -> float | None:
    number = number_of(text)
    return None if number is None else number * factor


def _scaled_bar(text: str) -> float | None:
    return number_of(text.rstrip(".")) or None


def _inverse(text: str) -> float | None:
    speed = _scaled_bar(text)
    return 1 / speed if speed else None


def _whole(text: str) -> float:
    return float(text[:LONGEST_NUMBER])


def _quotient(now: str, total: str) -> float | None:
    used, whole = number_of(now), number_of(total)
    return used / whole if used is not None and whole else None
