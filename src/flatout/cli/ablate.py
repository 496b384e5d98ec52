"""`flatout ablate`: the gain of each optimization, measured one at a time."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from flatout import limits
from flatout.cli.shared import (
    AsJson,
    Config,
    LossMargin,
    Overrides,
    err,
    escaped,
    file_path,
    new_folder,
    out,
    print_json,
    print_plain,
)
from flatout.errors import UsageError
from flatout.words import counted, duration

if TYPE_CHECKING:
    from rich.table import Table

    from flatout.insight.rows import Ablation, Question
    from flatout.insight.switches import Switch
    from flatout.insight.trials import Trials

T = TypeVar("T", bound=Hashable)

QUESTIONS = {
    "alone": "Each switch alone, added to the starting point",
    "without": "The full plan without each switch",
    "cumulative": "One after the other, the largest gain first",
    "recipe": "The full plan without each change of the recipe",
}
# Columns that a narrow terminal leaves out, in this order, and those that are never wrapped.
OPTIONAL = ("Hodges-Lehmann", "claim", "start-up", "MFU", "memory")
NUMBERS = ("tokens/s", "speed", "Hodges-Lehmann", "MFU", "memory", "start-up")
SearchFolder = Annotated[
    Path | None,
    typer.Option(
        "--run",
        help="folder of the trials (default: a new one in runs/); an existing one is continued",
        parser=file_path,
        metavar="PATH",
    ),
]
Budget = Annotated[
    str | None, typer.Option(help="time for all trials, such as 90s, 10m or 2h; decides what is left out")
]

Limit = Annotated[float, typer.Option(help="seconds after which a trial counts as hung", min=1.0, max=limits.SECONDS)]


def ablate(
    config: Config,
    overrides: Overrides = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            help="YAML file to start from (default: the starting point of common guides)",
            parser=file_path,
            metavar="PATH",
        ),
    ] = None,
    blocks: Annotated[
        int | None,
        typer.Option(
            help="repeats of every variant, in turn (default: 4, and more as --budget allows); verdicts come after 4, "
            "8 and 16",
            min=1,
            max=16,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="steps that a trial measures after its warm-up", min=10, max=limits.STEPS)
    ] = 10,
    budget: Budget = None,
    loss_margin: LossMargin = 0.005,
    only: Annotated[list[str] | None, typer.Option(help="measure only this switch; may be repeated")] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            help="measure this table: alone, without, cumulative (default: these three) or recipe; repeatable"
        ),
    ] = None,
    limit: Limit = 600.0,
    run: SearchFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure the gain of each optimization: alone, removed from the plan, and added one after the other.

    Every trial is a short run in its own process. A second call with the same --run continues.
    """
    from flatout.cli.shared import require_torch
    from flatout.config import load
    from flatout.files import write_atomic
    from flatout.insight import ablate as verb
    from flatout.insight.payback import paybacks
    from flatout.insight.report.ablation import html
    from flatout.insight.switches import SWITCHES, of_baseline, recipe_changes
    from flatout.insight.trials import Trials, short

    require_torch()
    seconds = None if budget is None else seconds_of(budget)
    settings = load(config, overrides=overrides or []).settings
    switches: Sequence[Switch] = SWITCHES
    recipe = recipe_changes(settings)
    if baseline is not None:
        fixed = {*short(settings), "seed"}
        switches, recipe = of_baseline(_flat(config, overrides), _flat(baseline, None), without=fixed), []
    tables = _asked_tables(table or (), only or (), switches=switches, recipe=recipe, baseline=baseline)
    if not switches:
        raise UsageError(
            f"{baseline} and {config} differ in nothing that a trial can show, as every trial sets its own number of "
            "steps, evaluations and saves"
        )
    trials = Trials(
        config,
        overrides or [],
        folder=run or new_folder(f"{config.stem}-ablate"),
        limit_s=limit,
        steps=steps,
        say=say,
    )
    with searching(trials):
        found = verb.ablate(
            trials,
            blocks=blocks,
            budget_s=seconds,
            switches=switches,
            only=only or (),
            tables=tables,
            loss_margin=loss_margin,
        )
    write_atomic(trials.folder / "ablation.json", json.dumps(found.to_json(), indent=1).encode())
    write_atomic(trials.folder / "ablation.html", html(found, name=config.stem).encode())
    if as_json:
        print_json(found.to_json())
        return
    for made in _tables(found, width=out.width):
        out.print(made, highlight=False)
        out.print()
    for payback in paybacks(found):
        print_plain(f"{payback}")
    for note in found.notes():
        print_plain(note)
    for reason, many in _grouped(found.left_out.items()).items():
        print_plain(f"Left out ({reason}): {', '.join(many)}.")
    if seconds is not None and found.seconds > seconds:
        print_plain(f"The trials took {duration(found.seconds)}, longer than the budget of {duration(seconds)}.")
    print_plain(
        f"The folder has {counted(len(trials.found), 'trial')}; those of this call took {duration(found.seconds)}. "
        "Warm-up steps and compilation are not part of the speed. Whole tables, with charts: "
        f"{trials.folder / 'ablation.html'}"
    )


