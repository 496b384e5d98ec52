"""Diagnoses a run folder alone: one set of rules and thresholds for `flatout doctor RUN`, the report and watch.

Each rule only reads recorded numbers, so each finding is marked as estimated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flatout.errors import UsageError
from flatout.insight.diagnose import ranked, verdict_of
from flatout.insight.diagnose.health import loss_finding, throttle_finding
from flatout.insight.diagnose.host import RARER, WORTH, finding_of
from flatout.insight.diagnose.limit import FAR_BELOW, NOT_OF_SPEED
from flatout.insight.diagnose.unexplained import low_mfu
from flatout.insight.story import RECENT_STEPS, Story, tell
from flatout.record import Diagnosis, Finding, Run, events
from flatout.verdict import rl_parts
from flatout.words import duration, number, percent

# Minimum shares for causes where `WORTH` would be too low.
MUCH_EVALUATION, MUCH_UNATTRIBUTED, MUCH_PADDING = 0.1, 0.1, 0.15
MUCH_GRADING, MUCH_GENERATION = 0.1, 0.3
# Causes beside the update of a policy, whose own speed they do not explain.
BESIDE_UPDATE = ("generation-bound", "reward-bound")
LITTLE_MEMORY, MUCH_MEMORY = 0.5, 0.95
# A run that has not finished a step in the time of this many usual ones has stalled.
STALL_STEPS, STALL_S = 20, 10.0
# The first evaluation compiles its own graphs, one for each kind of module in a decoder.
GRAPHS_OF_EVALUATION = 3
# Runs with fewer steps than this are not diagnosed.
FEWEST_STEPS = 4


def diagnose(run: Run) -> Diagnosis:
    """Diagnoses a run of flatout; for a watched script, returns the diagnosis that was made then."""
    if run.plan.get("foreign"):
        if (said := run.diagnosis) is not None:
            return said
        raise UsageError(
            f"{run.path} belongs to a script whose watch did not finish: run the doctor on the script again"
        )
    story = tell(run, doctor=False)
    if sum(part.num_steps for part in story.parts) < FEWEST_STEPS:
        raise UsageError(f"{run.path} has too few steps for a diagnosis: let it train longer")
    findings, limit = ranked(rules(story)), _limit(story)
    verdict = verdict_of(findings, limit, of_predicted=story.of_predicted)
    return Diagnosis(verdict=verdict, limit=limit, findings=findings)


def findings_of(story: Story) -> Sequence[Finding]:
    """The doctor's findings if there are any; otherwise those from the record alone, costliest first."""
    return story.findings if story.verdict is not None else ranked(rules(story))


def rules(story: Story) -> Iterator[Finding]:
    every = (
        _data,
        _grading,
        _generating,
        _beside,
        _padding,
        _unattributed,
        _memory,
        _losses,
        _late,
        _machine,
        _recompiled,
        _stalled,
        _lost,
    )
    found = [finding for rule in every for finding in rule(story)]
    yield from found
    yield from _unexplained(story, found)


def _limit(story: Story) -> dict[str, Any]:
    if story.rates is None:
        raise UsageError(f"{story.path}/plan.json has no rates to judge the speed by: it is not a plan of flatout")
    rates, speed = story.rates, story.speed
    peak = rates.peak_flops
    return {
        "tokens_per_s": speed.tokens_per_s,
        "ceiling_tokens_per_s": None if not peak else peak * rates.num_devices / rates.flops.done,
        "share": speed.actor_mfu if rl_parts(speed) else speed.mfu,
        "peak_flops": peak,
        "flops_per_token": rates.flops.done,
        "source": _limit_source(story) if peak else "the device is not in the table of known peaks",
        "model": "the plan's shape",
    }


def _limit_source(story: Story) -> str:
    speed = story.speed
    if not rl_parts(speed):
        return f"MFU {percent(speed.mfu)} of {story.peak}"
    critic = "" if speed.critic_mfu is None else f", of the critic's {percent(speed.critic_mfu)}"
    actor = f"MFU of the actor's update {percent(speed.actor_mfu)}{critic}, by 6N + 12LHT"
    return f"{actor}; of the whole step {percent(speed.mfu)}; of {story.peak}"


