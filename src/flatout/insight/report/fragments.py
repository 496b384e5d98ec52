"""The sections of a report, one function each; the report and the live page share them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from flatout.insight import numbers
from flatout.insight.compare import Comparison, flatten, settings_that_differ
from flatout.insight.diagnose.runs import findings_of
from flatout.insight.machine import Machine
from flatout.insight.report import routing
from flatout.insight.report.charts import Bands, Chart, draw, draw_bands, short
from flatout.insight.report.figures import charts, loss_chart, phase_colour, speed_chart, validation_chart
from flatout.insight.report.html import Child, Html, join, tag, text
from flatout.insight.story import Choice, Forecast, Gpu, Story, names_of
from flatout.record import Finding
from flatout.verdict import rl_parts
from flatout.words import duration, interval_text, number, percent, score_text

T = TypeVar("T")

# The numbers at the top, next to the time spent or left; the last section has all of them, with their sources.
HEADLINE = ("tokens_per_s", "mfu", "step_s", "peak_gib", "data_share", "loss", "val_loss")
# Rows of the table next to a chart, and of the list of events.
NUM_ROWS, NUM_EVENTS = 9, 60
# Phases of rollouts whose samples are shown.
NUM_PHASES = 3
GAUGES = {
    "busy": ("some kernel running", percent),
    "sm_active": ("SM active", percent),
    "tensor_active": ("tensor cores active", percent),
    "dram_active": ("DRAM bandwidth", percent),
    "memory_gib": ("memory, GiB", number),
    "power_w": ("power, W", number),
    "temperature_c": ("temperature, °C", number),
    "sm_clock_mhz": ("SM clock, MHz", number),
}


def run_sections(story: Story, *, id: str = "", level: int = 2) -> list[Html]:
    """Every section of one run, the verdict first."""
    return [
        verdict(story, id=id, level=level),
        findings(story, id=id, level=level),
        chart_section(story, id=id, level=level),
        *([tasks(story, id=id, level=level)] if story.tasks else []),
        *([rollouts(story, id=id, level=level)] if story.rollouts else []),
        *([routed(story, id=id, level=level)] if story.routed else []),
        time_spent(story, id=id, level=level),
        plan(story, id=id, level=level),
        criteria(story, id=id, level=level),
        machine(story, id=id, level=level),
        happened(story, id=id, level=level),
        environment(story, id=id, level=level),
        provenance(story, id=id, level=level),
    ]


def contents(story: Story, *, id: str = "") -> Html:
    """Links to the sections of one run."""
    names = {
        "findings": "Findings",
        "charts": "Charts",
        **({"tasks": "Tasks"} if story.tasks else {}),
        **({"rollouts": "Rollouts"} if story.rollouts else {}),
        **({"routed": "Adapters and routing"} if story.routed else {}),
        "time": "Time",
        "plan": "Plan",
        "criteria": "Criteria",
        "machine": "Machine",
        "events": "Events",
        "environment": "Environment",
        "provenance": "Sources",
    }
    return _nav({f"{id}{key}": name for key, name in names.items()}, label="Sections")


def runs_contents(stories: Sequence[Story]) -> Html:
    """Links to the parts of a page of several runs."""
    parts = {"runs": "Side by side", "same-axes": "On the same axes", "differences": "Settings that differ"}
    runs = {f"r{at}-verdict": name for at, name in enumerate(names_of(stories), 1)}
    return _nav(parts | runs, label="Parts")


def _nav(links: Mapping[str, str], *, label: str) -> Html:
    items = [tag("li", tag("a", name, href=f"#{target}")) for target, name in links.items()]
    return tag("nav", tag("ul", items), aria_label=label)


def verdict(story: Story, *, id: str, level: int) -> Html:
    found = {figure.key: figure for figure in numbers.figures(story)}
    tiles = [
        tag("div", tag("dt", found[key].name), tag("dd", found[key].text), class_="tile")
        for key in (*HEADLINE, "seconds" if story.state.over else "left_s")
    ]
    limit = story.limit
    near = None
    if limit.get("share") is not None:
        ceiling = number(limit.get("ceiling_tokens_per_s"))
        near = f"{percent(limit['share'])} of the limit of {ceiling} tokens/s for this model on this device"
        near += f" ({limit['source']})." if limit.get("source") else "."
    return _section(
        story.name,
        tag(
            "div",
            tag("p", tag("strong", f"{story.word}.", class_="grade"), f" {_state(story)}", class_="said"),
            tag("p", story.verdict, class_="doctor") if story.verdict else None,
            tag("p", near) if near else None,
            tag("p", story.judged),
            class_=f"verdict {story.grade}",
        ),
        tag("dl", tiles, class_="tiles"),
        id=f"{id}verdict",
        level=level - 1,
    )


def _state(story: Story) -> str:
    steps = f"{story.num_steps:,} steps" if story.total_steps in (None, story.num_steps) else ""
    steps = steps or f"step {story.num_steps:,} of {story.total_steps:,}"
    left = "" if story.left_s is None or story.state.over else f", about {duration(story.left_s)} left"
    times = "" if story.num_attempts < 2 else f", in {story.num_attempts} attempts"
    return f"{story.state.sentence}: {steps}, {story.tokens:,} tokens in {duration(story.seconds)}{left}{times}."


def findings(story: Story, *, id: str, level: int) -> Html:
    found = findings_of(story)
    asked = story.verdict is not None
    who = (
        "By the doctor, costliest first."
        if asked
        else "From the record alone; flatout doctor RUN also compares the speed with the limit of the device."
    )
    body: Child = [_finding(finding, level=level + 1) for finding in found]
    if not found:
        body = tag("p", nothing_found(story), class_="none")
    return _section("Findings", tag("p", who, class_="note"), body, id=f"{id}findings", level=level)


def nothing_found(story: Story) -> str:
    return f"{'No cause was found' if story.grade == 'bad' else 'No problem was found'} by these checks."


def _finding(finding: Finding, *, level: int) -> Html:
    facts = [("cause", finding.cause)]
    facts += [("share of step time", percent(finding.share))] if finding.share is not None else []
    facts += [(f"gain, {finding.status}", percent(finding.gain))] if finding.gain is not None else []
    return tag(
        "article",
        tag(f"h{level}", finding.sentence),
        tag("p", finding.fix, class_="fix"),
        tag("ul", [tag("li", line) for line in finding.evidence], class_="evidence"),
        tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts], class_="facts"),
        class_="finding",
    )


def chart_section(story: Story, *, id: str, level: int) -> Html:
    made = charts(story, id=id)
    each = max((part.num_steps for part in story.parts), default=1)
    note = "Every point is one step." if each == 1 else f"A point is the mean of up to {each:,} steps"
    shaded = "" if each == 1 else "; the shaded range runs from their lowest to their highest value."
    return _section(
        "Step by step",
        tag("p", f"{note}{shaded}", class_="note"),
        tag("div", [figure(chart, level=level + 1) for chart in made], class_="charts"),
        id=f"{id}charts",
        level=level,
    )


def figure(chart: Chart | Bands, *, level: int) -> Html:
    drawn = draw_bands(chart) if isinstance(chart, Bands) else draw(chart)
    return tag(
        "figure",
        tag("figcaption", tag(f"h{level}", chart.title)),
        drawn,
        _numbers(chart),
        id=chart.id,
    )


def _numbers(chart: Chart | Bands) -> Html | None:
    """A chart's numbers as a short table, as an alternative to the curves."""
    if isinstance(chart, Bands):
        x_name, heads = "step", [band.name for band in chart.bands]
        rows = [
            [f"{x:,.0f}", *(percent(band.shares[at]) for band in chart.bands)]
            for at, x in _spread(list(enumerate(chart.xs)))
        ]
    else:
        x_name, heads = chart.x_name, [line.name for line in chart.lines if line.points]
        found = [(point, line) for line in chart.lines for point in _spread(line.points)]
        rows = [
            [
                short(point.x) if chart.log else f"{point.x:,.0f}",
                *(chart.show(point.y) if other is line else "" for other in chart.lines if other.points),
            ]
            for point, line in sorted(found, key=lambda one: one[0].x)
        ]
    if not rows:
        return None
    return tag(
        "details",
        tag("summary", "In numbers"),
        table([x_name, *heads], rows, caption=chart.title, numeric=True),
        id=f"{chart.id}-numbers",
    )


