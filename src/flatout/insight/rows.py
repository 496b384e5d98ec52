"""The result of an ablation: its rows, what they say, and what else must be known to read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from flatout import parity
from flatout.insight.compare import finite
from flatout.insight.switches import Kind
from flatout.parity import Difference
from flatout.words import number, percent

HL = "Hodges-Lehmann"
HEADS = ("", "claim", "tokens/s", "speed", HL, "MFU", "memory", "start-up", "loss", "verdict")

# The last one is measured on request: what it changes is another training.
Question = Literal["alone", "without", "cumulative", "recipe"]
QUESTIONS: tuple[Question, ...] = get_args(Question)
USUAL = QUESTIONS[:3]
LossVerdict = Literal["equal", "different", "not enough evidence"]
SHORT, NOT_YET = "not enough evidence", "not compared yet"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant against its reference. Times are ratios: below 1, it takes less time."""

    name: str
    question: Question | None
    kind: Kind | None
    reference: str | None
    task: str | None
    claim: str | None
    blocks: int
    tokens_per_s: float | None
    mfu: float | None
    peak_gib: float | None
    start_s: float | None
    longest_start_s: float | None  # of all trials: a first compilation finds nothing in torch's cache
    loss: float | None
    time: Difference | None
    loss_difference: Difference | None
    loss_verdict: LossVerdict | None
    problem: str | None
    not_in_effect: str | None = None  # why the switch changes nothing here
    compiles: bool = False  # the switch takes time at the start
    whole: bool = False  # all steps are compared together, because the switch costs time in some of them only

    @property
    def verdict(self) -> str:
        if self.problem is not None:
            return self.problem
        if self.time is not None and self.time.decided:
            return self.time.verdict
        if self.not_in_effect is not None:
            return f"not in effect: {self.not_in_effect}"
        if self.time is None:
            return "reference" if self.reference is None else NOT_YET if self.blocks else "not measured"
        if self.time.verdict == "no effect shown":
            return f"no difference above {parity.MARGIN:.0%}"
        return SHORT

    @property
    def blocks_needed(self) -> int:
        """More blocks until the next planned look at the evidence; 0 if it is not short."""
        return self.time.needed_more if self.time is not None and self.is_short else 0

    @property
    def is_short(self) -> bool:
        """Whether more blocks might decide."""
        return self.blocks > 0 and self.reference is not None and self.verdict in (SHORT, NOT_YET)

    @property
    def enough(self) -> int | None:
        """About how many blocks in all would decide; None if that is unknown, or nothing is left to decide."""
        return parity.enough(self.time) if self.time is not None and self.is_short else None

    @property
    def cells(self) -> list[str]:
        """The row as a table shows it, under HEADS."""
        speed = "" if self.time is None else f"{1 / self.time.ratio:.2f}x"
        if self.time is not None and self.time.low > 0:
            speed += f" ({1 / self.time.high:.2f} to {1 / self.time.low:.2f})"
        return [
            self.name,
            self.claim or "",
            number(self.tokens_per_s),
            speed,
            "" if self.time is None or self.time.middle is None else f"{1 / self.time.middle:.2f}x",
            percent(self.mfu),
            number(self.peak_gib, unit=" GiB"),
            number(self.start_s, unit=" s"),
            "another training" if self.kind == "recipe" else self.loss_verdict or "",
            self.verdict,
        ]


def shown(lines: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """The heads and the cells of a table, without columns that are empty."""
    kept = [at for at, head in enumerate(HEADS) if not head or any(cells[at] for cells in lines)]
    return [HEADS[at] for at in kept], [[cells[at] for at in kept] for cells in lines]


@dataclass(frozen=True, kw_only=True)
class Ablation:
    rows: Sequence[Row]
    left_out: Mapping[str, str]  # why, by name
    decisions: Mapping[str, Any]  # of the full plan
    seconds: float
    about: str | None = None  # what trials of this recipe measure, where that is not plain

    def asked(self, question: str) -> list[Row]:
        """The rows of a question, after references that are not rows of it; none if nothing was measured."""
        rows = [row for row in self.rows if row.question == question]
        if not any(row.blocks or row.problem is not None for row in rows):
            return []
        named = {row.reference for row in rows} - {row.name for row in rows}
        before = [
            replace(row, kind=None, reference=None, time=None, loss_verdict=None)
            for row in self.rows
            if row.name in named
        ]
        return [*before, *rows]

    def notes(self) -> list[str]:
        """What a reader of the tables has to know, in sentences."""
        found = [] if self.about is None else [self.about]
        if whole := [row.name for row in self.rows if row.whole and row.time is not None]:
            found.append(f"Compared by all steps together, as they cost time in some steps only: {', '.join(whole)}.")
        needed: dict[str, list[str]] = {}
        for row in self.rows:
            if row.is_short and row.name not in self.left_out:
                needed.setdefault(_needs(row), []).append(row.name)
        return found + [f"{words}: {', '.join(names)}." for words, names in needed.items()]

    def to_json(self) -> dict[str, Any]:
        rows = [asdict(row) | {"verdict": row.verdict, "blocks_for_verdict": row.enough} for row in self.rows]
        found: dict[str, Any] = finite(asdict(self) | {"rows": rows})
        return found


def _needs(row: Row) -> str:
    """How many blocks more a verdict takes."""
    last, count = parity.LOOKS[-1], row.enough
    if count is None or row.time is None:
        return f"A verdict takes at least {parity.LOOKS[0]} blocks (--blocks {parity.LOOKS[0]}, or a larger --budget)"
    if count > last:
        return f"A verdict would take about {count} blocks, more than the {last} that are possible"
    more = count - row.time.pairs
    return f"A verdict takes about {more} more blocks (--blocks {count}, or a larger --budget)"