def _data(story: Story) -> Iterator[Finding]:
    share = story.speed.data_share
    if share is None or share < WORTH:
        return
    if rl_parts(story.speed):
        yield finding_of(
            "data-starvation",
            f"The step waited for prompts {percent(share)} of its time.",
            share,
            share,
            [f"steps.jsonl, phase data, {story.speed.steps:,} steps"],
            "shorter prompts, such as fewer solved examples before each question (shots=)",
        )
        return
    workers = _decided(story, "workers")
    yield finding_of(
        "data-starvation",
        f"The device waited for data {percent(share)} of the training time.",
        share,
        share,
        [f"steps.jsonl, phase data, {story.speed.steps:,} steps", f"{number(workers)} data loader workers planned"],
        f"plan.workers={2 * (workers or 1)}, or run `flatout data prepare` once, so that training only reads shards",
    )


def _grading(story: Story) -> Iterator[Finding]:
    """Reinforcement learning waits for grades after the last completion."""
    parts = {part.name: part for part in rl_parts(story.speed)}
    if not parts:
        return
    queue, work, rl = parts["grade: queue"], parts["grade: work"], story.config.get("rl") or {}
    share, ahead = queue.share + work.share, rl.get("ahead") or 0
    if share < MUCH_GRADING:
        return
    early = f"rl.ahead={ahead + 1} generates a further phase while these answers are graded"
    graders = rl.get("graders")
    more = f"more than {graders} rl.graders" if graders else "rl.graders above its default, one fewer than the cores"
    yield finding_of(
        "reward-bound",
        f"Training waits for grades {percent(share)} of the step, after the last completion is generated.",
        share,
        share,
        [
            f"steps.jsonl: {number(queue.seconds, unit=' s')} a step until the last answer is being graded, "
            f"{number(work.seconds, unit=' s')} until it is graded"
        ],
        f"{more}, where cores are free; or {early}" if queue.seconds > work.seconds else early,
    )


def _generating(story: Story) -> Iterator[Finding]:
    """Most of a step of reinforcement learning is generation."""
    parts = {part.name: part for part in rl_parts(story.speed)}
    if not parts or parts["generate"].share < MUCH_GENERATION:
        return
    passes = sum(parts[name].share for name in ("old log-probs", "reference", "values"))
    updates = sum(parts[name].share for name in ("actor update", "critic update"))
    grading = parts["grade: queue"].share + parts["grade: work"].share
    last, rows = story.rollouts[-1] if story.rollouts else None, (story.config.get("sample") or {}).get("rows")
    evidence = [
        f"steps.jsonl: {percent(grading)} of the step is waiting for grades, {percent(passes)} log-probabilities and "
        f"values without gradients, {percent(updates)} updates"
    ]
    if last is not None:
        evidence.append(f"events.jsonl, rollouts: {number(last.rows)} completions at once in the last phase")
    yield finding_of(
        "generation-bound",
        f"Generation takes {percent(parts['generate'].share)} of the step; the update waits for it.",
        parts["generate"].share,
        None,
        evidence,
        (f"a larger sample.rows than {rows}, or " if rows else "")
        + "a smaller sample.max_tokens; rl.updates or rl.epochs above 1 learn more from each completion",
    )


def _beside(story: Story) -> Iterator[Finding]:
    spent = {phase.name: phase.share for phase in story.phases}
    for cause, phase, least, kind, words in (
        ("evaluation", "eval", MUCH_EVALUATION, events.Evaluated, "Evaluation takes"),
        ("checkpointing", "save", WORTH, events.Saved, "Saving takes"),
    ):
        share = spent.get(phase, 0.0)
        if share < least:
            continue
        times = sum(isinstance(event, kind) for event in story.events)
        every = (story.config.get(phase) or {}).get("every")
        rarer = f"{phase}.every={RARER * every}" if isinstance(every, int) else f"a larger {phase}.every"
        yield finding_of(
            cause,
            f"{words} {percent(share)} of the run.",
            share,
            share * (1 - 1 / RARER),
            [f"steps.jsonl, phase {phase}; {times} times in {story.num_steps:,} steps (events.jsonl)"],
            rarer + (", or fewer eval.tokens" if phase == "eval" else ""),
        )


