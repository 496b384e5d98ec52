"""Micro-batch, accumulation and recomputation: they must fit the memory and give exactly the requested batch.

Also the number of concurrent sequences, for recipes that sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flatout.config.settings import Precision, Recompute, Sharding
from flatout.cost import BYTES, GIB, Adapters, BlockPath, Memory, ModelShape, kv_cache_bytes_per_token
from flatout.errors import UsageError
from flatout.plan.decisions import PINNED, pin_reason
from flatout.plan.job import Job
from flatout.plan.predict import full_tokens, memory_of, sized

# Share of the device's memory that the predicted peak may take, by preset.
MEMORY_BUDGET = {"safe": 0.75, "balanced": 0.85, "max": 0.92}
# With fewer tokens than this in a micro-batch, recomputing activations to fit a larger one is faster.
THIN_TOKENS = 2048
# The rank of the adapters that a message proposes.
LORA_RANK = 16
# More concurrent sequences than this gain nothing: reading the weights no longer dominates a step.
MOST_ROWS = {"gpu": 2048, "cpu": 32}


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Sequences per pass, passes per step, and the recomputation with which they fit in memory."""

    micro_batch: int
    accumulation: int
    recompute: Recompute


def sharding(job: Job) -> tuple[Sharding, str]:
    """Whether every rank holds a copy of the weights or only some rows of them, and why."""
    if job.pins.sharding == "full":
        _require_shardable(job)
        return "full", PINNED
    if job.num_ranks == 1:
        return "none", "one rank holds everything"
    if job.shape.foreign:
        return "none", "transformers runs this model, so each rank has a copy"
    if job.adapters is not None and job.adapters.base_bits == 4:
        return "none", "4-bit weights are not sharded"
    if job.usable_gib is None:
        return "none", "the GPU's memory is unknown, so each rank has a copy"
    budget = MEMORY_BUDGET[job.pins.preset] * job.usable_gib
    precision: Precision = job.pins.precision or ("fp32" if job.device == "cpu" else "bf16")

    def least(job: Job) -> float:
        return memory_of(job, sized(job, 1, precision=precision, path="eager", recompute="full")).gib

    whole = least(job)
    if whole <= budget:
        return "none", f"a copy on each rank fits ({whole:.1f} of {budget:.1f} GiB): gradients are summed once a step"
    part = least(replace(job, pins=replace(job.pins, sharding="full")))
    return "full", f"a copy on each rank needs {whole:.1f} of {budget:.1f} GiB; over {job.num_ranks} ranks {part:.1f}"


def _require_shardable(job: Job) -> None:
    """Refuses pins that sharding does not support."""
    pins, adapters = job.pins, job.adapters
    problems = {
        "one rank": job.num_ranks == 1,
        "plan.fp8": bool(pins.fp8),
        "plan.graphs": bool(pins.graphs),
        "lora.base: 4-bit": adapters is not None and adapters.base_bits == 4,
        "the fused segments with adapters": adapters is not None and bool(pins.fused_qkv or pins.fused_mlp),
    }
    if found := [name for name, present in problems.items() if present]:
        raise UsageError(f"plan.sharding: full does not work with {', '.join(found)}: remove one of them")


