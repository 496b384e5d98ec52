"""Predicts the parts of a step of reinforcement learning: generation, passes without gradients, updates.

Generation is predicted on a GPU with flatout's own sampler, from the cost of its decode steps (`cost.decode_s`), for
completions that all have `sample.max_tokens`. A part that cannot be predicted is None, and `unknown` has the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flatout.cost import BANDWIDTH_SHARE, BYTES, StepTime, decode_s, prefill_s
from flatout.plan.decisions import Decisions
from flatout.plan.job import Job, Rollout
from flatout.plan.predict import Passes, Prediction, decided, peak_of, rates_of, time_of

# The most concurrent sequences. On a GPU all of a phase are fastest; the sampler takes fewer if memory is short.
MOST_ROWS = {"cuda": 1024, "cpu": 64}
# The sampler's log-probabilities are checked on one completion in this many.
CHECKED_SHARE = 8
# Parts that no plan can know, and why.
GRADING = "how long answers take to grade depends on the tasks"


@dataclass(frozen=True, kw_only=True)
class _Work:
    """Of one rank in a phase: its completions, their tokens with the prompts, and how the passes over them run."""

    rollout: Rollout
    rows: int
    tokens: float
    passes: Passes
    steps: int


def predict_rl(job: Job, decisions: Decisions, predicted: Prediction) -> Prediction:
    """The prediction of a step of reinforcement learning in place of that of an update of `train.batch_tokens`."""
    rollout = job.rollout
    assert rollout is not None
    rows = -(-rollout.prompts * rollout.samples // job.num_ranks)
    tokens = rows * (rollout.prompt_tokens + rollout.max_tokens)
    work = _Work(rollout=rollout, rows=rows, tokens=tokens, passes=decided(job, decisions), steps=rollout.steps)
    parts, reasons = _parts(job, work)
    known = [seconds for seconds in parts.values() if seconds is not None]
    lacking = {name: why for name, why in reasons.items() if name != "grade"}
    step_s = None if lacking or predicted.unknown else sum(known)
    trained = tokens * job.num_ranks * rollout.epochs / rollout.steps
    rates = rates_of(job, work.passes)
    shares = rates.shares(tokens=trained, seconds=step_s or 0.0)
    actor_s, critic_s = parts["actor update"], parts["critic update"]
    unknown = predicted.unknown or "; ".join(f"{name}: {why}" for name, why in lacking.items()) or None
    return replace(
        predicted,
        step_s=step_s,
        tokens_per_s=trained / step_s if step_s else None,
        mfu=shares.mfu,
        mfu_common=shares.mfu_common,
        hours=step_s * job.steps / 3600 if step_s and job.steps else None,
        actor_mfu=rates.shares(tokens=trained, seconds=actor_s or 0.0).mfu_common,
        critic_mfu=rates.shares(tokens=trained, seconds=critic_s or 0.0).critic,
        parts_s=parts,
        parts_unknown=reasons,
        unknown=unknown,
    )


def _parts(job: Job, work: _Work) -> tuple[Mapping[str, float | None], Mapping[str, str]]:
    """Seconds of each part of a step, and why others are unknown. What a phase does once is shared by its steps."""
    rollout, steps = work.rollout, work.steps
    update = _time(job, work, tokens=work.tokens * rollout.epochs / steps)
    reasons = {"grade": GRADING}
    generate = _generation_s(job, work)
    if isinstance(generate, str):
        reasons["generate"] = generate
    if update is None:
        reasons |= dict.fromkeys(("actor update", "critic update"), "the peak of the device is unknown")
    once = _time(job, work, tokens=work.tokens)
    one_pass = None if once is None else _forward_s(job, once, work.passes)
    critic_share = job.flops("none").critic / job.flops("none").common  # it has no head
    critic_s = None if update is None else (update.seconds * critic_share if job.own_critic else 0.0)

    def share(passes: float) -> float | None:
        return None if one_pass is None else one_pass * passes / steps

    old = {"check": 1 / CHECKED_SHARE, "pass": 1.0, "none": 0.0}[rollout.old_logprobs]
    return {
        "weight sync": _sync_s(job, work.passes, steps=steps),
        "generate": None if isinstance(generate, str) else generate / steps,
        "grade": None,
        "old log-probs": share(old),
        "reference": share(float(rollout.reference)),
        "values": share(0.0 if rollout.critic is None else critic_share if job.own_critic else 1.0),
        "actor update": None if update is None else update.seconds,
        "critic update": critic_s,
    }, reasons


def _time(job: Job, work: _Work, *, tokens: float) -> StepTime | None:
    """An update on this many tokens, in micro-batches of the planned size, or smaller if there are fewer tokens."""
    count = max(1, math.ceil(tokens / work.passes.micro_tokens))
    return time_of(job, replace(work.passes, micro_tokens=math.ceil(tokens / count), accumulation=count))


def _forward_s(job: Job, time: StepTime, passes: Passes) -> float:
    """A pass without gradients over the same tokens: the forward's share of the operations, and of the launches."""
    flops = job.flops(passes.recompute)
    return (time.seconds - time.update - time.reduce) * flops.forward / flops.executed


def _sync_s(job: Job, passes: Passes, *, steps: int) -> float | None:
    """The weights in fp32 are read and written in the compute type, once in a phase."""
    if job.device == "cpu" or not job.hardware.bandwidth:
        return None
    moved = job.shape.num_parameters * (4 + BYTES[passes.precision])
    return moved / (BANDWIDTH_SHARE * job.hardware.bandwidth) / steps


def _generation_s(job: Job, work: _Work) -> float | str:
    """Seconds of a phase's generation on one rank, or why they are unknown."""
    peak, bandwidth, rollout = peak_of(job, work.passes), job.hardware.bandwidth, work.rollout
    if rollout.sampler != "flatout":
        return f"generation by {rollout.sampler} is not predicted"
    if job.device == "cpu":
        return "generation on a CPU is not predicted"
    if not peak or not bandwidth:
        return "the peak or the bandwidth of this GPU is unknown"
    if job.hardware.sm is None or job.hardware.sm < (8, 0):
        return "generation without the kernels, which need SM 8.0, is not predicted"
    at_once = min(work.rows, job.rows or MOST_ROWS["cuda"])
    rounds = math.ceil(work.rows / at_once)
    each = decode_s(
        job.shape,
        rows=at_once,
        prompts=at_once / rollout.samples,
        prompt_tokens=rollout.prompt_tokens,
        own_tokens=rollout.max_tokens / 2,
        precision=work.passes.precision,
        peak_flops=peak,
        bandwidth=bandwidth,
    )
    prompts = work.rows / rollout.samples * rollout.prompt_tokens
    return rounds * rollout.max_tokens * each + prefill_s(job.shape, tokens=prompts, peak_flops=peak)
