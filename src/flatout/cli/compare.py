"""`flatout compare`: runs against the first one, with intervals and verdicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatout.cli.shared import AsJson, escaped, out, print_json, print_plain
from flatout.errors import UsageError
from flatout.words import duration, loss_text, number, percent

if TYPE_CHECKING:
    from rich.table import Table

    from flatout.insight.compare import Comparison, Numbers


def compare(
    runs: Annotated[list[Path], typer.Argument(help="run folders; the first is the baseline", metavar="RUN RUN...")],
    price: Annotated[float | None, typer.Option(help="price of one device for an hour", min=0.0)] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: speed, memory, loss at equal tokens and at equal time, task scores and settings.

    Runs that differ only in their seed are repeats of one configuration.
    """
    from flatout.insight import compare as verb
    from flatout.insight.clean import clean
    from flatout.record import Run

    if len(runs) < 2:
        raise UsageError("compare needs at least two run folders: flatout compare RUN RUN")
    found = verb.compare([Run.open(run) for run in runs], price=price)
    if as_json:
        print_json(found.to_json())
        return
    for table in (_numbers(found), _phases(found), _tasks(found), _settings(found)):
        if table.row_count:
            out.print(table, highlight=False)
            out.print()
    for one in found.against:
        print_plain(clean(f"{one.name} against {found.sides[0].name}:"))
        for sentence in found.sentences(one):
            print_plain(f"  {sentence}")


def _numbers(found: Comparison) -> Table:
    from flatout.terminal import table

    made = table("Runs", "", *(escaped(side.name) for side in found.sides))
    rows: list[tuple[str, Callable[[Numbers], str]]] = [
        ("runs", lambda side: str(side.runs)),
        ("tokens/s", lambda side: number(side.tokens_per_s)),
        ("MFU", lambda side: percent(side.mfu)),
        ("peak memory", lambda side: number(side.peak_gib, unit=" GiB")),
        (f"loss at {found.tokens:,} tokens", lambda side: loss_text(side.loss_at_equal_tokens)),
        (f"loss at {duration(found.seconds)}", lambda side: loss_text(side.loss_at_equal_time)),
        ("last validation loss", lambda side: loss_text(side.val_loss)),
        ("device hours", lambda side: number(side.device_hours)),
    ]
    if any(side.cost is not None for side in found.sides):
        rows.append(("cost", lambda side: number(side.cost)))
    for name, text in rows:
        made.add_row(name, *(text(side) for side in found.sides))
    return made


def _phases(found: Comparison) -> Table:
    from flatout.terminal import table

    made = table("Seconds of a step", "phase", *(escaped(side.name) for side in found.sides))
    for name in dict.fromkeys(name for side in found.sides for name in side.phases):
        made.add_row(escaped(name), *(number(side.phases.get(name)) for side in found.sides))
    return made


def _tasks(found: Comparison) -> Table:
    from flatout.terminal import table

    made = table("Tasks", "task", *(escaped(side.name) for side in found.sides))
    for name in dict.fromkeys(name for side in found.sides for name in side.tasks):
        scores = (side.tasks.get(name) for side in found.sides)
        made.add_row(escaped(name), *("n/a" if score is None else escaped(score.score) for score in scores))
    return made


def _settings(found: Comparison) -> Table:
    from flatout.terminal import table

    made = table("Settings that differ", "setting", *(escaped(side.name) for side in found.sides))
    for key, values in found.settings:
        made.add_row(escaped(key), *(escaped(_shown(value)) for value in values))
    return made


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)
