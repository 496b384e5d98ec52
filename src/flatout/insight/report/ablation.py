"""The page of an ablation: what each switch brings as bars with intervals, and the gains one after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence

from flatout import __version__
from flatout.insight.payback import Payback, paybacks
from flatout.insight.report.charts import draw
from flatout.insight.report.figures import payback_chart
from flatout.insight.report.fragments import table
from flatout.insight.report.html import Child, Html, join, tag
from flatout.insight.report.page import POLICY, digest, document, style
from flatout.insight.rows import Ablation, Row, shown
from flatout.words import number

QUESTIONS = {
    "alone": ("Each switch alone", "Speed against the starting point; the thin line is the 95 % interval."),
    "without": ("Without each switch", "Speed against the full plan; the thin line is the 95 % interval."),
    "cumulative": ("One after the other", "Tokens per second; each bar begins where the one before it ended."),
    "recipe": (
        "Without each change of the recipe",
        "Speed against the full plan; the thin line is the 95 % interval. Each row is another training.",
    ),
}
WORDS = ("claim", "loss", "verdict")
WIDTH, NAMES, RIGHT, ROW = 640, 240, 60, 24


def html(found: Ablation, *, name: str) -> str:
    """One file that needs nothing else."""
    policy = f"{POLICY}; style-src {digest(style())}"
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    sections = [_section(found, question) for question in QUESTIONS]
    paid = paybacks(found)
    left = [[what, why] for what, why in found.left_out.items()]
    seen = join(
        tag("header", tag("p", "flatout ablation", class_="brand"), tag("p", made, id="made")),
        tag(
            "main",
            tag("h1", f"The gain of each optimization: {name}"),
            sections,
            [tag("p", note, class_="note") for note in found.notes()],
            _compilation(paid) if paid else None,
            table(["", "why"], left, caption="Left out") if left else None,
            id="content",
        ),
        tag("footer", f"Written by flatout {__version__}. Warm-up steps and compilation are not part of the speed."),
    )
    return document(tag("meta", http_equiv="Content-Security-Policy", content=policy), seen, title=f"{name}: ablation")


def _section(found: Ablation, question: str) -> Html | None:
    if not (asked := found.asked(question)):
        return None
    rows = [row for row in asked if row.question == question]
    title, about = QUESTIONS[question]
    chart = waterfall(found, rows) if question == "cumulative" else bars(rows)
    heads, cells = shown([row.cells for row in asked])
    return tag(
        "section",
        tag("h2", title, id=f"{question}-h"),
        tag("figure", tag("figcaption", about), chart) if chart is not None else None,
        table(heads, cells, caption=title, numeric=True, words=WORDS),
        id=question,
        aria_labelledby=f"{question}-h",
    )


def _compilation(paid: Sequence[Payback]) -> Html:
    """When each measured compilation has paid off."""
    shown = []
    for at, one in enumerate(paid):
        chart = payback_chart(
            id=f"payback-{at}",
            about=str(one),
            compiled=(one.compiled.start_s, one.compiled.token_s),
            plain=(one.plain.start_s, one.plain.token_s),
            even=one.tokens,
            x_name="tokens",
        )
        shown.append(tag("figure", tag("figcaption", str(one)), draw(chart)))
    return tag(
        "section",
        tag("h2", "When compiling pays off", id="compilation-h"),
        tag("div", shown, class_="charts"),
        id="compilation",
        aria_labelledby="compilation-h",
    )


def bars(rows: Sequence[Row]) -> Html | None:
    """The speed of each row as a multiple of its reference."""
    known = [(row, row.time) for row in rows if row.time is not None and row.problem is None]
    if not known:
        return None
    widest = max(1 / seen.low if seen.low > 0 else 1 / seen.ratio for _, seen in known)
    widest = max(1.0, min(widest, 2 * max(1 / seen.ratio for _, seen in known)))

    def x(speed: float) -> float:
        return round(NAMES + (WIDTH - NAMES - RIGHT) * min(speed, widest) / widest, 1)

    parts: list[Child] = []
    for at, (row, seen) in enumerate(known):
        y, speed = 6 + ROW * at, 1 / seen.ratio
        colour = {"faster": "f3", "slower": "f5"}.get(seen.verdict, "f6")
        parts += [
            tag("text", row.name, x=NAMES - 8, y=y + 13, class_="tick end"),
            tag("rect", x=NAMES, y=y + 3, width=round(x(speed) - NAMES, 1), height=ROW - 10, class_=colour),
            tag("text", f"{speed:.2f}x", x=WIDTH - RIGHT + 6, y=y + 13, class_="tick"),
        ]
        if seen.low > 0:
            middle = y + 10
            parts.append(tag("line", x1=x(1 / seen.high), x2=x(1 / seen.low), y1=middle, y2=middle, class_="axis"))
    one = x(1.0)
    parts.append(tag("line", x1=one, x2=one, y1=2, y2=6 + ROW * len(known), class_="axis"))
    return _svg(parts, height=12 + ROW * len(known), title="Speed of each row against its reference")


def waterfall(found: Ablation, rows: Sequence[Row]) -> Html | None:
    """Tokens per second after each step of the cumulative rows."""
    start = next((row.tokens_per_s for row in found.rows if row.question is None), None)
    known = [row for row in rows if row.tokens_per_s is not None and row.problem is None]
    if start is None or not known:
        return None
    speeds = [start, *(row.tokens_per_s or 0.0 for row in known)]
    widest = max(speeds)

    def x(speed: float) -> float:
        return round(NAMES + (WIDTH - NAMES - RIGHT) * speed / widest, 1)

    parts: list[Child] = []
    for at, (name, before, after) in enumerate(
        zip(["before", *(row.name for row in known)], [0.0, *speeds], speeds, strict=False)
    ):
        y, low, high = 6 + ROW * at, min(before, after), max(before, after)
        colour = "f6" if at == 0 else "f3" if after >= before else "f5"
        parts += [
            tag("text", name, x=NAMES - 8, y=y + 13, class_="tick end"),
            tag("rect", x=x(low), y=y + 3, width=max(1.0, round(x(high) - x(low), 1)), height=ROW - 10, class_=colour),
            tag("text", number(after), x=WIDTH - RIGHT + 6, y=y + 13, class_="tick"),
        ]
    return _svg(parts, height=12 + ROW * len(speeds), title="Tokens per second, one switch after the other")


def _svg(parts: Sequence[Child], *, height: int, title: str) -> Html:
    return tag(
        "svg",
        tag("title", title),
        *parts,
        viewBox=f"0 0 {WIDTH} {height}",
        role="img",
        class_="chart",
        aria_label=title,
    )
