"""Writes runs down: `flatout report RUN... [-o FILE] [--format html|md|json]`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, get_args

from flatout.errors import UsageError
from flatout.insight.compare import Comparison, compare
from flatout.insight.report import page, plain
from flatout.insight.story import Story, tell
from flatout.record import Run

Format = Literal["html", "md", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)


def render(runs: Sequence[Run], *, format: Format = "html") -> str:
    """The report of one run, or of several side by side."""
    stories = [tell(run) for run in runs]
    match format:
        case "html":
            return page.html(stories, compared=_compared(runs, stories))
        case "md":
            return plain.markdown(stories, compared=_compared(runs, stories))
        case "json":
            return json.dumps([plain.to_json(story) for story in stories], indent=2, allow_nan=False) + "\n"


def _compared(runs: Sequence[Run], stories: Sequence[Story]) -> Comparison | None:
    """None for a single run, for repeats of one configuration, and for runs without steps."""
    try:
        return compare(runs, stories=stories) if len(runs) > 1 else None
    except UsageError:
        return None
