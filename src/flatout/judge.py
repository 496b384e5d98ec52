"""`flatout eval`: opens models, measures them on tasks, and says what was found: a table, JSON, the run's record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from flatout.engine.opening import Opened, open_model
from flatout.errors import FlatoutError
from flatout.evaluate import Score, compare, evaluate
from flatout.record import event_of, redact
from flatout.sample import Backend, Sampling, sampler_of
from flatout.terminal import table
from flatout.words import duration, interval_text, number, percent, score_text


def run(
    models: Sequence[str],
    specs: Sequence[str],
    *,
    sampling: Sampling,
    samples: int,
    limit: int | None,
    dtype: str | None,
    rows: int | None,
    backend: Backend,
    trust: str | None,
    out: Console | None,
    err: Console,
    print_json: Callable[[Any], None],
) -> None:
    """`out` None: JSON instead of tables. The second model, if any, is compared with the first."""
    found: list[list[Score]] = []
    documents = []
    for name in models:
        opened = open_model(name, dtype=dtype, backend=backend, trust=trust)
        for text in opened.notices:
            err.print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)
        scores = measured(
            opened,
            specs,
            sampling=sampling,
            samples=samples,
            limit=limit,
            rows=rows,
            backend=backend,
            console=err,
            quiet=out is None,
        )
        document = _document(opened, scores, sampling=sampling, samples=samples, limit=limit)
        _record(opened, document | {"tasks": [score.brief() for score in scores]}, err)
        found.append(scores)
        documents.append(document)
        if out is not None:
            out.print(scores_table(opened, scores))
        del opened
    differences = [compare(a, b) for a, b in zip(*found, strict=True)] if len(found) == 2 else None
    if out is None:
        compared = [None if d is None else asdict(d) for d in differences] if differences is not None else None
        print_json(documents[0] if compared is None else {"models": documents, "differences": compared})
    elif differences is not None:
        drawn = table("Second minus first", "task", "difference", "95 % interval", "n", "McNemar p")
        for score, difference in zip(found[0], differences, strict=True):
            cells = ["n/a"] * 4
            if difference is not None:
                span = f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}"
                cells = [f"{100 * difference.value:+.1f} points", span, str(difference.n), number(difference.p)]
            drawn.add_row(escape(score.task), *cells)
        out.print("", drawn)


def measured(
    opened: Opened,
    specs: Sequence[str],
    *,
    sampling: Sampling,
    samples: int,
    limit: int | None,
    rows: int | None,
    backend: Backend,
    console: Console,
    quiet: bool,
) -> list[Score]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bars:
        bar = bars.add_task(escape(opened.name), total=None)
        scores = evaluate(
            specs,
            sampler=sampler_of(opened, backend=backend, rows=rows),
            tokenizer=opened.tokenizer,
            sampling=replace(sampling, stop_ids=opened.stop_ids),
            samples=samples,
            limit=limit,
            progress=lambda done, of: bars.update(bar, completed=done, total=of),
        )
        return list(scores)


def scores_table(opened: Opened, scores: Sequence[Score]) -> Table:
    at = "" if opened.step is None else f", step {opened.step}"
    rows = table(
        f"{escape(opened.name)}{at} ({opened.where})", "task", "metric", "value", "95 % interval", "n", "notes"
    )
    for score in scores:
        rows.add_row(
            escape(score.task),
            score.metric + (f", mean of {score.samples}" if score.samples > 1 else ""),
            f"[bold]{score_text(score.metric, score.value)}[/]",
            interval_text(score.metric, score.low, score.high),
            f"{score.n:,}" + (f" of {score.of:,}" if score.of is not None and score.of > score.n else ""),
            escape(", ".join(notes(score))),
        )
    return rows


def notes(score: Score) -> list[str]:
    """What a reader of the figure should know besides."""
    facts = score.details
    said = []
    if score.metric == "perplexity":
        said += [f"loss {facts['loss']:.4f}", f"{number(facts['bits_per_byte'])} bits per byte"]
    if "answered" in facts:
        said.append(f"{percent(facts['answered'])} in the form asked for")
    if once := facts.get("solved_once"):
        said.append(f"{percent(once['value'])} solved at least once in {score.samples}")
    for key, words in (
        ("cut_short", "cut short"),
        ("too_long", "longer than the window"),
        ("killed", "graders killed"),
    ):
        if facts.get(key):
            said.append(f"{facts[key]} {words}")
    if facts.get("tokens"):
        said.append(f"{facts['tokens'] / score.seconds:,.0f} tokens/s")
    return [*said, duration(score.seconds)]


def _document(
    opened: Opened, scores: Sequence[Score], *, sampling: Sampling, samples: int, limit: int | None
) -> dict[str, Any]:
    return {
        "model": opened.name,
        "step": opened.step,
        "notices": list(opened.notices),
        "on": opened.where,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "samples": samples,
        "limit": limit,
        "template": opened.tokenizer.has_template,
        "tasks": [score.to_json() for score in scores],
    }


def _record(opened: Opened, document: dict[str, Any], err: Console) -> None:
    """Into the run's events."""
    if opened.run is None:
        return
    try:
        opened.run.note(event_of("tasks", document, step=opened.step, source="what was measured:"))
    except FlatoutError as error:  # it is being trained, or its disk is full: what was measured is still shown
        err.print(
            f"not recorded in the run: {escape(redact(str(error)))}", style="yellow", highlight=False, soft_wrap=True
        )
