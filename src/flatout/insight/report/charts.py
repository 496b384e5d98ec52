"""Charts as plain SVG: lines with the range they stand for, bands that add up; read without script or legend.

Colours are classes, so that the page's style sheet decides them for light, dark and paper. Every chart has a
title and a description for those who do not see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from flatout.insight.report.html import Child, Html, join, tag

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 50, 96, 14, 38
LABEL_GAP = 34
# Beyond this many times the usual range a value leaves the axis and is marked at its edge.
OUTLIER = 3.0
LARGEST = 1e100
# A logarithmic axis goes on by this factor.
LOG_ROOM = 2.0
STRIPS = 60  # places at which the pointer shows values


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value at a step, and the range of the steps it stands for."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None

    @property
    def bottom(self) -> float:
        return self.y if self.low is None else self.low

    @property
    def top(self) -> float:
        return self.y if self.high is None else self.high

    @property
    def drawable(self) -> bool:
        """Whether an axis has a place for it: what is not finite, or nearly so, has none."""
        return all(abs(value) <= LARGEST for value in (self.y, self.bottom, self.top))


@dataclass(frozen=True, kw_only=True)
class Line:
    name: str
    points: Sequence[Point]
    colour: int  # 1 to 6, see the style sheet
    dots: bool = False  # a few single measurements, such as evaluations


@dataclass(frozen=True, kw_only=True)
class Level:
    """A horizontal line to compare with: a prediction, a limit."""

    name: str
    y: float


@dataclass(frozen=True, kw_only=True)
class Chart:
    id: str
    title: str
    about: str  # one sentence for those who do not see the chart
    show: Callable[[float], str]  # how a value is written
    lines: Sequence[Line] = ()
    levels: Sequence[Level] = ()
    broken: Sequence[float] = ()  # steps whose value was not finite
    from_zero: bool = True
    log: bool = False  # both axes; all values are positive
    x_name: str = "step"
    missing: str = "nothing was recorded to draw this from"


@dataclass(frozen=True, kw_only=True)
class Band:
    name: str
    colour: str  # a class of the style sheet
    shares: Sequence[float]
    share: float  # of the whole


@dataclass(frozen=True, kw_only=True)
class Bands:
    """Shares that add up to one, over steps."""

    id: str
    title: str
    about: str
    xs: Sequence[float]
    bands: Sequence[Band] = field(default_factory=tuple)


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """Where values lie in the drawing."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log: bool = False

    def x(self, value: float) -> float:
        return LEFT + self._share(value, self.x_low, self.x_high) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        inside = min(max(value, self.y_low), self.y_high)
        return HEIGHT - BOTTOM - self._share(inside, self.y_low, self.y_high) * (HEIGHT - TOP - BOTTOM)

    def ticks(self, low: float, high: float, *, count: int = 4) -> list[float]:
        return decades(low, high) if self.log else ticks(low, high, count=count)

    def _share(self, value: float, low: float, high: float) -> float:
        """How far a value lies on the way from low to high."""
        if self.log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)


def draw(chart: Chart) -> Html:
    """The chart as SVG; a sentence where there is nothing to draw."""
    shown = [replace(line, points=[point for point in line.points if point.drawable]) for line in chart.lines]
    lines = [line for line in shown if line.points]
    if not lines:
        return tag("p", f"n/a: {chart.missing}", class_="none")
    frame = _frame(chart, lines)
    return _svg(
        chart.id,
        chart.title,
        chart.about,
        _axes(frame, show=chart.show, x_name=chart.x_name),
        [_level(frame, level, lines) for level in chart.levels if frame.y_low <= level.y <= frame.y_high],
        [_range(frame, line) for line in lines],
        [_line(frame, line) for line in lines],
        [_beyond(frame, line) for line in lines],
        [_broken(frame, x) for x in chart.broken],
        _pointed_at(chart, frame, lines),
        _labels([(frame.y(line.points[-1].y), f"t{line.colour}", line.name, _last(chart, line)) for line in lines]),
    )


