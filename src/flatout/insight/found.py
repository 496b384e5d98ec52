"""Finds run folders and lists them: `flatout runs [FOLDER]`, and what `flatout watch` shows if no run is named."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from flatout.errors import FlatoutError, UsageError, first_line
from flatout.insight.story import Story, tell
from flatout.record import Run
from flatout.terminal import table
from flatout.words import duration, loss_text, number, percent

# How deep a folder is searched: runs/NAME, and the groups that people make of them.
DEPTH = 3
NUM_PARTS = 8


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A run folder, and what it holds; a damaged one has the reason instead."""

    run: Run
    changed: float  # unix seconds
    story: Story | None
    problem: str | None = None


def find(folder: Path) -> list[Run]:
    """The runs in a folder, the newest first. Stages inside a run belong to it and are not listed."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder: give the folder that holds run folders, such as runs")
    return sorted((Run(path) for path in _inside(folder, DEPTH)), key=_changed, reverse=True)


def listed(folder: Path) -> list[Listed]:
    return [_listed(run) for run in find(folder)]


def running(folder: Path) -> list[Run]:
    """The runs in a folder that are going on; none if there is no such folder."""
    if not folder.is_dir():
        return []
    return [one.run for one in listed(folder) if one.story is not None and one.story.state.kind == "running"]


# Columns that a narrow terminal does without, the first to go first.
_SPARE = ("validation", "MFU", "changed", "loss", "tokens/s")
_WORDS = {"lost": "failed"}
_GAP = 2


def runs_table(found: list[Listed], *, width: int, now: float | None = None) -> Table:
    """As many columns as fit into the width, so that a run takes one line."""
    now = time.time() if now is None else now
    lines = [_cells(one, now=now) for one in found]
    columns = list(lines[0])
    for spare in _SPARE:
        if _width(lines, columns) <= width:
            break
        columns.remove(spare)
    rows = table("", *columns)
    for one, cells in zip(found, lines, strict=True):
        rows.add_row(*(Text(cells[name], style="" if one.story else "yellow") for name in columns))
    return rows


def _width(lines: list[dict[str, str]], columns: list[str]) -> int:
    return sum(max(len(name), *(len(cells[name]) for cells in lines)) + _GAP for name in columns) - _GAP


def _cells(one: Listed, *, now: float) -> dict[str, str]:
    """A run as text, by column; unknown is n/a."""
    story = one.story
    found = {"run": str(one.run.path), "recipe": "", "state": "damaged", "step": ""}
    found |= dict.fromkeys(("loss", "validation", "tokens/s", "MFU"), "")
    if story is not None:
        total = "" if story.total_steps is None else f"/{story.total_steps:,}"
        found |= {
            "recipe": story.recipe or "script",
            "state": _WORDS.get(story.state.kind, story.state.kind),
            "step": f"{story.num_steps:,}{total}",
            "loss": loss_text(None if story.last is None else story.last.loss),
            "validation": loss_text(story.evaluations[-1].val_loss if story.evaluations else None),
            "tokens/s": number(story.speed.tokens_per_s),
            "MFU": percent(story.speed.mfu),
        }
    return found | {"changed": f"{duration(max(0.0, now - one.changed))} ago"}


def problems(found: list[Listed]) -> list[str]:
    """Why damaged runs cannot be shown."""
    return [f"{one.run.path}: {one.problem}" for one in found if one.story is None]


def to_json(found: list[Listed]) -> list[dict[str, Any]]:
    return [_row(one) for one in found]


def _row(one: Listed) -> dict[str, Any]:
    story = one.story
    if story is None:
        return {"run": str(one.run.path), "problem": one.problem, "changed": one.changed}
    return {
        "run": str(one.run.path),
        "recipe": story.recipe,
        "state": story.state.kind,
        "steps": story.num_steps,
        "total_steps": story.total_steps,
        "loss": None if story.last is None else story.last.loss,
        "val_loss": story.evaluations[-1].val_loss if story.evaluations else None,
        "tokens_per_s": story.speed.tokens_per_s,
        "mfu": story.speed.mfu,
        "changed": one.changed,
    }


def _inside(folder: Path, depth: int) -> Iterator[Path]:
    if Run.is_at(folder):
        yield folder
        return
    if depth == 0:
        return
    try:
        inner = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:  # a folder of somebody else
        return
    for path in inner:
        yield from _inside(Path(path), depth - 1)


def _changed(run: Run) -> float:
    times = []
    for what in ("steps", "events"):
        try:
            times.append(run.file(what, 0).stat().st_mtime)
        except (OSError, FlatoutError):
            continue
    return max(times, default=0.0)


def _listed(run: Run) -> Listed:
    try:
        return Listed(run=run, changed=_changed(run), story=tell(run, num_parts=NUM_PARTS))
    except (FlatoutError, OSError) as error:
        return Listed(run=run, changed=_changed(run), story=None, problem=first_line(error))
