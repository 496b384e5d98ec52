"""Formats numbers for people, the same everywhere."""

from __future__ import annotations


def number(value: float | None, *, unit: str = "", digits: int = 3) -> str:
    """A number as text; an unknown one is `n/a`, never zero."""
    if value is None:
        return "n/a"
    if 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}{unit}"
    return f"{value:.{digits}g}{unit}"


def percent(value: float | None) -> str:
    return "n/a" if value is None else f"{round(100 * value, 1) + 0.0:.1f} %"  # + 0.0: never "-0.0"


def counted(count: int, what: str) -> str:
    """A number of things: 1 thread, 2 threads."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "n/a"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def loss_text(loss: float | None) -> str:
    """A loss with the digits that matter in training."""
    return number(loss, digits=4) if loss is None or abs(loss) >= 1000 else f"{loss:.4f}"


def score_text(metric: str, value: float | None) -> str:
    if metric.endswith("100 % not graded"):
        return "not graded"
    return number(value, digits=4) if metric == "perplexity" else percent(value)


def interval_text(metric: str, low: float | None, high: float | None, *, brackets: bool = False) -> str:
    if low is None or high is None or score_text(metric, low) == "not graded":
        return "" if brackets else "n/a"
    span = f"{score_text(metric, low)} to {score_text(metric, high)}"
    return f" ({span})" if brackets else span