def _padding(story: Story) -> Iterator[Finding]:
    share = 1 - story.tokens / story.padded_tokens if story.padded_tokens else 0.0
    if share >= MUCH_PADDING:
        yield finding_of(
            "padding",
            f"{percent(share)} of the tokens computed are padding.",
            share,
            share,
            [f"steps.jsonl: {story.tokens:,} of {story.padded_tokens:,} tokens are real"],
            "choose a data.sequence_length that most examples fill, or one that fits several",
        )


def _unattributed(story: Story) -> Iterator[Finding]:
    share = story.speed.unattributed_share
    if share is not None and share >= MUCH_UNATTRIBUTED:
        yield finding_of(
            "host-sync",
            f"{percent(share)} of the time is in no phase: the host was busy between steps.",
            share,
            None,
            ["steps.jsonl: the seconds of the steps against the sum of their phases"],
            "profile.steps=[10, 12] writes a trace that shows the cause",
        )


def _memory(story: Story) -> Iterator[Finding]:
    if ran_out := [event for event in story.events if isinstance(event, events.MemoryRanOut)]:
        often = "once" if len(ran_out) == 1 else f"{len(ran_out)} times"
        yield finding_of(
            "oom-risk",
            f"The run ran out of memory {often}, and the micro-batch was halved.",
            None,
            None,
            [f"step {event.step}: {event.micro_batch} to {event.now}" for event in ran_out[:3]],
            f"plan.micro_batch={ran_out[-1].now} from the start",
        )
    share = story.memory_share
    if share is None:
        return
    evidence = f"steps.jsonl, memory: {number(story.peak_gib)} of {number(story.total_gib)} GiB at the peak"
    free, recompute, accumulation = 1 - share, _decided(story, "recompute"), _decided(story, "accumulation")
    if share > MUCH_MEMORY:
        yield finding_of(
            "oom-risk",
            f"Peak memory is {percent(share)} of the device: a longer batch may not fit.",
            None,
            None,
            [evidence],
            "plan.preset=safe, or a smaller plan.micro_batch",
        )
    if share >= LITTLE_MEMORY:
        return
    if recompute not in (None, "none"):
        yield finding_of(
            "needless-recompute",
            f"Activations are recomputed although {percent(free)} of the device's memory is free.",
            None,
            None,
            [f"{evidence}; plan.json, recompute: {recompute}"],
            "plan.recompute=none",
        )
    if (accumulation or 1) > 1 and _pinned_batch(story):
        yield finding_of(
            "small-batch",
            f"{percent(free)} of the device's memory is free while a step takes {accumulation} micro-batches.",
            None,
            None,
            [f"{evidence}; plan.json, micro_batch: {_decided(story, 'micro_batch')}, set in the configuration"],
            "plan.micro_batch=auto and plan.accumulation=auto let the plan choose; the effective batch stays the same",
        )


def _pinned_batch(story: Story) -> bool:
    """Whether the configuration pins the micro-batch. The plan itself takes the fastest or the largest that fits."""
    pins = story.config.get("plan") or {}
    searched = any(isinstance(event, events.MicroBatchSearched) for event in story.events)
    return not searched and any(pins.get(name) for name in ("micro_batch", "accumulation"))


def _losses(story: Story) -> Iterator[Finding]:
    if bad := story.num_non_finite:
        lr = (story.config.get("train") or {}).get("lr")
        lower = f"train.lr={lr / 10:g}" if isinstance(lr, float) else "a tenth of train.lr"
        yield finding_of(
            "unstable-loss",
            f"The loss of {bad:,} of {story.num_steps:,} steps was not finite.",
            None,
            None,
            ["steps.jsonl, loss"],
            f"as advice: {lower}, a longer train.warmup_steps, train.clip=1.0; check the data of those steps",
        )
    else:
        yield from _maybe(loss_finding(story.losses, clipped=None, lr=story.last.extra.lr if story.last else None))


