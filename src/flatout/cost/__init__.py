"""FLOPs and bytes of a decoder: what a model needs and what a device's peak allows.

The only place where MFU is defined. Two conventions, never mixed:

* *done*: the operations that are actually done. Causal attention counts half, frozen weights have no weight
  gradient, the embedding look-up is not a matmul. This is the headline MFU; with recomputation the repeated
  forward pass is added for HFU.
* *common*: 6 x matmul weights + 12 x layers x width x sequence length per token, the figure most projects
  report, printed next to the first so that numbers can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from flatout.cost.shape import (
    BYTES,
    NF4_BLOCK,
    NF4_BYTES,
    TARGETS,
    UNLIMITED,
    Adapters,
    ModelShape,
    RopeScaling,
    projections,
)

__all__ = [
    "BYTES",
    "NF4_BLOCK",
    "NF4_BYTES",
    "TARGETS",
    "UNLIMITED",
    "Adapters",
    "ModelShape",
    "RopeScaling",
    "projections",
]

GIB = 2**30
# Size of the buckets in which several ranks all-reduce their gradients.
BUCKET_BYTES = 32 << 20

# How a block runs: one operation at a time, compiled, by fused kernels, or by those with 8-bit matmuls.
BlockPath = Literal["eager", "compiled", "fused", "fp8"]


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Operations per trained token."""

    forward: float
    backward: float
    recomputed: float
    common: float
    attention: float = 0.0  # of forward and backward, the part that is attention
    critic: float = 0.0  # of a critic with a trunk of its own, counted as `common` is

    @property
    def done(self) -> float:
        """FLOPs that the model needs: the numerator of MFU."""
        return self.forward + self.backward

    @property
    def executed(self) -> float:
        """FLOPs that the device does, recomputation included: the numerator of HFU."""
        return self.done + self.recomputed


def flops_per_token(
    shape: ModelShape,
    *,
    sequence_length: int,
    mean_context: float | None = None,
    adapters: Adapters | None = None,
    recompute: str = "none",
) -> Flops:
    """Operations for one token of training.

    `mean_context` is how many positions a token attends to on average, if packed documents end inside a sequence;
    otherwise that of the shape counts, which a sliding window shortens. Frozen weights pass a gradient through but get
    none themselves. *Common* stays what others report, who count frozen weights as if they were trained.
    """
    context = shape.context(sequence_length)
    attention = 4 * shape.layers * shape.q_width * (context if mean_context is None else min(context, mean_context))
    linear = 2 * shape.matmul_weights
    blocks = 2 * shape.layers * shape.block_matmul_weights
    # In a bank a token needs one adapter; that the matmuls also multiply the columns of the others is not work done.
    low_rank = 0 if adapters is None else 2 * adapters.parameters_of_one(shape)
    return Flops(
        forward=linear + low_rank + attention,
        backward=(2 if adapters is None else 1) * linear + 2 * low_rank + 2 * attention,
        recomputed=blocks + low_rank + attention if recompute == "full" else 0.0,
        common=6 * shape.matmul_weights + 12 * shape.layers * shape.q_width * sequence_length,
        attention=3 * attention,
    )


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How much of the devices' peak was used, by each convention; `None` where the peak is not known."""

    mfu: float | None = None
    hfu: float | None = None
    mfu_common: float | None = None
    critic: float | None = None  # of a critic with a trunk of its own


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Turns the raw facts of a step, tokens and seconds, into shares of the peak."""

    flops: Flops
    peak_flops: float | None
    num_devices: int = 1
    precision: str | None = None  # that the peak is of
    peak_source: str | None = None  # "datasheet" or "measured"

    @property
    def peak_words(self) -> str:
        """The peak as people read it: 989 TFLOPS bf16 (datasheet)."""
        if not self.peak_flops:
            return "an unknown peak"
        count = f"{self.num_devices} x " if self.num_devices > 1 else ""
        words = f"{count}{self.peak_flops / 1e12:.3g} TFLOPS {self.precision or ''}".rstrip()
        return f"{words} ({self.peak_source})" if self.peak_source else words

    def shares(self, *, tokens: float, seconds: float) -> Shares:
        if not self.peak_flops or seconds <= 0:
            return Shares()
        per_flop = tokens / seconds / (self.peak_flops * self.num_devices)
        return Shares(
            mfu=self.flops.done * per_flop,
            hfu=self.flops.executed * per_flop,
            mfu_common=self.flops.common * per_flop,
            critic=self.flops.critic * per_flop or None,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Rates:
        return cls(**{**values, "flops": Flops(**values["flops"])})


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device at the peak of a step, by what holds them."""

    weights: float
    weight_copies: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float
    workspace: float
    # Of reinforcement learning: gradients kept apart by task, a critic with its own trunk, the initial weights.
    task_gradients: float = 0.0
    critic: float = 0.0
    reference: float = 0.0
    process: float = 0.0  # of a CPU: interpreter and libraries

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))

    @property
    def gib(self) -> float:
        return self.total / GIB

    def largest(self) -> str:
        """The biggest consumer and its size, for messages."""
        name, size = max(asdict(self).items(), key=lambda item: item[1])
        return f"{name.replace('_', ' ')} {size / GIB:.2f} GiB"


