"""Causes that waste a whole run rather than a share of each step: the loss, nearly full memory, throttling."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from flatout.insight.diagnose.host import finding_of
from flatout.insight.diagnose.observed import Observed
from flatout.insight.diagnose.ranks import slower, uneven
from flatout.record import Finding

# A busy GPU normally runs at its power cap; these throttle reasons mean a problem.
_SLOWED = ("hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal")
# The lowest usual learning rates for training from scratch.
_USUAL_ADAM_RATE, _USUAL_SGD_RATE = 1e-4, 1e-2
# After this many steps, a loss that has not changed is a problem at any learning rate.
_MANY_STEPS = 200


def unstable_loss(seen: Observed) -> Finding | None:
    clipped = seen.counts("clip") > 0
    return loss_finding(seen.losses, clipped=clipped, lr=seen.rates[-1] if seen.rates else None)


def loss_finding(
    losses: Sequence[float], *, clipped: bool | None, lr: float | None, steps: Sequence[float | None] = ()
) -> Finding | None:
    """A loss that is not finite, or that rises far above its minimum: a failure, which has no cost in step time."""
    bad = [at for at, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad:
        step = steps[bad[0]] if steps else None
        since = f"watched step {bad[0]}" if not steps else f"line {bad[0] + 1}" if step is None else f"step {step:,.0f}"
        lost = len(bad) == len(losses) - bad[0]
        sentence = (
            f"The loss is {losses[bad[0]]} from {since} on: the model no longer learns."
            if lost
            else f"{len(bad)} of {len(losses)} losses are not finite, the first at {since}."
        )
    else:
        if len(losses) < 6:
            return None
        lowest = min(losses)
        last = fmean(losses[-3:])
        if lowest <= 0 or last < 2 * max(lowest, fmean(losses[:3])):
            return None
        sentence = f"The loss has risen from {lowest:.3g} to {last:.3g}: training diverges."
    advice = ["a tenth of the learning rate", "a warm-up of a few hundred steps"]
    if clipped is False:
        advice.insert(0, "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before optimizer.step()")
    known = [f"learning rate {lr:.3g}" if lr is not None else "learning rate unknown"]
    known += {True: ["gradients are clipped"], False: ["gradients are not clipped"], None: []}[clipped]
    return finding_of(
        "unstable-loss", sentence, None, None, [*known, f"{len(losses)} losses"], "as advice: " + ", ".join(advice)
    )


def slow_convergence(seen: Observed) -> Finding | None:
    """The loss equals a uniform guess and does not fall, at a learning rate far below the usual."""
    losses, rates, vocab = seen.losses, seen.rates, seen.model.get("vocabulary")
    if len(losses) < 6 or not rates or not vocab or not all(math.isfinite(x) for x in losses):
        return None
    third = len(losses) // 3
    first, last = fmean(losses[:third]), fmean(losses[-third:])
    if last < 0.97 * math.log(vocab) or first - last > 0.002 * abs(first):
        return None
    # A rising learning rate is a warm-up, and at a usual rate this few steps are not enough to judge.
    usual = _USUAL_SGD_RATE if "SGD" in str(seen.optimizer.get("class")) else _USUAL_ADAM_RATE
    if rates[-1] > rates[0] or (rates[-1] > usual / 100 and len(losses) < _MANY_STEPS):
        return None
    batch = (seen.rows or 0) * seen.accumulation * seen.world
    return finding_of(
        "slow-convergence",
        f"The loss is {last:.4g}, which is a uniform guess over {vocab} ids, and does not fall.",
        None,
        None,
        [
            f"{first:.4g} in the first third of {len(losses)} steps, {last:.4g} in the last",
            f"learning rate {rates[-1]:.3g} with {seen.optimizer.get('class')}, usually {usual:g} or more from scratch",
            f"effective batch {batch:.0f} rows",
        ],
        f"as advice: a learning rate of {usual:g} to {10 * usual:g} after a short warm-up, or a smaller batch",
    )


def oom_risk(seen: Observed) -> Finding | None:
    gpu = seen.facts.get("gpu")
    if not gpu:
        return None
    used = gpu["peak_reserved_gib"] / gpu["memory_gib"]
    if used < 0.95 and not gpu["alloc_retries"]:
        return None
    return finding_of(
        "oom-risk",
        f"GPU memory is {used:.0%} used at the peak: a longer batch may run out of memory.",
        None,
        None,
        [
            f"{gpu['peak_reserved_gib']:.1f} of {gpu['memory_gib']:.1f} GiB reserved",
            f"{gpu['alloc_retries']} allocator retries",
        ],
        "a smaller micro-batch with more accumulation, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )


def offload(seen: Observed) -> Finding | None:
    devices = seen.optimizer.get("devices", {})
    if not seen.on_gpu or not devices.get("cpu"):
        return None
    share = seen.share("optimizer")
    gpu = seen.facts.get("gpu") or {}
    return finding_of(
        "offload",
        "Parameters or optimizer states are in CPU memory, and every step copies them over the bus.",
        share,
        None,
        [
            f"parameters by device {devices}; optimizer {share:.0%} of step time",
            f"GPU peak {gpu.get('peak_gib', 0):.1f} GiB",
        ],
        "keep them on the GPU if they fit; otherwise shard them over GPUs (FSDP2) before offloading",
    )


def throttled(seen: Observed) -> Finding | None:
    return throttle_finding(seen.samples) or _slower_device(seen)


def _slower_device(seen: Observed) -> Finding | None:
    """One GPU of several that is slower for the same work. CPU ranks share cores, so they are not compared."""
    found, work = slower(seen.ranks), uneven(seen.ranks)
    if not seen.on_gpu or found is None or work is None or work.wasted > 0.02 or found[1] < 1.2:
        return None
    rank, times = found
    waited = (1 - 1 / times) * seen.compute_share
    return finding_of(
        "throttled",
        f"The GPU of rank {rank} takes {times:.1f} times as long for the same tokens, and the others wait for it.",
        waited,
        waited,
        [f"forward passes of rank {rank} against the others' (CUDA events)", work.sentence],
        "check that GPU's clocks, temperature and other processes (nvidia-smi), or do not use it",
    )


def throttle_finding(samples: Sequence[Mapping[str, Any]]) -> Finding | None:
    seen = [gpu for sample in samples for gpu in sample.get("gpus", []) if "throttle" in gpu]
    reasons = Counter(reason for gpu in seen for reason in gpu["throttle"] if reason in _SLOWED)
    slowed = sum(any(reason in _SLOWED for reason in gpu["throttle"]) for gpu in seen)
    if not seen or slowed / len(seen) < 0.1:
        return None
    hottest = max((gpu["temperature_c"] for gpu in seen if "temperature_c" in gpu), default=None)
    return finding_of(
        "throttled",
        "The GPU lowers its clocks to protect itself.",
        None,
        None,
        [f"{slowed / len(seen):.0%} of {len(seen)} samples: {dict(reasons)}", f"hottest {hottest} degrees C (NVML)"],
        "improve the cooling, or use another GPU",
    )


ALL = (unstable_loss, slow_convergence, oom_risk, offload, throttled)
