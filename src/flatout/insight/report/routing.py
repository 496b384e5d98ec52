"""The section about a bank of adapters and its router: the scores of each task, and where the prompts went."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flatout.insight.report.html import Child, Html, tag
from flatout.record.routed import AdapterScore, PhaseScored
from flatout.words import interval_text, number, percent

# How a task was answered, in the order of the phases, and the table's words for it.
HOW = {
    "base": "base alone",
    "own": "own adapter (phase 1)",
    "routed": "routed (phase 2)",
    "joint": "routed (phase 3)",
    "joint own": "own adapter (phase 3)",
}


def scores_rows(phases: Sequence[PhaseScored]) -> tuple[list[str], list[list[str]]]:
    """The heads and rows of the table of scores: one row for each task, one column for each way to answer it."""
    found = {(score.task, score.how): score for phase in phases for score in phase.scores}
    hows = [how for how in HOW if any(key[1] == how for key in found)]
    names = list(dict.fromkeys(name for phase in phases for name in phase.names))
    rows = []
    for name in names:
        scores = [found.get((name, how)) for how in hows]
        metric = next((score.metric for score in scores if score is not None), "n/a")
        rows.append([name, metric, *(_cell(score) for score in scores)])
    return ["task", "metric", *(HOW[how] for how in hows)], rows


def confusion_rows(phase: PhaseScored) -> tuple[list[str], list[list[str]]]:
    """For each task, the share of its prompts that each adapter got, and at the end the load of each adapter."""
    assert phase.confusion is not None
    rows = [
        [name, *(percent(count / max(1, sum(counts))) for count in counts)]
        for name, counts in zip(phase.names, phase.confusion, strict=True)
    ]
    total = sum(map(sum, phase.confusion)) or 1
    load = [percent(sum(column) / total) for column in zip(*phase.confusion, strict=True)]
    return ["prompts of", *(f"to {name}" for name in phase.names)], [*rows, ["load", *load]]


def parts(phases: Sequence[PhaseScored], *, draw: Callable[..., Html]) -> list[Child]:
    """What the section shows; `draw` makes a table of heads and rows."""
    heads, rows = scores_rows(phases)
    n = max((score.n for phase in phases for score in phase.scores), default=0)
    found: list[Child] = [draw(heads, rows, caption=f"Held-out questions, at most {n} of each task, 95 % intervals")]
    for phase in phases:
        if phase.confusion is not None:
            heads, rows = confusion_rows(phase)
            found += [tag("p", said(phase)), draw(heads, rows, caption=f"Routing after phase {phase.phase}")]
    found.append(tag("p", "Source: events.jsonl, phase.", class_="note"))
    return found


def said(phase: PhaseScored) -> str:
    within = interval_text("accuracy", phase.low, phase.high)
    return (
        f"Phase {phase.phase}: {percent(phase.routed_right)} of the prompts went to their own adapter ({within}); mean "
        f"confidence {percent(phase.confidence)}."
    )


def _cell(score: AdapterScore | None) -> str:
    if score is None:
        return "n/a"
    within = "" if score.low is None else f" ({number(score.low, digits=3)} to {number(score.high, digits=3)})"
    more = "".join(f", {name} {number(value, digits=3)}" for name, value in (score.measures or {}).items())
    return f"{number(score.value, digits=3)}{within}{more}"
