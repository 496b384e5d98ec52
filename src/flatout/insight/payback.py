"""Whether compiling pays off: it delays the first step and makes all others faster."""

from __future__ import annotations

from dataclasses import dataclass

from flatout.insight.rows import Ablation, Row
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
            f"Compiling ({self.compiled.name!r} against {self.plain.name!r}) delays the end of the first step by up to "
            f"{self.later_s:.1f} s, which pays off after {number(float(f'{self.tokens:.3g}'))} tokens. Where torch has "
            "the compiled code in its cache, the delay is shorter."
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
    return [payback for compiled, plain in pairs if (payback := _payback(compiled, plain)) is not None]


def _payback(compiled: Row, plain: Row) -> Payback | None:
    late, early = compiled.longest_start_s, plain.start_s
    if late is None or early is None or not compiled.tokens_per_s or not plain.tokens_per_s:
        return None
    if late <= early or compiled.tokens_per_s <= plain.tokens_per_s:
        return None
    return Payback(
        compiled=Course(name=compiled.name, start_s=late, token_s=1 / compiled.tokens_per_s),
        plain=Course(name=plain.name, start_s=early, token_s=1 / plain.tokens_per_s),
    )
