"""`flatout compare`: runs against the first one, with intervals and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from flatout.cli.shared import AsJson, LossMargin, escaped, file_path, out, print_json, print_plain
from flatout.errors import UsageError


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(help="run folders; the first is the baseline", metavar="RUN RUN...", parser=file_path),
    ],
    price: Annotated[float | None, typer.Option(help="price of one device for an hour", min=0.0)] = None,
    loss_margin: LossMargin = 0.01,
    as_json: AsJson = False,
) -> None:
    """Compare runs: speed, memory, loss at equal tokens and at equal time, task scores and settings.

    Runs that differ only in their seed are repeats of one configuration.
    """
    from flatout.insight import compare as verb
    from flatout.record import Run

    if len(runs) < 2:
        raise UsageError("compare needs at least two run folders: flatout compare RUN RUN")
    found = verb.compare([Run.open(run) for run in runs], price=price, loss_margin=loss_margin)
    if as_json:
        print_json(found.to_json())
        return
    names = [side.name for side in found.sides]
    for table in found.tables():
        _print(table.title, names, table.rows)
    for title, differing in (("Settings that differ", found.settings), ("Decisions that differ", found.decisions)):
        _print(title, names, [(key, ["unset" if v is None else str(v) for v in values]) for key, values in differing])
    for one in found.against:
        print_plain(f"{one.name} against {found.sides[0].name}:")
        for sentence in found.sentences(one):
            print_plain(f"  {sentence}")


def _print(title: str, names: Sequence[str], rows: Sequence[tuple[str, Sequence[Any]]]) -> None:
    from flatout.terminal import table

    if not rows:
        return
    made = table(title, "", *map(escaped, names))
    for name, cells in rows:
        made.add_row(escaped(name), *map(escaped, cells))
    out.print(made, highlight=False)
    out.print()
