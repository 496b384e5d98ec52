"""Causes in the computation: precision, kernels, batch, optimizer, switches left on, the GPU's idle time."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flatout.insight.diagnose import fixes
from flatout.insight.diagnose.host import WORTH, finding_of, waits
from flatout.insight.diagnose.observed import Observed, short
from flatout.probe.agent.replays import ENOUGH_TOKENS
from flatout.record import Finding

_DEBUG_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "NCCL_DEBUG": ("INFO", "TRACE"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1",),
    "TORCHDYNAMO_DISABLE": ("1",),
    "TORCH_COMPILE_DISABLE": ("1",),
}
# Assumed where there is no replay, and below the known cases: 76 % of a CPU job, 71 % by a replay on a GPU (docs).
_ANOMALY_COSTS = 0.5


def wrong_dtype(seen: Observed) -> Finding | None:
    dtypes = seen.model.get("dtypes", {})
    computed = seen.facts.get("compute_dtype")
    if "float64" in dtypes or computed == "float64":
        gain = seen.replay_gain("single")
        return finding_of(
            "wrong-dtype",
            "The model computes in float64, which is slow and not needed for training.",
            seen.compute_share,
            gain,
            [f"parameters {dict(dtypes)}, largest matmul {computed}", *_replayed(seen, "single", "in float32")],
            "drop torch.set_default_dtype(torch.float64) / .double(), and make NumPy inputs float32",
        )
    sm = (seen.facts.get("gpu") or {}).get("sm")
    if computed == "bfloat16" and sm and sm[0] < 8:
        return finding_of(
            "wrong-dtype",
            f"bfloat16 is emulated on this GPU (compute capability {sm[0]}.{sm[1]}).",
            seen.compute_share,
            None,
            [f"largest matmul {computed}", "bfloat16 units need compute capability 8.0 or later"],
            f"float16 instead: {fixes.fp16(seen)}",
        )
    product = seen.replay("float32_product")
    if computed == "bfloat16" and product is not None and seen.is_shown("float32_product"):
        saved = 1 - product[1] / product[0]
        return finding_of(
            "wrong-dtype",
            "This CPU computes bfloat16 more slowly than float32.",
            seen.compute_share,
            saved * seen.compute_share,
            [
                f"largest matmul {computed}",
                f"1024 x 1024: {product[0] * 1e3:.1f} ms in bfloat16, {product[1] * 1e3:.1f} ms in float32",
            ],
            "float32 on this machine: remove autocast, or load the model with dtype=torch.float32",
        )
    return None


def fp32_matmul(seen: Observed) -> Finding | None:
    """Matmuls in full float32 on a GPU with tensor cores, or mixed precision that does not take effect."""
    if not seen.on_gpu or _computed(seen) != "float32":
        return None
    bf16, tf32 = seen.replay_gain("bf16"), seen.replay_gain("tf32")
    gain = max((g for g in (bf16, tf32) if g is not None), default=None)
    if gain is not None and gain < WORTH:
        return None
    meant = {name: seen.counts(name) for name in ("autocast", "scaled") if seen.counts(name)}
    evidence = [
        f"largest matmul in float32, float32 precision {seen.facts['flags']['matmul_precision']!r}",
        *_replayed(seen, "bf16", "under bf16 autocast"),
        *_replayed(seen, "tf32", "with TF32"),
    ]
    fix = f"{fixes.bf16(seen)}; or, with float32 kept: {fixes.tf32(seen)}"
    if meant:
        return finding_of(
            "precision-inactive",
            "Mixed precision is set up, but the model's matmuls still run in float32.",
            seen.compute_share,
            gain,
            [
                f"autocast entered {meant.get('autocast', 0)} times, losses scaled {meant.get('scaled', 0)} times",
                *evidence,
            ],
            f"{fix}; the forward pass must run inside it",
        )
    return finding_of(
        "fp32-matmul",
        "Matmuls run in full float32 and leave the tensor cores idle.",
        seen.compute_share,
        gain,
        evidence,
        fix,
    )


def _computed(seen: Observed) -> str | None:
    """The dtype of the largest matmul; None for compiled code, whose inside no hook sees and which may cast."""
    known: str | None = seen.facts.get("compute_dtype")
    if known is not None or not seen.model.get("compiled"):
        return known or "float32"
    dtypes = seen.model.get("dtypes") or {}
    return max(dtypes, key=dtypes.__getitem__, default=None) if seen.framework == "torch" else None


def math_attention(seen: Observed) -> Finding | None:
    found = (seen.facts.get("replays") or {}).get("attention")
    gains = []
    evidence = []
    if isinstance(found, list):
        written, fused, count, shape = found
        gains.append(min(seen.compute_share, (written - fused) * count / seen.step_s))
        evidence.append(
            f"softmax over {'x'.join(map(str, shape))} scores, {count:.0f} times a step (profiler); that shape "
            f"replayed: {written * 1e3:.2f} ms written out, {fused * 1e3:.2f} ms fused"
        )
    if (switched := seen.replay_gain("attention-backends")) is not None:
        gains.append(switched)
        evidence += _replayed(seen, "attention-backends", "with all SDPA backends allowed")
    gain = max(gains, default=0.0)
    if gain < WORTH:
        return None
    return finding_of(
        "math-attention",
        "Attention is computed with separate matmuls and a softmax that write the whole score matrix to memory.",
        gain,
        gain,
        evidence,
        fixes.attention(seen)
        if isinstance(found, list) and switched is None
        else "allow the fused ones: torch.backends.cuda.enable_flash_sdp(True), enable_mem_efficient_sdp(True)",
    )


def small_batch(seen: Observed) -> Finding | None:
    """Too little work per pass: the same model processes more tokens per second with more rows in the batch."""
    replays = seen.facts.get("replays") or {}
    twice, found = seen.replay("batch-2"), seen.replay("batch-4")
    if twice is None or seen.rows is None:
        return None
    times, (now, then) = (4, found) if found else (2, twice)
    checked, unchecked = seen.replay("anomaly") or (now, now)  # batches are replayed without anomaly detection
    gain = (1 - then / now) * seen.replayed_share(now) * min(1.0, unchecked / checked)
    tokens = None if seen.length is None else seen.length * seen.rows
    # One odd replay is not evidence: twice the batch must already show it. Without accumulation to reduce,
    # a larger batch changes the training itself, so the gain must be larger.
    least = 0.15 if seen.accumulation > 1 else 0.25
    least = max(least, 0.4) if seen.is_disturbed else least
    if gain < least or 1 - twice[1] / twice[0] < 0.07 or not seen.is_shown("batch-4" if found else "batch-2"):
        return None
    if seen.on_gpu and tokens is not None and tokens >= ENOUGH_TOKENS:
        return None
    if seen.accumulation == 1:  # fewer steps for as many tokens
        gain += (1 - 1 / times) * seen.share("optimizer")
    rows = round(seen.rows * times)
    short_rows = seen.length is not None and seen.length <= 64 and seen.rows >= 16
    evidence = [
        f"last batch replayed: {now * 1e3:.1f} ms; {times} times the rows cost {then * 1e3:.1f} ms for as many tokens",
        f"{seen.rows:.0f} rows of {seen.length or 0:.0f} tokens a micro-batch, accumulation {seen.accumulation:.0f}",
        *(["twice the batch ran out of memory"] if replays.get("batch-2") == "out of memory" else []),
    ]
    if short_rows:
        return finding_of(
            "short-sequences",
            f"Rows of {seen.length:.0f} tokens are too short to keep the device busy.",
            gain,
            gain,
            evidence,
            "pack several rows into one longer sequence with position ids, or "
            + fixes.larger_batch(seen, rows=rows, accumulation=math.ceil(seen.accumulation / times)),
        )
    return finding_of(
        "small-batch",
        f"A micro-batch of {seen.rows:.0f} rows is too small: fixed costs dominate.",
        gain,
        gain,
        evidence,
        fixes.larger_batch(seen, rows=rows, accumulation=math.ceil(seen.accumulation / times)),
    )


def padding(seen: Observed) -> Finding | None:
    if not seen.tokens or seen.real_tokens is None:
        return None
    padded = 1 - seen.real_tokens / seen.tokens
    gain = padded * seen.compute_share
    if padded < 0.15 or gain < WORTH:
        return None
    return finding_of(
        "padding",
        f"{padded:.0%} of the computed tokens are padding.",
        gain,
        gain,
        [f"{seen.real_tokens:,.0f} of {seen.tokens:,} tokens are real, rows of {seen.length or 0:.0f} (masks and ids)"],
        fixes.padding(seen),
    )


def slow_optimizer(seen: Observed) -> Finding | None:
    share = seen.share("optimizer")
    found = seen.replay("fused")
    gain = None if found is None else (1 - found[1] / found[0]) * share * seen.is_shown("fused")
    taken = []
    if seen.is_open("fused") and seen.is_disturbed:
        gain, taken = None, [_taken(seen)]
    facts = seen.optimizer
    if not facts:
        return _own_updates(seen)
    if share < 0.08 or (gain is not None and gain < 0.04) or (gain is None and share < 0.3) or facts.get("fused"):
        return None
    return finding_of(
        "slow-optimizer",
        f"The optimizer updates its {facts['tensors']} tensors in many small operations.",
        share,
        gain,
        [
            f"{share:.0%} of step time in {facts['class']}(fused={facts['fused']}, foreach={facts['foreach']})",
            *_replayed(seen, "fused", "fused, on a sample of the parameters"),
            *taken,
        ],
        fixes.fused_optimizer(seen),
    )


def _own_updates(seen: Observed) -> Finding | None:
    """Updates that the script writes out take long."""
    share = seen.share("optimizer") + seen.activities.get("update", 0.0)
    if share < 0.15:
        return None
    sites = seen.sites("update", "optimizer", most=1)
    return finding_of(
        "slow-optimizer",
        f"The script updates its parameters itself{f' at {sites[0]}' if sites else ''}, tensor by tensor.",
        share,
        None,
        [f"{share:.0%} of step time in the update"],
        "an optimizer of torch.optim with fused=True; or torch._foreach_* functions over the list of all parameters",
    )


def needless_recompute(seen: Observed) -> Finding | None:
    gain, timed = seen.replay_gain("recompute"), []
    missing = (seen.facts.get("replays") or {}).get("recompute") is None and not seen.on_gpu
    if missing or (seen.is_open("recompute") and not gain):
        # The forward passes that are run again were timed in every step.
        again = sum(float(step["counts"].get("recompute_s", 0.0)) for step in seen.steps)
        forward = sum(step["host"].get("forward", 0.0) for step in seen.steps)
        gain = min(1.0, again / forward) * seen.share("forward") if forward else None
        why = "not replayed" if missing else "the replay was too noisy to tell"
        timed = [f"{why}: estimated as the time of the forward passes that are run again in the backward pass"]
    if gain is None or gain < WORTH:
        return None
    gpu = seen.facts.get("gpu")
    memory = f"{gpu['peak_gib']:.1f} of {gpu['memory_gib']:.0f} GiB used at the peak" if gpu else "in CPU memory"
    fits = (
        "and whether the activations fit was not tried" if missing else "although the activations would fit in memory"
    )
    return finding_of(
        "needless-recompute",
        f"Activation checkpointing runs the forward pass twice, {fits}.",
        gain,
        gain,
        [
            f"{memory}; {seen.counts('recompute')} checkpointed calls",
            *_replayed(seen, "recompute", "without it"),
            *timed,
        ],
        fixes.no_recompute(seen),
    )


def missing_no_sync(seen: Observed) -> Finding | None:
    found = seen.replay("no-sync")
    synced = sum(step["counts"].get("synced", 0) for step in seen.steps) / len(seen.steps)
    if found is None or seen.accumulation < 2 or synced < 2:
        return None
    gain = max(0.0, found[0] - found[1]) * (synced - 1) / seen.step_s
    return finding_of(
        "missing-no-sync",
        f"Gradients are all-reduced {synced:.0f} times per step, although once is enough.",
        gain,
        gain,
        [f"accumulation {seen.accumulation:.0f}, {seen.world} ranks", *_replayed(seen, "no-sync", "inside no_sync()")],
        fixes.no_sync(seen),
    )


def anomaly_mode(seen: Observed) -> Finding | None:
    if not seen.counts("anomaly"):
        return None
    gain, typical = seen.replay_gain("anomaly"), []
    refuted = seen.is_refuted("anomaly")
    if gain is None:
        gain = _ANOMALY_COSTS * seen.compute_share
        typical = [f"not measured here; assumed to be {_ANOMALY_COSTS:.0%} of the forward and backward passes"]
    return finding_of(
        "anomaly-mode",
        "Autograd's anomaly detection is on: every operation records its stack and is checked for NaN.",
        gain,
        gain,
        [f"on in {seen.counts('anomaly')} forward passes", *typical, *_replayed(seen, "anomaly", "without it")],
        fixes.anomaly(seen),
        refuted=refuted,
    )


def few_threads(seen: Observed) -> Finding | None:
    gain = seen.replay_gain("threads")
    threads, could = seen.facts["threads"], seen.facts["default_threads"]
    taken, refuted = [], seen.is_refuted("threads")
    if seen.is_open("threads") and seen.is_disturbed:
        gain, taken = None, [_taken(seen)]
    elif gain is None or (gain < WORTH and not refuted):
        return None
    set_by = seen.facts["variables"].get("OMP_NUM_THREADS")
    return finding_of(
        "few-threads",
        f"torch computes with {threads} of {could} threads.",
        seen.compute_share if gain is None or refuted else gain,
        gain,
        [
            f"OMP_NUM_THREADS={set_by}" if set_by else "torch.set_num_threads()",
            *_replayed(seen, "threads", f"with {could}"),
            *taken,
        ],
        f"torch.set_num_threads({could}), or OMP_NUM_THREADS={could}",
        refuted=refuted,
    )


def debug_flags(seen: Observed) -> Finding | None:
    variables = seen.facts["variables"]
    left_on = [f"{name}={variables[name]}" for name, bad in _DEBUG_VARIABLES.items() if variables.get(name) in bad]
    left_on += [f"TORCH_LOGS={variables['TORCH_LOGS']}"] if variables.get("TORCH_LOGS") else []
    gain = None
    if seen.facts["flags"]["deterministic"]:
        left_on.append("torch.use_deterministic_algorithms(True)")
        gain = seen.replay_gain("deterministic")
    if not left_on:
        return None
    return finding_of(
        "debug-flags",
        "Debug settings are on.",
        gain,
        gain,
        [*left_on, *_replayed(seen, "deterministic", "without deterministic algorithms")],
        f"unset {', '.join(flag.split('=')[0] for flag in left_on)} for real runs",
    )


def recompiles(seen: Observed) -> Finding | None:
    times = sum(step["compile_s"] > 1e-3 for step in seen.steps)
    share = sum(step["compile_s"] for step in seen.steps) / seen.seconds
    if times < 2 or share < WORTH:
        return None
    reasons = list((seen.facts.get("recompiles") or {}).get("reasons", {}))[:2]
    return finding_of(
        "recompiles",
        f"torch.compile recompiled in {times} of {len(seen.steps)} steps.",
        share,
        share,
        [f"{share:.0%} of step time in compilation (dynamo's own times)", *(f"reason: {r}" for r in reasons)],
        fixes.fewer_shapes(seen),
    )


# -- the GPU's idle time


def idle_gpu(seen: Observed) -> Finding | None:
    """The GPU waits inside the step: for a value that the host reads, or for a host that launches too slowly."""
    idle = seen.idle_share
    if idle is None:
        return None
    # Waits in a named phase belong to another cause.
    own = ("forward", "loss", "backward", "other") + (() if slow_optimizer(seen) else ("optimizer",))
    named = max(0.0, seen.share(*(p for p in seen.phases if p not in own)) - seen.paused_share)
    sync, launch = waits(seen, "sync"), waits(seen, "launch")
    inside = max(0.0, idle - named)
    kernels = seen.profile.get("num_kernels") or 0
    base = [f"GPU idle {idle:.0%} of step time, {kernels:,.0f} kernels a step (profiler)"]
    if seen.facts["variables"].get("CUDA_LAUNCH_BLOCKING") == "1":
        return finding_of(
            "launch-blocking",
            "CUDA_LAUNCH_BLOCKING=1 makes the host wait for every kernel.",
            idle,
            idle * 0.9,
            base,
            "unset CUDA_LAUNCH_BLOCKING: it is meant for finding a kernel that crashed",
        )
    if seen.counts("anomaly"):  # it reads a value after every operation
        return None
    if sync > launch and seen.facts.get("syncs"):
        share = inside * sync / (sync + launch)
        sites = [
            f"{s['site'].split(' at ')[0]} at {short(s['site'].split(' at ')[1])}, {s['count']:.0f} times a step"
            for s in seen.facts["syncs"][:3]
        ]
        return (
            None
            if share < WORTH
            else finding_of(
                "host-sync",
                f"The host waits for the GPU inside the step ({sites[0]}), and the GPU then waits for the host.",
                share,
                share,
                [*base, *sites],
                "keep values as tensors and read them only every few steps: loss.detach(), torch.where for `if`",
            )
        )
    share = max(0.0, inside - seen.share("other"))
    if share < 0.1 or small_batch(seen) is not None:  # a larger batch is the simpler fix for the same cause
        return None
    return finding_of(
        "launch-bound",
        "The GPU finishes its small kernels faster than Python launches them.",
        share,
        share * 0.8,
        base,
        fixes.compiled(seen),
    )


def _taken(seen: Observed) -> str:
    return f"other processes used {seen.others_cores or 0:.1f} cores, and the replay was too noisy to tell"


def _replayed(seen: Observed, name: str, how: str) -> list[str]:
    found = seen.replay(name)
    return [] if found is None else [f"replayed: {found[0] * 1e3:.2f} ms as it was, {found[1] * 1e3:.2f} ms {how}"]


ALL = (
    wrong_dtype,
    fp32_matmul,
    math_attention,
    small_batch,
    padding,
    slow_optimizer,
    needless_recompute,
    missing_no_sync,
    anomaly_mode,
    few_threads,
    debug_flags,
    recompiles,
    idle_gpu,
)
