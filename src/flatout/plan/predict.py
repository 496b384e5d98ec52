"""Predicts the memory, the time and the MFU of a job."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from flatout.config.settings import Precision, Recompute
from flatout.cost import (
    BYTES,
    GIB,
    BlockPath,
    Memory,
    Rates,
    StepTime,
    checkpoint_bytes,
    cpu_step_time,
    step_time,
    training_memory,
)
from flatout.plan.decisions import Decisions
from flatout.plan.job import Job, rounded_up

# A micro-batch of this many tokens fills the device; a larger one only costs memory.
FULL_TOKENS = {"gpu": 65536, "cpu": 4096}
# The same with adapters on 16-bit weights: 22,528 tokens were as fast as 65,536 on an H200 with CUDA graphs.
FULL_TOKENS_ADAPTED = 32768
LOSS_ROWS = {"gpu": 8192, "cpu": 2048}
# CUDA graphs are used only if the predicted peak is at most this share of the device's memory.
GRAPHS_SHARE = 0.5
# Seconds that compilation adds to the first step, measured on an H200's host.
COMPILE_S = 40.0


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How the forward and backward passes run. Memory and time depend on this and on the job."""

    micro_tokens: int
    accumulation: int
    precision: Precision
    path: BlockPath
    recompute: Recompute = "none"
    graphs: bool = False
    tf32: bool = True
    # The kernel for packed documents, if there is one.
    documents: Literal["varlen", "short"] | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    peak_gib: float
    memory_gib: Mapping[str, float]
    tokens_per_s: float | None
    step_s: float | None
    mfu: float | None
    mfu_common: float | None
    hours: float | None
    checkpoint_gib: float
    # Of reinforcement learning: the parts of a step, None with a reason where unknown; MFU of each update, as common.
    parts_s: Mapping[str, float | None] = field(default_factory=dict)
    parts_unknown: Mapping[str, str] = field(default_factory=dict)
    actor_mfu: float | None = None
    critic_mfu: float | None = None
    # Why speed is not predicted, and what the memory does not include; None: nothing is missing.
    unknown: str | None = None
    left_out: str | None = None


def predict(job: Job, decisions: Decisions) -> Prediction:
    passes = decided(job, decisions)
    memory, time = memory_of(job, passes), time_of(job, passes)
    unknown = _unknown(job, passes)
    seconds = time.seconds if time is not None and unknown is None else None
    shares = rates_of(job, passes).shares(tokens=job.batch_tokens, seconds=seconds or 0.0)
    return Prediction(
        peak_gib=memory.gib,
        memory_gib={name: size / GIB for name, size in asdict(memory).items()},
        tokens_per_s=job.batch_tokens / seconds if seconds else None,
        step_s=seconds,
        mfu=shares.mfu,
        mfu_common=shares.mfu_common,
        hours=seconds * job.steps / 3600 if seconds and job.steps else None,
        checkpoint_gib=checkpoint_bytes(job.shape, weights_only=job.weights_only, adapters=job.adapters) / GIB,
        unknown=unknown,
        left_out=None if job.device == "gpu" or memory.process else "the process itself, interpreter and libraries",
    )


def _unknown(job: Job, passes: Passes) -> str | None:
    """Why the speed cannot be predicted, or None."""
    if job.shape.foreign:
        return "the FLOPs of a model that transformers runs are unknown"
    if not peak_of(job, passes) and job.device == "cpu":
        return "the peak of this CPU was not measured yet: `flatout plan` without --on does it once; it needs torch"
    if not peak_of(job, passes):
        return f"the {name_of_peak(passes)} peak of this GPU is not in the table of known ones"
    if job.num_ranks > 1 and _link_bandwidth(job) is None:
        return "the bandwidth between the ranks is unknown"
    return None


def decided(job: Job, decisions: Decisions) -> Passes:
    """The passes of a step according to the decisions."""
    return Passes(
        micro_tokens=decisions.micro_batch * job.sequence_length,
        accumulation=decisions.accumulation,
        precision=decisions.precision,
        path=path_of(
            fused=decisions.fused_qkv and decisions.fused_mlp and decisions.fused_loss,
            fp8=decisions.fp8,
            compiled=decisions.compile != "none",
        ),
        recompute=decisions.recompute,
        graphs=decisions.graphs,
        tf32=decisions.tf32,
        documents=documents_of(job, decisions.attention),
    )


