"""The numbers at the top of a report, each with its source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flatout.insight.story import Story
from flatout.record import WARM_STEPS
from flatout.verdict import rl_parts
from flatout.words import duration, number, percent

# Rows of figures: key, name, value, text, source.
_Row = tuple[str, str, float | None, str, str]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of a run: its stable key, its text, and its source."""

    key: str
    name: str
    value: float | None
    text: str
    source: str


def figures(story: Story) -> list[Figure]:
    rows = [*_speed_rows(story), *_memory_rows(story), *_loss_rows(story), *_length_rows(story)]
    return [
        Figure(key=key, name=name, value=value, text=text, source=source) for key, name, value, text, source in rows
    ]


def side_by_side(stories: Sequence[Story]) -> list[tuple[str, list[str]]]:
    """The name of each figure and its text for every run; a run of another recipe may not have it."""
    columns = [{figure.key: figure for figure in figures(story)} for story in stories]
    keys = dict.fromkeys(key for column in columns for key in column)
    return [
        (
            next(column[key].name for column in columns if key in column),
            [column[key].text if key in column else "n/a" for column in columns],
        )
        for key in keys
    ]


def figure(story: Story, key: str) -> Figure:
    return next(found for found in figures(story) if found.key == key)


def _speed_rows(story: Story) -> list[_Row]:
    speed = story.speed
    counted = (
        f"steps.jsonl, {speed.steps:,} steps: the first {WARM_STEPS} of each attempt, eval, save and profile apart"
    )
    source = (story.rates and story.rates.peak_source) or "datasheet"  # the only one there was before it was recorded
    peak = f"plan.json, rates (operations per token, {source} peak)"
    of = f" of {story.peak}" if story.peak and speed.mfu is not None else ""
    padding = 1 - story.tokens / story.padded_tokens if story.padded_tokens else None
    return [
        (
            "tokens_per_s",
            "tokens/s",
            speed.tokens_per_s,
            number(speed.tokens_per_s),
            f"tokens ÷ seconds, all devices together, without padding; {counted}",
        ),
        (
            "tokens_per_s_per_device",
            "tokens/s per device",
            speed.tokens_per_s_per_device,
            number(speed.tokens_per_s_per_device),
            "tokens/s ÷ plan.json, rates: num_devices",
        ),
        (
            "padded_tokens_per_s",
            "tokens/s with padding",
            speed.padded_tokens_per_s,
            number(speed.padded_tokens_per_s),
            "padded_tokens of steps.jsonl ÷ seconds, all devices together",
        ),
        (
            "mfu",
            "MFU, as done",
            speed.mfu,
            f"{percent(speed.mfu)}{of}",
            f"tokens/s x {peak}; n/a where that is not known",
        ),
        (
            "mfu_common",
            "MFU, 6N + 12LHT",
            speed.mfu_common,
            percent(speed.mfu_common),
            f"the convention most projects report; tokens/s x {peak}",
        ),
        *(
            (
                f"{role}_mfu",
                f"MFU of the {role}",
                share,
                percent(share),
                f"by 6N + 12LHT, in the seconds of the {role}'s update (steps.jsonl, spans)",
            )
            for role, share in (("actor", speed.actor_mfu), ("critic", speed.critic_mfu))
            if rl_parts(speed)
        ),
        ("step_s", "step time", speed.step_s, number(speed.step_s, unit=" s"), f"seconds ÷ steps; {counted}"),
        (
            "data_share",
            "waiting for data",
            speed.data_share,
            percent(speed.data_share),
            "steps.jsonl, spans: data ÷ training seconds",
        ),
        (
            "unattributed_share",
            "unattributed",
            speed.unattributed_share,
            percent(speed.unattributed_share),
            "steps.jsonl: 1 - spans ÷ seconds, two clocks compared",
        ),
        ("padding_share", "padding", padding, percent(padding), "steps.jsonl: 1 - tokens ÷ padded_tokens"),
    ]


def _memory_rows(story: Story) -> list[_Row]:
    share = "" if story.memory_share is None else f" ({percent(story.memory_share)})"
    said = number(story.peak_gib, unit=" GiB") + share
    return [
        ("peak_gib", "peak memory", story.peak_gib, said, "steps.jsonl, memory: highest peak_gib; share of total_gib")
    ]


def _loss_rows(story: Story) -> list[_Row]:
    first, last = (number(loss, digits=4) for loss in story.loss_ends)
    found = [evaluation.val_loss for evaluation in story.evaluations]
    began = f"; the first was {number(found[0], digits=4)}" if found else ""
    val = found[-1] if found else None
    return [
        (
            "loss",
            "training loss",
            story.loss_ends[1],
            last,
            f"steps.jsonl: mean of the last tenth; the first tenth's was {first}",
        ),
        (
            "val_loss",
            "validation loss",
            val,
            number(val, digits=4),
            f"events.jsonl, eval: the last of {len(found)}{began}",
        ),
    ]


def _length_rows(story: Story) -> list[_Row]:
    total = "" if story.total_steps is None else f" of {story.total_steps:,}"
    left = "none" if story.state.over else duration(story.left_s)
    return [
        (
            "steps",
            "steps",
            story.num_steps,
            f"{story.num_steps:,}{total}",
            "steps.jsonl, last step; events.jsonl, start",
        ),
        ("tokens", "tokens", story.tokens, f"{story.tokens:,}", "steps.jsonl, sum of tokens"),
        (
            "seconds",
            "time in steps",
            story.seconds,
            duration(story.seconds),
            "steps.jsonl, sum of seconds; everything between two steps counts",
        ),
        ("left_s", "time left", story.left_s, left, f"steps left x mean of the last {story.recent.steps} steps"),
    ]