def activation_bytes(shape: ModelShape, *, precision: str, recompute: str, path: BlockPath) -> int:
    """Bytes kept for the backward pass per token and block, counted tensor by tensor and checked on an H200."""
    width = BYTES[precision]
    hidden, q, kv, ff = shape.hidden, shape.q_width, shape.kv_width, shape.intermediate
    if recompute == "full":
        return width * 2 * hidden
    # In fp32: the log-sum-exp of each head and the scales of the norms.
    beside = 4 * (shape.heads + 2)
    # The residual stream before each norm; the projection qkv; the attention's output; gate and up.
    kept = 2 * hidden + (q + 2 * kv) + q + 2 * ff
    if recompute == "none" and (shape.qk_norm or path in ("eager", "compiled")):
        # The rotated q and k, beside the projection that v is a view of.
        kept += q + kv
    if path == "fp8":
        # Both norms' outputs and the product of gate and up in 8 bits.
        return width * kept + 2 * hidden + ff + beside
    if recompute == "selective":
        return width * (kept + hidden) + beside
    kept += 2 * hidden + ff
    if path == "eager":
        # Additionally the norms' inputs in fp32, where those are copies, and silu(gate).
        kept += (0 if width == 4 else 2 * hidden) + ff
    return width * kept + beside


def training_memory(
    shape: ModelShape,
    *,
    micro_tokens: int,
    precision: str,
    recompute: str,
    path: BlockPath,
    loss_chunk: int,
    loss_rows: int | None = None,
    accumulation: int = 1,
    num_ranks: int = 1,
    adapters: Adapters | None = None,
    graphs: bool = False,
    sharded: bool = False,
) -> Memory:
    """Predicted peak of one rank with AdamW, trained weights and moments in fp32, frozen ones as they are.

    Gradients are held next to those of the next micro-batch, if there is one; with `graphs` always. The peak is in
    the loss, with all activations, one chunk of logits and the head's gradient, or in
    the backward pass of a block, whichever needs more. With `sharded` weights a rank holds its part of them, and whole
    ones of the two blocks that are being used and fetched, and outside the blocks; whole gradients only if several
    micro-batches are added up before they are reduced.
    """
    width = BYTES[precision]
    blocks = shape.layers * shape.block_matmul_weights
    head = shape.vocab * shape.hidden
    kept = shape.layers * activation_bytes(shape, precision=precision, recompute=recompute, path=path)
    # Outside the blocks: the loss's gradient of the hidden state and the last residual; rotary tables; ids.
    outside = 2 * width * shape.hidden + 4 * shape.head_dim + 24
    # Logits and their gradient, which a fused loss writes in their place. Eager holds fp32 copies as well: two beside
    # bf16 logits; one, and then the gradient, beside fp16 ones, which the softmax itself widens.
    eager = {"bf16": width + 8, "fp16": 2 * width + 4, "fp32": 2 * width + 8}[precision]
    per_logit = {"eager": eager, "compiled": 2 * width, "fused": width, "fp8": width + 2}[path]
    loss = min(loss_chunk, loss_rows or micro_tokens) * shape.vocab * per_logit
    loss += width * shape.hidden * micro_tokens
    backward = micro_tokens * width * (3 * shape.intermediate + 2 * shape.hidden)
    if recompute != "none":
        # The block whose backward runs has all its activations back.
        inner = activation_bytes(shape, precision=precision, recompute="none", path=path)
        fused = 3 * shape.intermediate if path in ("fused", "fp8") else 0  # gradients that its kernels write
        backward = micro_tokens * (inner - kept // shape.layers + width * (fused + 2 * shape.hidden))
    if adapters is not None:
        trained = adapters.num_parameters(shape)
        # The input of each pair of matrices is kept already; what lies between them is not.
        kept += (
            0 if recompute == "full" else width * shape.layers * adapters.count * adapters.rank * len(adapters.targets)
        )
        # The widest projection: rebuilt from 4 bits by way of indices and fp32, or laid beside its adapter.
        whole_base = adapters.base_bytes(shape, precision=precision)
        if sharded:
            whole_base = whole_base / num_ranks + width * (2 * shape.block_matmul_weights + (2 - shape.tied) * head)
        rebuilt = (6 if adapters.base_bits == 4 else width) * 2 * shape.intermediate * shape.hidden
        return Memory(
            weights=whole_base + 4 * trained,
            weight_copies=0 if width == 4 else 2 * width * trained,
            gradients=4 * trained + bucket_bytes(trained, num_ranks=num_ranks),
            optimizer=8 * trained,
            activations=micro_tokens * (kept + outside),
            temporary=max(loss, backward + rebuilt),
            workspace=64 * 2**20,
        )
    if sharded:
        block, outside_blocks = shape.block_matmul_weights, (2 - shape.tied) * head
        passing = micro_tokens * (kept + outside) + max(loss, backward)
        # Gradients arrive while activations go: those of the blocks divided, those outside them whole for a moment.
        arrived = 4 * shape.num_parameters / num_ranks + (width + 4) * outside_blocks
        return Memory(
            weights=4 * shape.num_parameters / num_ranks,
            weight_copies=width * (2 * block + outside_blocks),
            gradients=4 * shape.num_parameters if accumulation > 1 else max(0.0, arrived - passing),
            optimizer=8 * shape.num_parameters / num_ranks,
            activations=micro_tokens * (kept + outside),
            temporary=max(loss, backward),
            workspace=64 * 2**20,
        )
    return Memory(
        weights=4 * shape.num_parameters,
        # Casts to the compute type are kept for the backward pass, except where that recomputes them.
        weight_copies=0 if width == 4 else width * (2 * head + (blocks if recompute == "none" else 0)),
        gradients=4 * shape.num_parameters * (accumulation > 1 or graphs)
        + 4 * head
        + bucket_bytes(shape.num_parameters, num_ranks=num_ranks),
        optimizer=8 * shape.num_parameters,
        activations=micro_tokens * (kept + outside),
        temporary=max(loss, backward),
        workspace=64 * 2**20,
    )


def bucket_bytes(trained: int, *, num_ranks: int) -> int:
    """Where several ranks lay gradients end to end to sum them."""
    return min(BUCKET_BYTES, 4 * trained) if num_ranks > 1 else 0


def reduce_s(trained: int, *, num_ranks: int, link_bandwidth: float) -> float:
    """Seconds in which a ring of ranks sums its fp32 gradients.

    Each rank sends 2 (n - 1) / n of the bytes while it receives as many; the datasheet's figure is both directions.
    """
    return 2 * (num_ranks - 1) / num_ranks * 4 * trained / (link_bandwidth / 2)


def sharded_s(
    moved: int, *, trained: int, width: int, accumulation: int, num_ranks: int, link_bandwidth: float
) -> float:
    """Seconds in which ranks gather `moved` weights, in every forward and backward pass, and reduce gradients once."""
    share = (num_ranks - 1) / num_ranks
    return share * (2 * accumulation * width * moved + 4 * trained) / (link_bandwidth / 2)


def kv_cache_bytes_per_token(shape: ModelShape, *, precision: str) -> int:
    """Keys and values of one position over all blocks."""
    return 2 * shape.layers * shape.kv_width * BYTES[precision]


def checkpoint_bytes(shape: ModelShape, *, weights_only: bool, adapters: Adapters | None = None) -> int:
    """Size of one checkpoint on disk: what is trained, in fp32, and, unless left out, AdamW's two moments."""
    trained = shape.num_parameters if adapters is None else adapters.num_parameters(shape)
    return 4 * trained * (1 if weights_only else 3)


# Packed documents of at most this many tokens, with a power of two as head width, have their own attention kernel.
SHORT_DOCUMENT = 128

# What an H200 reached with this decoder, as shares of the datasheet; see docs/predictions.md.
MATMUL_SHARE: dict[BlockPath, float] = {"eager": 0.66, "compiled": 0.68, "fused": 0.70, "fp8": 0.67}
FP32_ATTENTION_SHARE = 0.06
BANDWIDTH_SHARE = 0.67
# Passes over the tensors of a block and over the logits: fused kernels read and write each few times, eager ones many.
BLOCK_PASSES: dict[BlockPath, float] = {"eager": 20, "compiled": 3, "fused": 2.4, "fp8": 3.3}
LOGIT_PASSES: dict[BlockPath, float] = {"eager": 12, "compiled": 4, "fused": 3.4, "fp8": 4.5}
# A second forward pass reads and writes half of what a block's two passes do.
RECOMPUTED_SHARE = 0.5
# Bytes that the update of a weight moves: itself, its gradient and both moments, and what clipping reads.
UPDATE_BYTES = 40
# And what its copies in 8 bits take then, by rows and by columns.
EIGHT_BYTES = 11
# Bytes by which the gradient of one micro-batch is added to that of those before.
ADDED_BYTES = 12
# The host's part of one block's forward and backward: with too few tokens in a micro-batch it is what takes time.
HOST_S: dict[BlockPath, float] = {"eager": 4.0e-3, "compiled": 2.4e-3, "fused": 2.3e-3, "fp8": 3.5e-3}
# The same with adapters in the fused segments; how much a second forward pass adds to it; and what is left of it where
# passes are recorded: kernels that begin and end, one after the other.
ADAPTED_HOST_S, RECOMPUTED_HOST_SHARE, RECORDED_SHARE = 7.0e-3, 0.9, 0.05
# Hosts differ, and one host varies from day to day: it may be slower than that by this factor.
SLOW_HOST = 1.25
# What adapters' narrow products leave of the matmuls' speed.
ADAPTED_SHARE = 0.86
# Attention over packed documents by the libraries' kernel takes at least as long as this many passes over its queries;
# over short ones, by ours, it takes as long as these.
VARLEN_PASSES, SHORT_PASSES = 52, 22


def attention_share(sequence_length: int, *, precision: str) -> float:
    """Attention's share of the peak: short sequences leave its kernels half empty."""
    if precision == "fp32":
        return FP32_ATTENTION_SHARE
    return 0.43 * sequence_length / (sequence_length + 1100)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted seconds of an optimizer step on one device, by what takes them."""

    device: float  # of a micro-batch's passes
    launches: float  # of the host, for those passes
    left: float  # of the launches, where passes are recorded
    update: float
    accumulation: int
    graphs: bool
    reduce: float = 0.0  # of summing gradients over ranks

    @property
    def seconds(self) -> float:
        passes = self.device + self.left if self.graphs else max(self.device, self.launches)
        return self.accumulation * passes + self.reduce + self.update

    @property
    def may_wait(self) -> bool:
        """Whether the device might wait for a host that launches kernels one by one."""
        return self.device < SLOW_HOST * self.launches


def step_time(
    shape: ModelShape,
    *,
    sequence_length: int,
    micro_tokens: int,
    accumulation: int,
    flops: Flops,
    precision: str,
    peak_flops: float,
    fp8_flops: float | None = None,
    bandwidth: float | None,
    path: BlockPath,
    adapters: Adapters | None = None,
    graphs: bool = False,
    documents: Literal["varlen", "short"] | None = None,
    num_ranks: int = 1,
    link_bandwidth: float | None = None,
    sharded: bool = False,
) -> StepTime:
    """What the device takes is four lanes that add up.

    Matmuls at a share of the peak, attention at a smaller one, element-wise traffic and what each micro-batch reads and
    writes of the weights at a share of the bandwidth. With `graphs` the host launches everything at once. `documents`
    are packed ones, by the kernel that takes them. Several ranks sum their gradients once, after the passes; an unknown
    link counts nothing.
    """
    trained = shape.num_parameters if adapters is None else adapters.num_parameters(shape)
    attention_flops = flops.attention
    matmul_flops = flops.executed - attention_flops
    matmul = matmul_flops / (MATMUL_SHARE[path] * peak_flops)
    if path == "fp8" and fp8_flops:
        # The attention's output projection stays in 16 bits.
        wide = 6 * shape.layers * shape.hidden * shape.q_width
        matmul = wide / (MATMUL_SHARE["fused"] * peak_flops) + (matmul_flops - wide) / (MATMUL_SHARE[path] * fp8_flops)
    attention = attention_flops / (attention_share(sequence_length, precision=precision) * peak_flops)
    again = flops.recomputed > 0
    traffic = weights = update = 0.0
    if bandwidth:
        per_byte = 1 / (BANDWIDTH_SHARE * bandwidth)
        width = BYTES[precision]
        block = BLOCK_PASSES[path] * width * (12 * shape.hidden + 3 * shape.intermediate)
        block *= 1 + RECOMPUTED_SHARE * again
        logits = LOGIT_PASSES[path] * width * shape.vocab
        traffic = (shape.layers * block + logits) * per_byte
        update = (UPDATE_BYTES * trained + (EIGHT_BYTES * shape.matmul_weights if path == "fp8" else 0)) * per_byte
        weights = weight_bytes(shape, width=width, path=path, again=again) * per_byte if adapters is None else 0.0
        weights += (accumulation > 1 or graphs) * ADDED_BYTES * trained * per_byte
        over_queries = shape.layers * width * shape.q_width * per_byte
        if documents == "varlen":
            attention = max(attention, VARLEN_PASSES * over_queries)
        elif documents == "short":
            attention = SHORT_PASSES * over_queries
    host = HOST_S[path]
    if adapters is not None and path == "fused":
        host, matmul = ADAPTED_HOST_S, matmul / ADAPTED_SHARE
    reduce = 0.0
    if link_bandwidth and sharded:
        # A part of it overlaps with the passes; how much was not measured, so that none is assumed to.
        learnt = trained if adapters is None else 0
        reduce = sharded_s(
            shape.num_parameters,
            trained=learnt,
            width=BYTES[precision],
            accumulation=accumulation,
            num_ranks=num_ranks,
            link_bandwidth=link_bandwidth,
        )
    elif link_bandwidth:
        reduce = reduce_s(trained, num_ranks=num_ranks, link_bandwidth=link_bandwidth)
    return StepTime(
        device=micro_tokens * (matmul + attention + traffic) + weights,
        launches=shape.layers * host * (1 + RECOMPUTED_HOST_SHARE * again),
        left=shape.layers * host * RECORDED_SHARE,
        update=update,
        accumulation=accumulation,
        graphs=graphs,
        reduce=reduce,
    )


# A decode step of flatout's sampler on an H200, by kernels and CUDA graphs: the kernels of a block one after the other,
# and the shares of the peak and of the bandwidth that its matmuls and its reads reach; see docs/predictions.md.
DECODE_BLOCK_S, DECODE_MATMUL_SHARE, DECODE_BANDWIDTH_SHARE = 31e-6, 0.30, 0.80


def decode_s(
    shape: ModelShape,
    *,
    rows: int,
    prompts: float,
    prompt_tokens: float,
    own_tokens: float,
    precision: str,
    peak_flops: float,
    bandwidth: float,
) -> float:
    """Seconds in which each of `rows` gets one more token. A prompt's keys and values are read once for its rows."""
    each = kv_cache_bytes_per_token(shape, precision=precision)
    cached = each * (prompts * prompt_tokens + rows * own_tokens)
    read = (BYTES[precision] * shape.matmul_weights + cached) / (DECODE_BANDWIDTH_SHARE * bandwidth)
    return shape.layers * DECODE_BLOCK_S + 2 * shape.matmul_weights * rows / (DECODE_MATMUL_SHARE * peak_flops) + read


def prefill_s(shape: ModelShape, *, tokens: float, peak_flops: float) -> float:
    """Seconds in which the keys and values of prompts are computed."""
    return 2 * shape.matmul_weights * tokens / (MATMUL_SHARE["fused"] * peak_flops)


# What very wide layers reach of a CPU's measured peak.
CPU_MATMUL_SHARE = 0.95
# By how much casts to 16 bits lengthen all but the matmuls, on a Xeon with bf16 units; see docs/predictions.md.
CPU_CASTS = 2.0


def cpu_share(hidden: int) -> float:
    """A CPU's share of its measured peak: the narrower the layers, the more of the time is not spent in matmuls."""
    return CPU_MATMUL_SHARE * hidden / (hidden + 200)


def cpu_step_time(
    shape: ModelShape,
    *,
    micro_tokens: int,
    accumulation: int,
    flops: Flops,
    peak_flops: float,
    fp32_flops: float | None = None,
) -> StepTime:
    """On a CPU one lane: operations at a share of the peak. Nothing is launched.

    In 16 bits the matmuls alone are faster than in fp32, whose peak is `fp32_flops`: the rest takes longer by casts.
    """
    matmuls = 1 / (CPU_MATMUL_SHARE * peak_flops)
    rest = 1 / cpu_share(shape.hidden) - 1 / CPU_MATMUL_SHARE
    rest = rest / peak_flops if fp32_flops in (None, peak_flops) else CPU_CASTS * rest / fp32_flops
    device = micro_tokens * flops.executed * (matmuls + rest)
    return StepTime(device=device, launches=0.0, left=0.0, update=0.0, accumulation=accumulation, graphs=False)


def weight_bytes(shape: ModelShape, *, width: int, path: BlockPath, again: bool) -> int:
    """What a micro-batch's passes move of weights that learn: copies in the compute type, and gradients in fp32.

    8-bit copies are made with the update; a second forward pass casts its blocks again.
    """
    cast = 0 if width == 4 or path == "fp8" else 4 + width
    blocks = shape.layers * shape.block_matmul_weights
    return (cast + 4) * shape.matmul_weights + (cast * blocks if again else 0)
