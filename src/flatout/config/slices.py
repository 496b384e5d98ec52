"""Slices of a split, as `datasets` writes them: `train`, `train[:8000]`, `test[10%:20%]`, `train[-500:]`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SLICE = re.compile(r"(?P<name>[\w.\-/]+)(?:\[(?P<low>-?\d+%?)?:(?P<high>-?\d+%?)?\])?")


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Rows of a split; a bound is a number of rows or a share in per cent, and may count from the end."""

    name: str
    low: str | None = None
    high: str | None = None

    @property
    def needs_total(self) -> bool:
        """Whether the number of rows must be known to find its rows."""
        return any(bound.startswith("-") or bound.endswith("%") for bound in (self.low, self.high) if bound)

    def bounds(self, total: int | None) -> tuple[int, int | None]:
        """The first row and the row after the last; None: to the end."""
        low = _row(self.low, total) if self.low else 0
        return low, _row(self.high, total) if self.high else None


def parsed(split: str) -> Slice | None:
    """The slice that a text means, or None if it means none."""
    match = _SLICE.fullmatch(split)
    return Slice(**match.groupdict()) if match else None


def problem(split: str) -> str | None:
    """What is wrong with a split, or None."""
    found = parsed(split)
    if found is None:
        return f"{split!r} is not a split; write train, train[:8000], test[10%:20%] or train[-500:]"
    bounds = [bound for bound in (found.low, found.high) if bound]
    if any(bound.endswith("%") and not -100 <= int(bound[:-1]) <= 100 for bound in bounds):
        return f"{split!r} has a share outside -100% to 100%"
    alike = len(bounds) == 2 and len({(bound.endswith("%"), bound.startswith("-")) for bound in bounds}) == 1
    if alike and int(bounds[0].rstrip("%")) >= int(bounds[1].rstrip("%")):
        return f"{split!r} is empty; its first row must be before its last"
    return None


def _row(bound: str, total: int | None) -> int:
    if bound.endswith("%"):
        assert total is not None
        share = int(bound[:-1])
        return round(total * (share if share >= 0 else 100 + share) / 100)
    row = int(bound)
    if row >= 0:
        return row
    assert total is not None
    return max(0, total + row)
