"""Whether compiling pays off: it delays the first step and makes all others faster."""

from __future__ import annotations

from dataclasses import dataclass

from flatout.insight.ablate import Ablation, Row
from flatout.words import number


@dataclass(frozen=True, kw_only=True)
class Course:
    """How the time of a run grows: seconds until the end of the first step, and of a token afterwards."""

    name: str
    start_s: float
    token_s: float


@dataclass(frozen=True, kw_only=True)
class Payback:
    """Two rows of an ablation that differ only in compilation; the compiled one starts later and is faster."""

    compiled: Course
    plain: Course

    @property
    def later_s(self) -> float:
        return self.compiled.start_s - self.plain.start_s

    @property
    def tokens(self) -> float:
        """After how many tokens both have taken the same time."""
        return self.later_s / (self.plain.token_s - self.compiled.token_s)

    def __str__(self) -> str:
        return (
            f"Compiling ({self.compiled.name!r} against {self.plain.name!r}) delays the end of the first step by "
            f"{self.later_s:.1f} s, which pays off after {number(float(f'{self.tokens:.3g}'))} tokens."
        )


def paybacks(found: Ablation) -> list[Payback]:
    """Of every row that shows a gain from compiling."""
    named = {row.name: row for row in found.rows}
    pairs = [
        # Where a row is the plan without compiling, its reference is what is compiled.
        (named[row.reference], row) if row.question == "without" else (row, named[row.reference])
        for row in found.rows
        if row.compiles and row.reference in named and row.verdict in ("faster", "slower")
    ]
    courses = [(of, beside) for a, b in pairs if (of := _course(a)) is not None and (beside := _course(b)) is not None]
    return [
        Payback(compiled=compiled, plain=plain)
        for compiled, plain in courses
        if compiled.start_s > plain.start_s and compiled.token_s < plain.token_s
    ]


def _course(row: Row) -> Course | None:
    if row.start_s is None or not row.tokens_per_s:
        return None
    return Course(name=row.name, start_s=row.start_s, token_s=1 / row.tokens_per_s)
