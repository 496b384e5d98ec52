"""The same report for programs and for plain text: JSON and Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from flatout.insight import numbers
from flatout.insight.compare import Comparison, settings_that_differ
from flatout.insight.diagnose.runs import findings_of
from flatout.insight.report.fragments import nothing_found
from flatout.insight.story import Story, names_of
from flatout.output import clean
from flatout.verdict import rl_parts
from flatout.words import duration, interval_text, number, percent, score_text

_MEANS_SOMETHING = re.compile(r"([\\`*_{}\[\]<>|#!~&])")


def to_json(story: Story) -> dict[str, Any]:
    """A run as raw numbers; unknown is null, and so is what is not finite."""
    return dict(_finite(_raw(story)))


def _raw(story: Story) -> dict[str, Any]:
    return {
        "name": story.name,
        "path": story.path,
        "state": asdict(story.state),
        "word": story.word,
        "grade": story.grade,
        "judged": story.judged,
        "verdict": story.verdict,
        "limit": dict(story.limit),
        "figures": {figure.key: {"value": figure.value, "source": figure.source} for figure in numbers.figures(story)},
        "findings": [asdict(finding) for finding in findings_of(story)],
        "criteria": [asdict(verdict) for verdict in story.criteria],
        "phases": [asdict(phase) for phase in story.phases],
        "step_parts": [asdict(part) for part in rl_parts(story.speed)],
        "plan": [asdict(choice) for choice in story.choices],
        "predictions": [asdict(row) for row in story.forecasts],
        "gpus": [asdict(gpu) for gpu in story.gpus],
        "ranks": [asdict(rank) for rank in story.ranks],
        "evaluations": [asdict(found) for found in story.evaluations],
        "tasks": [asdict(score) for score in story.tasks],
        "history": [
            {
                "step": part.last_step,
                "num_steps": part.num_steps,
                "loss": part.loss,
                "loss_low": part.loss_low,
                "loss_high": part.loss_high,
                "num_non_finite": part.num_non_finite,
                "tokens_per_s": None if part.profiled else part.training_tokens / part.training_s,
                "peak_gib": part.memory.get("peak_gib"),
                "utilisation": dict(part.utilisation),
                "spans": dict(part.spans),
            }
            for part in story.parts
        ],
        "hardware": dict(story.hardware),
        "environment": dict(story.environment),
        "config": dict(story.config),
    }


def markdown(stories: Sequence[Story], *, compared: Comparison | None = None) -> str:
    if len(stories) == 1:
        return "\n".join(_run(stories[0], level=1)) + "\n"
    names = names_of(stories)
    lines = [f"# {len(stories)} runs side by side", ""]
    lines += [f"{at}. **{_text(story.name)}** {_text(story.path)}" for at, story in enumerate(stories, 1)]
    rows: list[list[Any]] = [["state", *(story.state.sentence for story in stories)]]
    rows += [[name, *texts] for name, texts in numbers.side_by_side(stories)]
    lines += ["", *_table(["", *names], rows)]
    if compared:
        sides = [side.name for side in compared.sides]
        for table in compared.tables():
            if table.rows:
                lines += ["", f"## {table.title}", "", *_table(["", *sides], [[k, *v] for k, v in table.rows])]
        for one in compared.against:
            heading = _text(f"{one.name} against {compared.sides[0].name}")
            lines += ["", f"**{heading}.** {' '.join(compared.sentences(one))}"]
    differing = settings_that_differ(stories)
    if differing:
        lines += ["", "## Settings that differ", "", *_table(["setting", *names], [[k, *v] for k, v in differing])]
    for story in stories:
        lines += ["", *_run(story, level=2)]
    return "\n".join(lines) + "\n"


def _run(story: Story, *, level: int) -> list[str]:
    mark, sub = "#" * level, "#" * (level + 1)
    lines = [
        f"{mark} {_text(story.name)}",
        "",
        f"**{story.word}.** {_text(story.state.sentence)}. {story.judged}",
    ]
    lines += ["", _text(story.verdict)] if story.verdict else []
    lines += ["", *_table(["number", "value", "source"], [[f.name, f.text, f.source] for f in numbers.figures(story)])]
    lines += ["", f"{sub} Findings", ""]
    found = findings_of(story)
    lines += [
        f"- **{_text(finding.sentence)}** {_text(finding.fix)} "
        f"({_text(finding.cause)}, share {percent(finding.share)}, gain {percent(finding.gain)}, {finding.status}; "
        f"{_text('; '.join(finding.evidence))})"
        for finding in found
    ] or [nothing_found(story)]
    if story.criteria:
        words = {True: "met", False: "not met", None: "not measured"}
        rows = [[v.criterion, v.wanted, v.got, words[v.met]] for v in story.criteria]
        lines += ["", f"{sub} Criteria", "", *_table(["criterion", "wanted", "got", "verdict"], rows)]
    if story.tasks:
        scores: list[list[Any]] = [
            [
                s.task,
                s.step,
                s.metric,
                score_text(s.metric, s.value) + s.ungraded,
                interval_text(s.metric, s.low, s.high),
                s.n,
            ]
            for s in story.tasks
        ]
        lines += ["", f"{sub} Tasks", "", *_table(["task", "step", "metric", "value", "95 % interval", "n"], scores)]
    if story.phases:
        phases = sorted(story.phases, key=lambda phase: -phase.seconds)
        measured = any(phase.peak_gib is not None for phase in phases)
        rows = [
            [phase.name, duration(phase.seconds), percent(phase.share), *([number(phase.peak_gib)] if measured else [])]
            for phase in phases
        ]
        heads = ["phase", "time", "share", *(["peak GiB"] if measured else [])]
        lines += ["", f"{sub} Where the time went", "", *_table(heads, rows)]
    if parts := rl_parts(story.speed):
        lines += ["", f"{sub} Parts of a step of {number(story.speed.step_s)} s", ""]
        lines += _table(
            ["part", "s a step", "share"], [[part.name, number(part.seconds), percent(part.share)] for part in parts]
        )
    if story.forecasts:
        rows = [[row.unit, number(row.predicted), number(row.measured), number(row.ratio)] for row in story.forecasts]
        lines += ["", f"{sub} Plan against measurement", ""]
        lines += _table(["what", "predicted", "measured", "ratio"], rows)
        chosen = [
            [choice.name, choice.value, choice.reason, choice.active or "", choice.ran or ""]
            for choice in story.choices
        ]
        lines += ["", *_table(["decision", "value", "reason", "as found", "what ran"], chosen)]
    return lines


def _table(heads: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    heads = list(heads)
    drawn = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return drawn + [f"| {' | '.join(_text('n/a' if cell is None else cell) for cell in row)} |" for row in rows]


def _text(value: object) -> str:
    """Anything as Markdown text on one line: what means something there, HTML included, is escaped."""
    return _MEANS_SOMETHING.sub(r"\\\1", " ".join(clean(value).split()))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