def _late(story: Story) -> Iterator[Finding]:
    """The target is out of reach even if the loss keeps falling at its recent rate, which losses do not."""
    target, total = (story.config.get("target") or {}).get("val_loss"), story.total_steps
    seen = {one.step: one.val_loss for one in story.evaluations if one.step and math.isfinite(one.val_loss)}
    steps = sorted(seen)
    if target is None or total is None or len(steps) < 4 or min(seen.values()) <= target:
        return
    then, now = steps[len(steps) // 2 - 1], steps[-1]
    fall = (seen[then] - seen[now]) / (now - then)
    needed = math.inf if fall <= 0 else (seen[now] - target) / fall
    if needed <= total - now:
        return
    train = story.config.get("train") or {}
    speed = "it no longer falls" if fall <= 0 else f"at the rate since step {then} it needs {needed:,.0f} more steps"
    yield finding_of(
        "slow-convergence",
        f"The validation loss will not reach its target of {target:g} in this run.",
        None,
        None,
        [
            f"{seen[now]:.4g} at step {now:,} of {total:,}, {seen[then]:.4g} at step {then:,}; {speed}",
            ", ".join(
                f"train.{name}={train[name]}" for name in ("lr", "warmup_steps", "batch_tokens") if name in train
            ),
        ],
        "as advice: a larger train.lr after a few hundred train.warmup_steps, a smaller train.batch_tokens, more steps",
    )


def _machine(story: Story) -> Iterator[Finding]:
    yield from _maybe(throttle_finding(story.samples))


def _recompiled(story: Story) -> Iterator[Finding]:
    if story.recompiled > GRAPHS_OF_EVALUATION:
        yield finding_of(
            "recompiles",
            "Blocks were recompiled after the first steps, because their shapes change.",
            None,
            None,
            [f"steps.jsonl, extra.graphs: {story.recompiled} more graphs than after the warm-up"],
            "plan.compile=none, or data whose batches all have the same shape",
        )


def _stalled(story: Story) -> Iterator[Finding]:
    if story.state.kind != "running" or story.last is None or story.recent.step_s is None:
        return
    silent = story.told_at - story.last.time
    if silent > max(STALL_S, STALL_STEPS * story.recent.step_s):
        usual = number(story.recent.step_s, unit=" s")
        yield finding_of(
            "stalled",
            f"No step has finished for {duration(silent)}; a step usually takes {usual}.",
            None,
            None,
            [f"steps.jsonl, time of the last step and mean of the last {RECENT_STEPS}"],
            "wait if it is evaluating or saving; py-spy dump --pid shows where it is",
        )


def _lost(story: Story) -> Iterator[Finding]:
    if failed := [event for event in story.events if isinstance(event, events.SaveFailed)]:
        yield finding_of(
            "checkpointing",
            f"{len(failed)} checkpoints could not be saved.",
            None,
            None,
            [f"events.jsonl, save-failed: {failed[-1].error}"],
            "free space on that disk; the next save is attempted as planned",
        )
    if dropped := [event.num_lines for event in story.events if isinstance(event, events.LinesDropped)]:
        yield finding_of(
            "logging",
            f"{sum(dropped):,} lines of the record were dropped.",
            None,
            None,
            ["events.jsonl, lines_dropped"],
            "free space on the disk of the run folder; the charts have gaps there",
        )


def _unexplained(story: Story, found: Sequence[Finding]) -> Iterator[Finding]:
    """A finished run far below the peak, without a cause."""
    speed, rl = story.speed, bool(rl_parts(story.speed))
    mfu, others = (speed.actor_mfu, (*NOT_OF_SPEED, *BESIDE_UPDATE)) if rl else (speed.mfu, NOT_OF_SPEED)
    if mfu is None or mfu >= FAR_BELOW or not story.state.over or any(f.cause not in others for f in found):
        return
    predicted = (story.plan.get("predicted") or {}).get("actor_mfu" if rl else "mfu")
    ruled_out = [
        f"waiting for data ({percent(speed.data_share)})",
        f"time in no phase ({percent(speed.unattributed_share)})",
    ]
    if story.padded_tokens:
        ruled_out.append(f"padding ({percent(1 - story.tokens / story.padded_tokens)})")
    next_step = (
        "profile.steps=[10, 12] writes a trace of the kernels; flatout hardware --selftest checks every fast path"
    )
    if predicted is not None:
        ruled_out.append(f"the plan predicted {percent(predicted)}")
        if predicted < FAR_BELOW:
            next_step = (
                f"a larger model or batch: the plan predicts only {percent(predicted)} for this job; {next_step}"
            )
    yield low_mfu(mfu, {phase.name: phase.share for phase in story.phases}, ruled_out=ruled_out, next_step=next_step)


def _decided(story: Story, name: str) -> Any:
    return (story.plan.get("decisions") or {}).get(name)


def _maybe(finding: Finding | None) -> Iterable[Finding]:
    return () if finding is None else (finding,)