def sized(job: Job, micro_batch: int, *, precision: Precision, path: BlockPath, recompute: Recompute) -> Passes:
    """The passes with a given micro-batch."""
    return Passes(
        micro_tokens=micro_batch * job.sequence_length,
        accumulation=max(1, job.rank_sequences // micro_batch),
        precision=precision,
        path=path,
        recompute=recompute,
    )


def path_of(*, fused: bool, fp8: bool, compiled: bool) -> BlockPath:
    """The block path whose costs `cost` counts."""
    if fused:
        return "fp8" if fp8 else "fused"
    return "compiled" if compiled else "eager"


def documents_of(job: Job, attention: str) -> Literal["varlen", "short"] | None:
    """The kernel that processes packed documents, or None."""
    if job.packing != "documents":
        return None
    return "short" if attention == "short" else "varlen" if attention == "flash" else None


# -- memory -------------------------------------------------------------------------------------------------


def memory_of(job: Job, passes: Passes) -> Memory:
    """The predicted peak memory of one rank."""
    micro_tokens = passes.micro_tokens
    memory = training_memory(
        job.shape,
        micro_tokens=micro_tokens,
        precision=passes.precision,
        recompute=passes.recompute,
        path=passes.path,
        loss_chunk=job.pins.loss_chunk or loss_chunk(job, micro_tokens),
        # Rounded up to sixteenths, as in the batch layout.
        loss_rows=None if job.trained_share is None else math.ceil(16 * job.trained_share) * micro_tokens // 16,
        accumulation=passes.accumulation,
        num_ranks=job.num_ranks,
        adapters=job.adapters,
        graphs=passes.graphs,
        sharded=job.is_sharded,
    )
    trained = job.shape.num_parameters if job.adapters is None else job.adapters.num_parameters(job.shape)
    process_gib = job.hardware.process_gib if job.device == "cpu" else None
    return replace(
        memory,
        # Beside the combined gradient, each in fp32.
        task_gradients=4 * trained * job.gradient_tasks / (job.num_ranks if job.is_sharded else 1),
        # A second model that is trained in the same step.
        critic=memory.total - memory.temporary - memory.workspace if job.own_critic else 0.0,
        reference=job.shape.num_parameters * BYTES[passes.precision] if job.reference else 0.0,
        process=(process_gib or 0.0) * GIB,
    )


def loss_chunk(job: Job, micro_tokens: int) -> int:
    """Rows of logits per chunk: equal parts of a micro-batch, in multiples that FP8 matmuls and tiles need."""
    chunks = math.ceil(micro_tokens / LOSS_ROWS[job.device])
    return min(micro_tokens, rounded_up(math.ceil(micro_tokens / chunks), 128))


def leaves_room(job: Job, passes: Passes) -> bool:
    """Whether enough memory is left for CUDA graphs."""
    total_gib = job.usable_gib
    return total_gib is not None and memory_of(job, replace(passes, graphs=True)).gib <= GRAPHS_SHARE * total_gib


# -- time ---------------------------------------------------------------------------------------------------


def rates_of(job: Job, passes: Passes) -> Rates:
    return Rates(
        flops=job.flops(passes.recompute),
        peak_flops=peak_of(job, passes),
        num_devices=job.num_ranks,
        precision=name_of_peak(passes),
        peak_source=job.hardware.peak_source,
    )


def peak_of(job: Job, passes: Passes) -> float | None:
    """The device's peak for the precision that the matmuls use; None for a model whose FLOPs are unknown."""
    return None if job.shape.foreign else job.hardware.peak_flops.get(name_of_peak(passes))


def name_of_peak(passes: Passes) -> str:
    return "tf32" if passes.precision == "fp32" and passes.tf32 else passes.precision


def time_of(job: Job, passes: Passes) -> StepTime | None:
    """The predicted time of a step; None if the device's peak is unknown."""
    peak = peak_of(job, passes)
    if not peak:
        return None
    if job.device == "cpu":
        return cpu_step_time(
            job.shape,
            micro_tokens=passes.micro_tokens,
            accumulation=passes.accumulation,
            flops=job.flops(passes.recompute),
            peak_flops=peak,
            fp32_flops=job.hardware.peak_flops.get("fp32"),
        )
    return step_time(
        job.shape,
        sequence_length=job.sequence_length,
        micro_tokens=passes.micro_tokens,
        accumulation=passes.accumulation,
        flops=job.flops(passes.recompute),
        precision=passes.precision,
        peak_flops=peak,
        fp8_flops=job.hardware.peak_flops.get("fp8"),
        bandwidth=job.hardware.bandwidth,
        path=passes.path,
        adapters=job.adapters,
        graphs=passes.graphs,
        documents=passes.documents,
        num_ranks=job.num_ranks,
        link_bandwidth=_link_bandwidth(job),
        sharded=job.is_sharded,
    )


def _link_bandwidth(job: Job) -> float | None:
    """The bandwidth between ranks; None if it is unknown, as between machines, or if there is one rank."""
    return job.hardware.link_bandwidth if 1 < job.num_ranks <= job.hardware.num_gpus else None


def full_tokens(job: Job) -> int:
    """The number of tokens in a micro-batch that fills the device."""
    adapted = job.device == "gpu" and job.adapters is not None and job.adapters.base_bits == 16
    return FULL_TOKENS_ADAPTED if adapted else FULL_TOKENS[job.device]


def full_step_s(job: Job, *, precision: Precision, path: BlockPath) -> float | None:
    """The predicted seconds of a step with micro-batches that fill the device, if the batch is large enough.

    If it is not, CUDA graphs are assumed wherever they are possible.
    """
    tokens = job.rank_sequences * job.sequence_length
    micro_tokens = min(tokens, full_tokens(job))
    accumulation = max(1, tokens // micro_tokens)
    passes = Passes(micro_tokens=micro_tokens, accumulation=accumulation, precision=precision, path=path)
    time = time_of(job, passes)
    unpinned = job.pins.graphs is not False and job.pins.compile in (None, "none")
    if time is not None and time.may_wait and path in ("fused", "fp8") and unpinned:
        size = max(1, job.rank_sequences // accumulation)
        fits = leaves_room(job, sized(job, size, precision=precision, path=path, recompute="none"))
        time = time_of(job, replace(passes, graphs=fits))
    return None if time is None else time.seconds


def compile_break_even(job: Job, *, precision: Precision, compile_s: float = COMPILE_S) -> int | None:
    """The step at which compiling pays off by the predicted saving; None if nothing can be predicted."""
    eager = full_step_s(job, precision=precision, path="eager")
    compiled = full_step_s(job, precision=precision, path="compiled")
    if eager is None or compiled is None or eager <= compiled:
        return None
    return math.ceil(compile_s / (eager - compiled))