def draw_bands(chart: Bands) -> Html:
    if not chart.bands or not chart.xs:
        return tag("p", "n/a: no phases were recorded", class_="none")
    frame = _Frame(x_low=chart.xs[0], x_high=max(chart.xs[-1], chart.xs[0] + 1), y_low=0.0, y_high=1.0)
    xs = chart.xs if len(chart.xs) > 1 else [frame.x_low, frame.x_high]
    below = [0.0] * len(xs)
    shapes, labels = [], []
    for band in chart.bands:
        shares = band.shares if len(chart.xs) > 1 else [*band.shares] * 2
        above = [base + share for base, share in zip(below, shares, strict=True)]
        edge = [*_pairs(frame, xs, above), *reversed([*_pairs(frame, xs, below)])]
        shapes.append(tag("polygon", points=" ".join(edge), class_=f"band {band.colour}"))
        if band.share >= 0.04:
            middle = frame.y((below[-1] + above[-1]) / 2)
            labels.append((middle, "ink", band.name, f"{100 * band.share:.1f} %"))
        below = above
    axes = _axes(frame, show=lambda share: f"{100 * share:.0f} %", x_name="step")
    return _svg(chart.id, chart.title, chart.about, shapes, axes, _labels(labels))


def short(value: float) -> str:
    """A number for an axis: 1.5M, 20k, 0.25."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def share(value: float) -> str:
    return f"{100 * value:.3g} %"


def ticks(low: float, high: float, *, count: int = 4) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them."""
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * number for number in range(first, last + 1)]


