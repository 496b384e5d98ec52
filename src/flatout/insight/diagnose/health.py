"""Causes that waste a whole run rather than a share of each step: the loss, memory at its edge, clocks held down."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from flatout.insight.diagnose.host import _finding
from flatout.insight.diagnose.observed import Observed
from flatout.insight.diagnose.ranks import slower, uneven
from flatout.record import Finding

# A power cap alone is how a busy GPU runs; these mean that something is wrong with it.
_SLOWED = ("hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal")


def unstable_loss(seen: Observed) -> Finding | None:
    clipped = seen.counts("clip") > 0
    rates = [step["lr"] for step in seen.steps if step.get("lr")]
    return loss_finding(seen.losses, clipped=clipped, lr=rates[-1] if rates else None)


def loss_finding(losses: Sequence[float], *, clipped: bool | None, lr: float | None) -> Finding | None:
    """A loss that is no number, or that rises far above what it had reached; every step since is wasted."""
    if len(losses) < 6:
        return None
    bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if bad is not None:
        wasted = 1 - bad / len(losses)
        sentence = f"The loss is {losses[bad]} from step {bad} of the watched ones on: nothing is learnt any more."
    else:
        lowest = min(range(len(losses)), key=lambda i: losses[i])
        last = fmean(losses[-3:])
        if losses[lowest] <= 0 or last < 2 * max(losses[lowest], fmean(losses[:3])):
            return None
        wasted = 1 - (lowest + 1) / len(losses)
        sentence = f"The loss has left {losses[lowest]:.3g} and stands at {last:.3g}: training diverges."
    advice = ["a tenth of the learning rate", "a warm-up of some hundred steps"]
    if clipped is False:
        advice.insert(0, "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before optimizer.step()")
    known = [f"learning rate {lr:.3g}" if lr is not None else "learning rate not known"]
    known += {True: ["gradients are clipped"], False: ["gradients are not clipped"], None: []}[clipped]
    return _finding(
        "unstable-loss", sentence, wasted, wasted, [*known, f"{len(losses)} losses"], "as advice: " + ", ".join(advice)
    )


def slow_convergence(seen: Observed) -> Finding | None:
    """Still as wise as a coin: the loss of a uniform guess, and not falling."""
    losses, vocab = seen.losses, (seen.model.get("config") or {}).get("vocab_size")
    if len(losses) < 8 or not all(math.isfinite(x) for x in losses):
        return None
    third = len(losses) // 3
    first, last = fmean(losses[:third]), fmean(losses[-third:])
    guess = math.log(vocab) if isinstance(vocab, int) and vocab > 1 else None
    untrained = guess is not None and last > 0.97 * guess
    if first - last > 0.002 * abs(first) or not untrained:
        return None
    rates = [step["lr"] for step in seen.steps if step.get("lr") is not None]
    rate = rates[-1] if rates else None
    return _finding(
        "slow-convergence",
        f"The loss stands at {last:.4g}, which is a uniform guess over {vocab} ids, and does not fall.",
        None,
        None,
        [f"{first:.4g} in the first third of {len(losses)} steps, {last:.4g} in the last", f"learning rate {rate}"],
        "as advice: check the learning rate (1e-4 to 1e-3 for AdamW from scratch), a shorter warm-up, a smaller batch",
    )


def oom_risk(seen: Observed) -> Finding | None:
    gpu = seen.facts.get("gpu")
    if not gpu:
        return None
    used = gpu["peak_reserved_gib"] / gpu["memory_gib"]
    if used < 0.95 and not gpu["alloc_retries"]:
        return None
    return _finding(
        "oom-risk",
        f"GPU memory is {used:.0%} used at the peak: a longer batch ends the run.",
        None,
        None,
        [
            f"{gpu['peak_reserved_gib']:.1f} of {gpu['memory_gib']:.1f} GiB reserved",
            f"{gpu['alloc_retries']} retries of the allocator",
        ],
        "a smaller micro-batch with more accumulation, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )


def offload(seen: Observed) -> Finding | None:
    devices = seen.optimizer.get("devices", {})
    if not seen.on_gpu or not devices.get("cpu"):
        return None
    share = seen.share("optimizer")
    gpu = seen.facts.get("gpu") or {}
    return _finding(
        "offload",
        "Parameters or optimizer states live in CPU memory, and every step crosses the bus.",
        share,
        None,
        [
            f"parameters by device {devices}; optimizer {share:.0%} of step time",
            f"GPU peak {gpu.get('peak_gib', 0):.1f} GiB",
        ],
        "keep them on the GPU where they fit; otherwise shard over GPUs (FSDP2) before offloading",
    )


def throttled(seen: Observed) -> Finding | None:
    return throttle_finding(seen.samples) or _slower_device(seen)


def _slower_device(seen: Observed) -> Finding | None:
    """One GPU of several that takes longer for the same work; CPU ranks share their cores, so nothing follows there."""
    found, work = slower(seen.ranks), uneven(seen.ranks)
    if not seen.on_gpu or found is None or work is None or work.wasted > 0.02 or found[1] < 1.2:
        return None
    rank, times = found
    waited = (1 - 1 / times) * seen.compute_share
    return _finding(
        "throttled",
        f"The GPU of rank {rank} takes {times:.1f} times as long for the same tokens, and the others wait for it.",
        waited,
        waited,
        [f"forward passes of rank {rank} against the others' (CUDA events)", work.sentence],
        "look at that GPU's clocks, temperature and other processes (nvidia-smi), or leave it out",
    )


def throttle_finding(samples: Sequence[Mapping[str, Any]]) -> Finding | None:
    seen = [gpu for sample in samples for gpu in sample.get("gpus", []) if "throttle" in gpu]
    reasons = Counter(reason for gpu in seen for reason in gpu["throttle"] if reason in _SLOWED)
    slowed = sum(any(reason in _SLOWED for reason in gpu["throttle"]) for gpu in seen)
    if not seen or slowed / len(seen) < 0.1:
        return None
    hottest = max((gpu["temperature_c"] for gpu in seen if "temperature_c" in gpu), default=None)
    return _finding(
        "throttled",
        "The GPU lowers its clocks to protect itself.",
        None,
        None,
        [f"{slowed / len(seen):.0%} of {len(seen)} samples: {dict(reasons)}", f"hottest {hottest} degrees C (NVML)"],
        "better cooling, or a GPU that is not shared with a hot neighbour",
    )


ALL = (unstable_loss, slow_convergence, oom_risk, offload, throttled)