def fit(job: Job, *, precision: Precision, path: BlockPath) -> tuple[Fit, dict[str, str]]:
    """Returns the fit and the reason for each of its parts."""
    sizes, modes = _sizes(job), _modes(job, path)
    budget = None if job.usable_gib is None else MEMORY_BUDGET[job.pins.preset] * job.usable_gib

    def needs(size: int, mode: Recompute) -> Memory:
        graphs = bool(job.pins.graphs) and job.device == "gpu"  # if not pinned, they are used only if memory is left
        passes = sized(job, size, precision=precision, path=path, recompute=mode)
        return memory_of(job, replace(passes, graphs=graphs))

    def fits(size: int, mode: Recompute) -> bool:
        return budget is None or needs(size, mode).gib <= budget

    # Per mode the largest size that fits; the first mode with a large enough micro-batch, else the largest of all.
    best = [(next((n for n in sizes if fits(n, mode)), 0), mode) for mode in modes]
    enough = min(THIN_TOKENS, sizes[0] * job.sequence_length)
    size, mode = next((b for b in best if b[0] * job.sequence_length >= enough), max(best, key=lambda b: b[0]))
    if size == 0:
        least = sizes[-1]
        memory = needs(least, modes[-1])
        raise UsageError(
            f"the model needs {memory.gib:.1f} GiB with micro-batch {least} and recomputation {modes[-1]}, but the "
            f"{job.pins.preset} preset may use {budget:.1f} of {job.usable_gib:.1f} GiB "
            f"(largest part: {memory.largest()}): "
            + _way_out(job, budget=budget or 0.0, precision=precision, path=path)
        )
    found = Fit(micro_batch=size, accumulation=job.rank_sequences // size, recompute=mode)
    return found, _reasons(job, found)


def _sizes(job: Job) -> Sequence[int]:
    """Micro-batches that divide the batch, up to the size that fills the device, largest first; or the pinned one."""
    pins, sequences = job.pins, job.rank_sequences
    if pins.micro_batch and pins.accumulation and pins.micro_batch * pins.accumulation != sequences:
        raise UsageError(
            f"plan.micro_batch {pins.micro_batch} x plan.accumulation {pins.accumulation} is not the "
            f"{sequences} sequences of a step on one rank: leave one of them out, and it follows from the other"
        )
    small = [n for n in range(1, math.isqrt(sequences) + 1) if sequences % n == 0]
    sizes = sorted({*small, *(sequences // n for n in small)}, reverse=True)
    pinned = pins.micro_batch or pins.accumulation
    if pinned is None:
        return [n for n in sizes if n * job.sequence_length <= full_tokens(job)] or [1]
    if sequences % pinned:
        name = "micro_batch" if pins.micro_batch else "accumulation"
        raise UsageError(
            f"plan.{name} {pinned} does not divide the {sequences} sequences of a step on one rank: "
            f"choose one of {', '.join(map(str, sorted(sizes)))}"
        )
    return [pins.micro_batch or sequences // pinned]


def _modes(job: Job, path: BlockPath) -> Sequence[Recompute]:
    """Recomputation modes, fastest first; or the pinned one."""
    if job.pins.recompute is not None:
        return [job.pins.recompute]
    # Fused kernels overwrite the tensors that selective recomputation keeps.
    # With adapters it would keep each projection twice, with and without its adapter.
    plain = path not in ("fused", "fp8") and not job.shape.foreign and job.adapters is None
    return ["none", "selective", "full"] if plain else ["none", "full"]


def _reasons(job: Job, found: Fit) -> dict[str, str]:
    size, passes, ranks = found.micro_batch, found.accumulation, job.num_ranks
    full = size * job.sequence_length >= full_tokens(job) or passes == 1
    why = {
        "micro_batch": "enough to fill the device" if full else "the largest that fits the memory or divides the batch",
        "accumulation": f"{size} x {passes} x {ranks} rank(s) = {size * passes * ranks} "
        f"sequences = {job.batch_tokens} tokens, exactly the requested batch",
        "recompute": {
            "none": "activations fit in memory",
            "selective": "to fit in memory, matmul outputs are kept and the rest is recomputed",
            "full": "only block inputs fit in memory; each block's forward pass runs twice",
        }[found.recompute],
    }
    return {
        name: reason if getattr(job.pins, name) is None else pin_reason(job.pins, name) for name, reason in why.items()
    }


def _way_out(job: Job, *, budget: float, precision: Precision, path: BlockPath) -> str:
    """The smallest change that would fit: first pins, then adapters where gradients are kept apart by task, then 4-bit
    frozen weights, then shorter sequences."""
    bases = [("", job)]
    if job.adapters is None and job.gradient_tasks and job.base is not None:
        bases.append(
            (
                f"lora.rank: {LORA_RANK}",
                replace(job, adapters=Adapters(rank=LORA_RANK, alpha=2 * LORA_RANK), reference=False),
            )
        )
    if job.adapters is not None and job.adapters.base_bits != 4:
        bases.append(("lora.base: 4-bit", replace(job, adapters=replace(job.adapters, base_bits=4))))
    whole = job.sequence_length
    lengths = [("", whole)]
    lengths += [
        (f"data.sequence_length: {n}", n) for n in (whole // 2, whole // 4) if n >= 128 and job.batch_tokens % n == 0
    ]
    for shorter, length in lengths:
        for smaller, other in bases:
            how: BlockPath = "eager" if smaller else path  # the fused segments do not support 4-bit weights
            tried = replace(other, sequence_length=length)
            needs = memory_of(tried, sized(tried, 1, precision=precision, path=how, recompute="full")).gib
            if needs <= budget:
                changes = (
                    " and ".join(filter(None, (smaller, shorter))) or "plan.micro_batch: 1 and plan.recompute: full"
                )
                return f"{changes} would fit ({needs:.1f} GiB, with full recomputation)"
    for ranks in (2, 4, 8, 16, 32, 64, 128, 256):
        sequences = job.batch_tokens // whole
        if ranks <= job.num_ranks or sequences % ranks or job.shape.foreign:
            continue
        tried = replace(job, num_ranks=ranks, pins=replace(job.pins, sharding="full"))
        needs = memory_of(tried, sized(tried, 1, precision=precision, path=path, recompute="full")).gib
        if needs <= budget:
            return f"sharded over {ranks} such devices it would fit ({needs:.1f} GiB each, with full recomputation)"
    return "a smaller model, shorter sequences or a larger device would fit"


# -- completions --------------------------------------------------------------------------------------------


def rows_at_once(job: Job, shape: ModelShape, *, precision: Precision) -> tuple[int | None, str]:
    """The number of concurrent sequences that fit beside the weights: a power of two, each with a full-length cache."""
    if job.rows is not None:
        return job.rows, PINNED
    total_gib, most = job.memory_gib, MOST_ROWS[job.device]
    if total_gib is None:
        return None, "the memory is unknown: the sampler decides"
    row_bytes = job.sequence_length * kv_cache_bytes_per_token(shape, precision=precision)
    weights_bytes = shape.num_parameters * BYTES[precision]
    budget_gib = MEMORY_BUDGET[job.pins.preset] * total_gib
    free_bytes = budget_gib * GIB - weights_bytes
    if free_bytes < row_bytes:
        raise UsageError(
            f"sampling needs {(weights_bytes + row_bytes) / GIB:.1f} GiB for the weights and one completion, and the "
            f"{job.pins.preset} preset may use {budget_gib:.1f} of {total_gib:.1f} "
            "GiB: a smaller rft.generator or a shorter data.sequence_length would fit"
        )
    rows = min(most, 1 << int(math.log2(free_bytes / row_bytes)))
    size = f"{weights_bytes / GIB:.1f} GiB of weights and {rows} x {row_bytes / 2**20:.0f} MiB of cache"
    sm = job.hardware.sm
    slow = "; slow generation: kernels and CUDA graphs need SM 8.0" if sm is not None and sm < (8, 0) else ""
    return rows, f"{size} in {total_gib:.1f} GiB" + ("; more would not be faster" if rows == most else "") + slow