def decades(low: float, high: float) -> list[float]:
    """The powers of ten from `low` to `high`."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [10.0**power for power in range(first, last + 1)]


def _svg(id: str, title: str, about: str, *content: Child) -> Html:
    return tag(
        "svg",
        tag("title", title, id=f"{id}-title"),
        tag("desc", about, id=f"{id}-about"),
        *content,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_labelledby=f"{id}-title {id}-about",
        class_="chart",
    )


def _frame(chart: Chart, lines: Sequence[Line]) -> _Frame:
    points = [point for line in lines for point in line.points]
    xs = [point.x for point in points]
    if chart.log:
        ys = [point.y for point in points]
        return _Frame(x_low=min(xs), x_high=max(xs), y_low=min(ys) / LOG_ROOM, y_high=max(ys) * LOG_ROOM, log=True)
    means = sorted(point.y for point in points)
    low, high = min(point.bottom for point in points), max(point.top for point in points)
    # A spike must not flatten everything else: the axis ends where nearly all means do.
    usual_low, usual = means[0], means[int(0.98 * (len(means) - 1))]
    room = max(usual - (0.0 if chart.from_zero else usual_low), 1e-12 * max(1.0, abs(usual)))
    if high - usual > OUTLIER * room:
        high = usual + 0.25 * room
    high = max([high, *(level.y for level in chart.levels if level.y <= 1.5 * high)])
    low = min(0.0, low) if chart.from_zero else low
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-6):  # one value, give or take what no axis could show
        low, high = (low, low + 1.0) if chart.from_zero else (low - 0.5, high + 0.5)
    margin = 0.06 * (high - low)
    low = low if chart.from_zero and low >= 0 else low - margin
    return _Frame(x_low=min(xs), x_high=max(max(xs), min(xs) + 1), y_low=low, y_high=high + margin)


def _axes(frame: _Frame, *, show: Callable[[float], str], x_name: str) -> Html:
    bottom = HEIGHT - BOTTOM
    parts = []
    for value in frame.ticks(frame.y_low, frame.y_high):
        y = _round(frame.y(value))
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", show(value), x=LEFT - 6, y=_round(y + 4), class_="tick end"))
    for value in frame.ticks(frame.x_low, frame.x_high, count=3):
        x = _round(frame.x(value))
        parts.append(tag("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="axis"))
        parts.append(tag("text", short(value), x=x, y=bottom + 17, class_="tick middle"))
    parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom, class_="axis"))
    parts.append(tag("text", x_name, x=WIDTH - RIGHT, y=HEIGHT - 5, class_="tick end"))
    return join(parts)


def _level(frame: _Frame, level: Level, lines: Sequence[Line]) -> Html:
    """The line and its name, on the side away from the curve next to it."""
    y = _round(frame.y(level.y))
    nearest = min((line.points[-1].y for line in lines), key=lambda value: abs(value - level.y))
    under = nearest > level.y and y < HEIGHT - BOTTOM - 20
    return join(
        tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="level"),
        tag("text", level.name, x=LEFT + 6, y=_round(y + (14 if under else -5)), class_="tick halo"),
    )


def _range(frame: _Frame, line: Line) -> Html | None:
    if not any(point.bottom != point.top for point in line.points):
        return None
    xs = [point.x for point in line.points]
    upper = [*_pairs(frame, xs, [point.top for point in line.points])]
    lower = [*_pairs(frame, xs, [point.bottom for point in line.points])]
    return tag("polygon", points=" ".join([*upper, *reversed(lower)]), class_=f"range c{line.colour}")


def _line(frame: _Frame, line: Line) -> Html:
    pairs = [*_pairs(frame, [point.x for point in line.points], [point.y for point in line.points])]
    drawn = tag("polyline", points=" ".join(pairs), class_=f"line c{line.colour}")
    if not line.dots and len(line.points) > 1:
        return drawn
    dots = [
        tag("circle", cx=_round(frame.x(point.x)), cy=_round(frame.y(point.y)), r=3.2, class_=f"dot c{line.colour}")
        for point in line.points
    ]
    return join(drawn, dots)


def _pointed_at(chart: Chart, frame: _Frame, lines: Sequence[Line]) -> Html:
    """Invisible strips that say the values under the pointer, without script."""
    xs = sorted({point.x for line in lines for point in line.points})
    xs = xs if len(xs) <= STRIPS else [xs[round(at * (len(xs) - 1) / (STRIPS - 1))] for at in range(STRIPS)]
    edges = [LEFT, *((frame.x(a) + frame.x(b)) / 2 for a, b in pairwise(xs)), WIDTH - RIGHT]
    strips = []
    for x, left, right in zip(xs, edges, edges[1:], strict=False):
        nearest = [(line.name, min(line.points, key=lambda point: abs(point.x - x)).y) for line in lines]
        said = f"{chart.x_name} {short(x)}: " + ", ".join(f"{name} {chart.show(y)}" for name, y in nearest)
        size = {"x": _round(left), "width": _round(max(0.0, right - left)), "y": TOP, "height": HEIGHT - TOP - BOTTOM}
        strips.append(tag("rect", tag("title", said), **size, class_="strip"))
    return join(strips)


def _beyond(frame: _Frame, line: Line) -> Html | None:
    """Marks where a value or its range leaves the axis, and says the farthest one."""
    out = [point for point in line.points if point.top > frame.y_high]
    if not out:
        return None
    marks = [_mark(frame.x(point.x), class_=f"mark f{line.colour}") for point in out]
    farthest = max(out, key=lambda point: point.top)
    said = f"{short(farthest.top)} at {short(farthest.x)}"
    x = frame.x(farthest.x)
    side = "end" if x > (LEFT + WIDTH - RIGHT) / 2 else ""
    return join(marks, tag("text", said, x=_round(x + (-7 if side else 7)), y=TOP + 9, class_=f"tick {side}"))


def _mark(x: float, *, class_: str) -> Html:
    return tag("path", d=f"M{_round(x - 4)} {TOP + 7}L{_round(x)} {TOP}L{_round(x + 4)} {TOP + 7}Z", class_=class_)


def _broken(frame: _Frame, x: float) -> Html:
    at, y = _round(frame.x(x)), HEIGHT - BOTTOM
    return tag("path", d=f"M{at - 3:g} {y - 8}l6 6m0 -6l-6 6", class_="broken")


def _labels(labels: Iterable[tuple[float, str, str, str]]) -> Html:
    """Names and last values at the right end, pushed apart so that none covers another."""
    placed = sorted(labels)
    ys = [y for y, *_ in placed]
    for at in range(1, len(ys)):
        ys[at] = max(ys[at], ys[at - 1] + LABEL_GAP)
    floor = float(HEIGHT - BOTTOM - 16)
    for at in reversed(range(len(ys))):
        ys[at] = min(ys[at], floor)
        floor = ys[at] - LABEL_GAP
    x = WIDTH - RIGHT + 8
    return join(
        [
            tag(
                "text",
                tag("tspan", name, x=x, class_="name"),
                tag("tspan", value, x=x, dy="1.15em", class_="value"),
                x=x,
                y=_round(max(y, 12.0)),
                class_=f"label {colour}",
            )
            for y, (_, colour, name, value) in zip(ys, placed, strict=True)
        ]
    )


def _last(chart: Chart, line: Line) -> str:
    return chart.show(line.points[-1].y)


def _pairs(frame: _Frame, xs: Sequence[float], ys: Sequence[float]) -> Iterable[str]:
    return (f"{_round(frame.x(x)):g},{_round(frame.y(y)):g}" for x, y in zip(xs, ys, strict=True))


def _round(value: float) -> float:
    return round(value, 1)