def _asked_tables(
    tables: Sequence[str],
    only: Sequence[str],
    *,
    switches: Sequence[Switch],
    recipe: Sequence[Switch],
    baseline: Path | None,
) -> list[Question]:
    """The tables to measure: those that were named, or those that have the switches that were named."""
    from flatout.insight.rows import QUESTIONS as TABLES
    from flatout.insight.rows import USUAL

    of_plan, of_recipe = {switch.name for switch in switches}, {switch.name for switch in recipe}
    if unknown := next((name for name in only if name not in of_plan | of_recipe), None):
        raise UsageError(f"--only {unknown!r} is not a switch; choose from: {', '.join(sorted(of_plan | of_recipe))}")
    if unknown := next((name for name in tables if name not in TABLES), None):
        raise UsageError(f"--table {unknown!r} is not a table; choose from: {', '.join(TABLES)}")
    if baseline is not None and "recipe" in tables:
        raise UsageError("--table recipe goes back to what guides start from; with --baseline, use the other tables")
    if not tables:
        in_recipe = set(only) & of_recipe
        usual = [] if in_recipe and not set(only) - of_recipe else list(USUAL)
        return [*usual, "recipe"] if in_recipe else usual
    found = [one for one in TABLES if one in tables]
    for name in only:
        fitting = ["recipe"] if name in of_recipe else list(USUAL)
        if not set(fitting) & set(found):
            raise UsageError(f"--only {name!r} is in no table that was named: add --table {' or '.join(fitting)}")
    return found


@contextmanager
def searching(trials: Trials) -> Iterator[None]:
    """Ends what the search has started, and says how to continue if it is interrupted."""
    try:
        with closing(trials):
            yield
    except KeyboardInterrupt:
        say(f"interrupted; to continue, repeat the command with --run {shlex.quote(str(trials.folder))}")
        raise


def say(text: str) -> None:
    err.print(escaped(text), highlight=False, soft_wrap=True)


def _flat(config: Path, overrides: list[str] | None) -> dict[str, object]:
    from flatout.config import load, to_mapping
    from flatout.insight.compare import flatten

    return dict(flatten(to_mapping(load(config, overrides=overrides or []).settings)))


def seconds_of(text: str) -> float:
    """Seconds of a --budget: 90s, 10m or 2h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None or not float(found[1]):
        raise UsageError(f"--budget {text!r} is not a duration: write 90s, 10m or 2h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def _grouped(named: Iterable[tuple[str, T]]) -> dict[T, list[str]]:
    """Names by their value, each value at its first place."""
    found: dict[T, list[str]] = {}
    for name, value in named:
        found.setdefault(value, []).append(name)
    return found


def _tables(found: Ablation, *, width: int) -> list[Table]:
    from flatout.insight.rows import shown
    from flatout.terminal import table

    tables = []
    for question, title in QUESTIONS.items():
        if not (rows := found.asked(question)):
            continue
        heads, lines = shown([row.cells for row in rows])
        columns = _columns([heads, *lines], width=width)
        made = table(title, *(heads[at] for at in columns))
        for column, at in zip(made.columns, columns, strict=True):
            column.no_wrap = heads[at] in NUMBERS
        for cells in lines:
            made.add_row(*(escaped(cells[at]) for at in columns))
        tables.append(made)
    return tables


def _columns(lines: Sequence[Sequence[str]], *, width: int) -> list[int]:
    """The columns that a terminal has room for; the most important ones in any case."""
    widest = [max(map(len, cells)) + 2 for cells in zip(*lines, strict=True)]
    kept = list(range(len(widest)))
    for name in OPTIONAL:
        if name in lines[0] and sum(widest[at] for at in kept) > width:
            kept.remove(lines[0].index(name))
    return kept