def _spread(values: Sequence[T]) -> list[T]:
    """At most a few of them, the last included."""
    size = -(-len(values) // NUM_ROWS) or 1
    return [*reversed(values[::-1][::size])]


def time_spent(story: Story, *, id: str, level: int) -> Html:
    phases = sorted(story.phases, key=lambda phase: -phase.seconds)
    measured = any(phase.peak_gib is not None for phase in phases)
    heads = ["phase", "time", "share", *(["peak GiB"] if measured else []), ""]
    rows = [
        [
            tag("span", phase.name, class_=f"key {phase_colour(phase.name)}"),
            duration(phase.seconds) if phase.seconds >= 60 else number(phase.seconds, unit=" s"),
            percent(phase.share),
            *([number(phase.peak_gib)] if measured else []),
            _bar(phase.share, phase_colour(phase.name)),
        ]
        for phase in phases
    ]
    body = table(heads, rows, caption="Time by phase") if rows else _none("no phases")
    parts: list[list[Child]] = [
        [part.name, number(part.seconds), percent(part.share)] for part in rl_parts(story.speed)
    ]
    step = f"Parts of a step of {number(story.speed.step_s)} s, without warm-up"
    return _section(
        "Where the time went",
        tag(
            "p",
            "All recorded steps, on the device's clock where there is one; source: steps.jsonl, spans.",
            class_="note",
        ),
        body,
        table(["part", "s a step", "share"], parts, caption=step, numeric=True) if parts else None,
        id=f"{id}time",
        level=level,
    )


def tasks(story: Story, *, id: str, level: int) -> Html:
    rows: list[list[Child]] = [
        [
            score.task,
            f"{score.step:,}",
            score.metric + (f", mean of {score.samples}" if score.samples > 1 else ""),
            score_text(score.metric, score.value) + score.ungraded,
            interval_text(score.metric, score.low, score.high),
            f"{score.n:,}",
        ]
        for score in story.tasks
    ]
    return _section(
        "Tasks",
        tag("p", "Measured during the run or by flatout eval; source: events.jsonl, tasks.", class_="note"),
        table(["task", "step", "metric", "value", "95 % interval", "n"], rows, caption="Scores by task and step"),
        id=f"{id}tasks",
        level=level,
    )


def rollouts(story: Story, *, id: str, level: int) -> Html:
    """The first and the last phase by task, cosines of the tasks' gradients, and completions to read."""
    first, last = story.rollouts[0], story.rollouts[-1]
    rows: list[list[Child]] = [
        [
            one.task,
            f"{phase.step or 0:,}",
            number(one.reward, digits=3),
            percent(one.accuracy),
            percent(one.answered),
            number(one.length),
            percent(one.truncated),
            percent(one.without_signal),
            number(None if one.grading_s is None else 1000 * one.grading_s, digits=2),
            number(None if one.slowest_s is None else 1000 * one.slowest_s, digits=2),
            f"{one.killed:,}",
        ]
        for phase in ([first, last] if last is not first else [first])
        for one in phase.tasks
    ]
    heads = ["task", "step", "reward", "correct", "answered", "tokens", "truncated", "no signal"]
    heads += ["grading, ms", "slowest, ms", "timed out"]
    parts: list[Child] = [table(heads, rows, caption="The first and the last phase, by task")]
    if pairs := story.cosines:
        shown: list[list[Child]] = [[pair, f"{cosine:+.3f}"] for pair, cosine in pairs.items()]
        caption = "Mean cosine of the gradients of two tasks over the run; negative ones conflict"
        parts.append(table(["tasks", "cosine"], shown, caption=caption))
    texts: list[list[Child]] = [
        [f"{phase.step or 0:,}", one.task, number(one.reward, digits=3), tag("pre", one.completion)]
        for phase in story.rollouts[-NUM_PHASES:]
        for one in phase.samples
    ]
    note = "Model-written text, shown as it is; source: events.jsonl, rollouts."
    parts += [tag("p", note, class_="note"), table(["step", "task", "reward", "completion"], texts, caption="Samples")]
    return _section("Rollouts", *parts, id=f"{id}rollouts", level=level)


def routed(story: Story, *, id: str, level: int) -> Html:
    """The scores of each task by base, own adapter and router, and where the prompts went."""
    return _section("Adapters and routing", *routing.parts(story.routed, draw=table), id=f"{id}routed", level=level)


def _bar(value: float, colour: str) -> Html:
    width = round(100 * min(1.0, max(0.0, value)), 1)
    return tag(
        "svg",
        tag("rect", x=0, y=0, width=width, height=8, rx=1, class_=f"band {colour}"),
        viewBox="0 0 100 8",
        preserveAspectRatio="none",
        class_="bar",
        aria_hidden="true",
    )


def plan(story: Story, *, id: str, level: int) -> Html:
    if not story.choices and not story.forecasts:
        return _section("Plan", _none("this run has no plan"), id=f"{id}plan", level=level)
    return _section(
        "Plan against measurement",
        tag("p", "Predicted before the first step (plan.json), measured over the steps (steps.jsonl).", class_="note"),
        table(
            ["what", "predicted", "measured", "measured / predicted"],
            [_forecast(row) for row in story.forecasts],
            caption="Predictions and measurements",
            numeric=True,
        ),
        tag(
            "p",
            "Predicted memory: ",
            ", ".join(f"{name.replace('_', ' ')} {size:.2f}" for name, size in story.memory_parts.items()),
            " GiB.",
            class_="note",
        )
        if story.memory_parts
        else None,
        table(
            ["decision", "value", "reason", "on the device", "what ran"],
            [_choice(choice) for choice in story.choices],
            caption="Decisions with their reasons",
        ),
        id=f"{id}plan",
        level=level,
    )


def _forecast(row: Forecast) -> list[Child]:
    show = percent if "mfu" in row.name else number
    ratio = "n/a" if row.ratio is None else f"{row.ratio:.2f}"
    return [row.unit, show(row.predicted), show(row.measured), ratio]


def _choice(choice: Choice) -> list[Child]:
    value = {True: "yes", False: "no"}.get(choice.value) if isinstance(choice.value, bool) else str(choice.value)
    return [tag("code", choice.name), tag("strong", value), choice.reason, choice.active or "", choice.ran or ""]


def criteria(story: Story, *, id: str, level: int) -> Html:
    words = {True: ("met", "good"), False: ("not met", "bad"), None: ("not measured", "open")}
    rows = [
        [
            tag("code", verdict.criterion),
            verdict.wanted,
            verdict.got,
            tag("strong", words[verdict.met][0], class_=f"word {words[verdict.met][1]}"),
        ]
        for verdict in story.criteria
    ]
    ended = "as judged at the end (events.jsonl, end)" if story.state.over else "so far"
    body = table(["criterion", "wanted", "got", "verdict"], rows, caption=f"Criteria, {ended}") if rows else None
    none = _none("the configuration has no criteria: section")
    return _section("Criteria", body or none, id=f"{id}criteria", level=level)


def machine(story: Story, *, id: str, level: int) -> Html:
    note = f"{len(story.samples)} samples read, evenly spread over the run; source: monitor.jsonl."
    ranks = [
        [str(rank.rank), f"{rank.steps:,}", number(rank.step_s), percent(rank.data_share), number(rank.peak_gib)]
        for rank in story.ranks
    ]
    return _section(
        "Machine",
        tag("p", note, class_="note"),
        _gpus(story.gpus) if story.gpus else _none("the monitor saw no GPU"),
        table(["rank", "steps", "s a step", "waiting for data", "peak GiB"], ranks, caption="Ranks", numeric=True)
        if ranks
        else None,
        id=f"{id}machine",
        level=level,
    )


def _gpus(gpus: Sequence[Gpu]) -> Html:
    shown = [key for key in GAUGES if any(key in gpu.gauges for gpu in gpus)]
    rows: list[list[Child]] = [[GAUGES[key][0], *(_gauge(gpu, key) for gpu in gpus)] for key in shown]
    rows.append(["throttled", *(_held(gpu) for gpu in gpus)])
    return table(["", *(f"GPU {gpu.index}" for gpu in gpus)], rows, caption="Mean, and highest seen", numeric=True)


def _gauge(gpu: Gpu, key: str) -> str:
    gauge, show = gpu.gauges.get(key), GAUGES[key][1]
    return "n/a" if gauge is None else f"{show(gauge.mean)} (up to {show(gauge.high)})"


def _held(gpu: Gpu) -> str:
    reasons = (f"{reason.replace('_', ' ')} {percent(share)}" for reason, share in gpu.throttle.items())
    return ", ".join(reasons) or "never"


def now(machine: Machine, *, level: int = 2) -> Html:
    """This machine at this moment, for the live page."""
    shown = [key for key in GAUGES if any(key in gpu for gpu in machine.gpus)]
    rows = [
        [
            f"GPU {gpu['index']}",
            machine.memory_of(gpu),
            *(GAUGES[key][1](gpu.get(key)) for key in shown if key != "memory_gib"),
            ", ".join(gpu["throttle"]).replace("_", " ") or "no" if "throttle" in gpu else "n/a",
        ]
        for gpu in machine.gpus
    ]
    heads = ["", "memory", *(GAUGES[key][0] for key in shown if key != "memory_gib"), "throttled"]
    host = [tag("div", tag("dt", name), tag("dd", value)) for name, value in machine.host().items()]
    return _section(
        "This machine, now",
        tag("dl", host, class_="facts"),
        table(heads, rows, caption="GPUs", numeric=True) if rows else _none("no GPU is visible to NVML here"),
        id="now",
        level=level,
    )


def happened(story: Story, *, id: str, level: int) -> Html:
    rows: list[list[Child]] = [
        ["" if event.step is None else f"{event.step:,}", event.kind, sentence]
        for event in story.events
        if (sentence := event.sentence())
    ]
    left = len(rows) - NUM_EVENTS
    note = tag("p", f"{left:,} more before these, in events.jsonl.", class_="note") if left > 0 else None
    body = table(["step", "event", "what"], rows[-NUM_EVENTS:], caption="Events") if rows else _none("nothing of note")
    return _section("What happened", note, body, id=f"{id}events", level=level)


def environment(story: Story, *, id: str, level: int) -> Html:
    flat = [("hardware.json", story.hardware), ("env.json", story.environment)]
    tables = [
        table(
            ["what", "value"],
            [[tag("code", key), _value(value)] for key, value in flatten(facts)],
            caption=f"From {name}",
        )
        for name, facts in flat
    ]
    return _section(
        "Environment",
        tables,
        tag(
            "details",
            tag("summary", "Configuration (config.yaml)"),
            tag("pre", tag("code", story.config_text), tabindex="0"),
            id=f"{id}config",
        ),
        id=f"{id}environment",
        level=level,
    )


def provenance(story: Story, *, id: str, level: int) -> Html:
    rows: list[list[Child]] = [[figure.name, figure.text, figure.source] for figure in numbers.figures(story)]
    return _section(
        "Where the numbers come from",
        tag("p", "Run folder ", tag("code", story.path), ". Nothing else was read.", class_="note"),
        table(["number", "value", "source"], rows, caption="Every number of the first section"),
        id=f"{id}provenance",
        level=level,
    )


def side_by_side(stories: Sequence[Story], compared: Comparison | None) -> list[Html]:
    """Several runs in one table and on the same axes, what the differences show, and which settings differ."""
    names = names_of(stories)
    rows: list[list[Child]] = [["state", *(story.state.sentence for story in stories)]]
    rows += [["criteria", *(story.judged for story in stories)]]
    rows += [[name, *texts] for name, texts in numbers.side_by_side(stories)]
    listed = [
        tag(
            "li",
            tag("a", names[at - 1], href=f"#r{at}-verdict", class_=f"t{(at - 1) % 6 + 1}"),
            " ",
            tag("span", story.path, class_="path"),
        )
        for at, story in enumerate(stories, 1)
    ]
    found = settings_that_differ(stories)
    differing = [[tag("code", key), *(_value(value) for value in values)] for key, values in found or []]
    none = "none differ" if found is not None else "a watched script has no settings of flatout to compare"
    shared = (loss_chart, validation_chart, speed_chart)
    return [
        _section(
            f"{len(stories)} runs side by side",
            tag("ul", listed, class_="runs"),
            table(["", *names], rows, caption="Side by side", numeric=True),
            *(_against(compared) if compared else []),
            id="runs",
            level=1,
        ),
        _section(
            "On the same axes",
            tag(
                "div",
                [figure(chart(stories, id=f"all-{n}"), level=3) for n, chart in enumerate(shared)],
                class_="charts",
            ),
            id="same-axes",
            level=2,
        ),
        _section(
            "Settings that differ",
            table(["setting", *names], differing, caption="From config.json") if differing else _none(none),
            id="differences",
            level=2,
        ),
    ]


def _against(compared: Comparison) -> list[Html]:
    """What `flatout compare` says of the same runs."""
    names = [side.name for side in compared.sides]
    numbers = [
        table(["", *names], [[name, *cells] for name, cells in one.rows], caption=one.title, numeric=True)
        for one in compared.tables()
        if one.rows
    ]
    decided = [[tag("code", key), *(_value(value) for value in values)] for key, values in compared.decisions]
    said: list[list[Child]] = [[one.name, " ".join(compared.sentences(one))] for one in compared.against]
    return [
        *numbers,
        *([table(["decision", *names], decided, caption="Decisions of the plans that differ")] if decided else []),
        table(["run", f"against {names[0]}"], said, caption="Against the first run"),
    ]


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[Child]],
    *,
    caption: str,
    numeric: bool = False,
    words: Collection[str] = (),
) -> Html:
    """A table whose rows are named by their first cell; on a narrow page it scrolls, also by keyboard.

    The cells of a numeric table are not wrapped, except in columns of words.
    """
    classes = ["words" if head in words else None for head in heads[1:]]
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            [tag("td", cell, class_=kind) for cell, kind in zip(row[1:], classes, strict=True)],
        )
        for row in rows
    ]
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption),
            tag("thead", tag("tr", [tag("th", head, scope="col") if head else tag("td") for head in heads])),
            tag("tbody", body),
            class_="numbers" if numeric else None,
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def _section(title: str, *children: Child, id: str, level: int) -> Html:
    return tag("section", tag(f"h{level}", title, id=f"{id}-h"), *children, id=id, aria_labelledby=f"{id}-h")


def _none(what: str) -> Html:
    return tag("p", f"n/a: {what}", class_="none")


def _value(value: Any) -> Html:
    match value:
        case None | [] | {}:
            return tag("span", "n/a", class_="none")
        case bool():
            return text("yes" if value else "no")
        case list():
            return text(", ".join(str(item) for item in value))
        case float():
            return text(number(value, digits=6))
        case _:
            return join(str(value))
