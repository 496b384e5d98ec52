"""What a record alone already tells: cheap findings for the time before the doctor is asked.

Each is a plain reading of recorded numbers, so each is called estimated and promises no gain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flatout.insight.story import RECENT_STEPS, Story
from flatout.record import Finding, LinesDropped, SaveFailed
from flatout.words import duration, number, percent

WAIT_SHARE, LITTLE_MEMORY, MUCH_MEMORY, THROTTLED_SHARE = 0.05, 0.6, 0.95, 0.05
# A run that has not finished a step in this many usual ones is said to stand still.
STALL_STEPS = 20


def findings(story: Story) -> Sequence[Finding]:
    """The doctor's, where it was asked; otherwise what the record says by itself, the costliest first."""
    if story.verdict is not None:
        return story.findings
    found = [*_unstable(story), *_stalled(story), *_data(story), *_throttled(story), *_memory(story), *_lost(story)]
    return sorted(found, key=lambda finding: -(finding.share or 0.0))


def _finding(cause: str, sentence: str, *, evidence: str, fix: str, share: float | None = None) -> Finding:
    return Finding(
        cause=cause, sentence=sentence, share=share, gain=None, status="estimated", evidence=(evidence,), fix=fix
    )


def _data(story: Story) -> Iterator[Finding]:
    share = story.speed.data_share
    if share is not None and share > WAIT_SHARE:
        yield _finding(
            "data-starvation",
            f"The device waited for data in {percent(share)} of the training time.",
            share=share,
            evidence=f"steps.jsonl, spans: data, {story.speed.steps:,} steps",
            fix="More loader workers (plan.workers), a deeper queue (plan.prefetch), or data prepared beforehand "
            "(flatout data prepare).",
        )


def _throttled(story: Story) -> Iterator[Finding]:
    for gpu in story.gpus:
        for reason, share in gpu.throttle.items():
            if share > THROTTLED_SHARE:
                yield _finding(
                    "throttled",
                    f"GPU {gpu.index} was held back ({reason.replace('_', ' ')}) in {percent(share)} of the samples.",
                    evidence=f"monitor.jsonl, gpus.throttle, {len(story.samples)} samples read",
                    fix="A power cap at full load is the card's limit; heat and power brakes are the room's or the "
                    "server's: nvidia-smi -q -d PERFORMANCE names them.",
                )


def _memory(story: Story) -> Iterator[Finding]:
    share, choices = story.memory_share, {choice.name: choice.value for choice in story.choices}
    if share is None or not story.hardware.get("gpu"):
        return
    evidence = f"steps.jsonl, memory: {number(story.peak_gib)} of {number(story.total_gib)} GiB"
    if share > MUCH_MEMORY:
        yield _finding(
            "oom-risk",
            f"The peak took {percent(share)} of the device's memory: a longer batch may not fit.",
            evidence=evidence,
            fix="A smaller plan.micro_batch, or plan.preset: safe.",
        )
    elif share < LITTLE_MEMORY and choices.get("recompute", "none") != "none":
        yield _finding(
            "needless-recompute",
            f"Activations are recomputed though {percent(1 - share)} of the device's memory stays free.",
            evidence=f"{evidence}; plan.json, recompute: {choices['recompute']}",
            fix="plan.recompute: none.",
        )
    elif share < LITTLE_MEMORY and (choices.get("accumulation") or 1) > 1:
        yield _finding(
            "small-batch",
            f"{percent(1 - share)} of the device's memory stays free while {choices['accumulation']} micro-batches "
            "are run one after the other.",
            evidence=f"{evidence}; plan.json, accumulation",
            fix="A larger plan.micro_batch; flatout keeps the effective batch exact.",
        )


def _unstable(story: Story) -> Iterator[Finding]:
    if story.num_non_finite:
        yield _finding(
            "unstable-loss",
            f"The loss of {story.num_non_finite:,} steps was not finite.",
            evidence="steps.jsonl, loss",
            fix="A lower train.lr, a longer train.warmup_steps, train.clip; look at the data of those steps.",
        )


def _stalled(story: Story) -> Iterator[Finding]:
    if story.state.kind != "running" or story.last is None or story.recent.step_s is None:
        return
    silent = story.told_at - story.last.time
    if silent > max(10.0, STALL_STEPS * story.recent.step_s):
        yield _finding(
            "stalled",
            f"No step has ended for {duration(silent)}; usual is {number(story.recent.step_s, unit=' s')}.",
            evidence=f"steps.jsonl, time of the last step and mean of the last {RECENT_STEPS}",
            fix="An evaluation or a save may be under way; py-spy dump --pid shows where it stands.",
        )


def _lost(story: Story) -> Iterator[Finding]:
    failed = [event for event in story.events if isinstance(event, SaveFailed)]
    if failed:
        yield _finding(
            "checkpointing",
            f"{len(failed)} checkpoints could not be saved.",
            evidence=f"events.jsonl, save-failed: {failed[-1].error}",
            fix="Make room on that disk: the next save will be tried as planned.",
        )
    if dropped := [event for event in story.events if isinstance(event, LinesDropped)]:
        yield _finding(
            "logging",
            f"{sum(event.num_lines for event in dropped):,} lines of the record were dropped.",
            evidence="events.jsonl, lines_dropped",
            fix="The disk of the run folder was full: the charts have holes there.",
        )
