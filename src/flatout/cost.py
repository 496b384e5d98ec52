"""FLOPs and bytes of a decoder: the arithmetic between what a model asks for and what a device promises.

The only place where MFU is defined. Two conventions, never mixed:

* *done*: the operations as they are done. Causal attention counts half, frozen weights have no weight
  gradient, the embedding look-up is no matmul. This is the headline MFU; with recomputation the repeated
  forward is added for HFU.
* *common*: 6 x matmul weights + 12 x layers x width x sequence length per token, the figure most projects
  report, printed beside the first so that numbers can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flatout.errors import UsageError

GIB = 2**30
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Everything about a decoder that can be known without building it."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    positions: int
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def block_matmul_weights(self) -> int:
        """Weights that multiply, of one block."""
        attention = self.hidden * (self.q_width + 2 * self.kv_width) + self.q_width * self.hidden
        return attention + 3 * self.hidden * self.intermediate

    @property
    def matmul_weights(self) -> int:
        """Weights that multiply: every block and the head (a tied embedding multiplies as the head)."""
        return self.layers * self.block_matmul_weights + self.vocab * self.hidden

    @property
    def num_parameters(self) -> int:
        block = self.block_matmul_weights + 2 * self.hidden
        block += 2 * self.head_dim if self.qk_norm else 0
        block += self.q_width + 2 * self.kv_width if self.qkv_bias else 0
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * block + tables + self.hidden

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelShape:
        """The shape behind a Hugging Face `config.json`; what our decoder cannot do is refused by name."""
        kind = config.get("model_type")
        if kind not in ("llama", "mistral", "qwen2", "qwen3"):
            raise UsageError(
                f"model_type {kind!r} is not one of llama, mistral, qwen2, qwen3, which this decoder can run"
            )
        rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        refused = {
            "rope scaling": rope.get("rope_type", rope.get("type", "default")) not in ("default", None),
            "sliding-window attention": bool(config.get("sliding_window"))
            and config.get("use_sliding_window", kind == "mistral"),
            "mlp_bias": bool(config.get("mlp_bias")),
            "attention_bias on the output projection": bool(config.get("attention_bias")),
            f"hidden_act {config.get('hidden_act')!r}": config.get("hidden_act", "silu") not in ("silu", "swish"),
        }
        if found := [name for name, present in refused.items() if present]:
            raise UsageError(f"the model's config.json asks for {', '.join(found)}, which this decoder lacks")
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return cls(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            positions=int(config.get("max_position_embeddings") or 2048),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=kind == "qwen3",
            qkv_bias=kind == "qwen2",
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        )


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Operations per trained token."""

    forward: float
    backward: float
    recomputed: float
    common: float

    @property
    def done(self) -> float:
        """What the model asks for: the numerator of MFU."""
        return self.forward + self.backward

    @property
    def executed(self) -> float:
        """What the device does, recomputation included: the numerator of HFU."""
        return self.done + self.recomputed


def flops_per_token(
    shape: ModelShape,
    *,
    sequence_length: int,
    mean_context: float | None = None,
    frozen: bool = False,
    recompute: str = "none",
) -> Flops:
    """Operations for one token of training.

    `mean_context` is how many positions a token attends to on average: (T + 1) / 2 in a causal sequence of T,
    less when packed documents end inside it. Frozen weights pass a gradient through but get none themselves.
    """
    context = (sequence_length + 1) / 2 if mean_context is None else mean_context
    attention = 4 * shape.layers * shape.q_width * context
    linear = 2 * shape.matmul_weights
    blocks = 2 * shape.layers * shape.block_matmul_weights
    return Flops(
        forward=linear + attention,
        backward=(1 if frozen else 2) * linear + 2 * attention,
        recomputed=blocks + attention if recompute == "full" else 0.0,
        common=6 * shape.matmul_weights + 12 * shape.layers * shape.q_width * sequence_length,
    )


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How much of the devices' peak was used, by each convention; `None` where the peak is not known."""

    mfu: float | None = None
    hfu: float | None = None
    mfu_common: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Turns the raw facts of a step, tokens and seconds, into shares of the peak."""

    flops: Flops
    peak_flops: float | None
    num_devices: int = 1

    def shares(self, *, tokens: float, seconds: float) -> Shares:
        if not self.peak_flops or seconds <= 0:
            return Shares()
        per_flop = tokens / seconds / (self.peak_flops * self.num_devices)
        return Shares(
            mfu=self.flops.done * per_flop,
            hfu=self.flops.executed * per_flop,
            mfu_common=self.flops.common * per_flop,
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
    logits: float
    workspace: float

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


def activation_width(shape: ModelShape, *, recompute: str, compiled: bool) -> float:
    """Values kept for the backward pass per token and block, in the compute type.

    Compiled blocks keep the residual stream before each norm, q, k, v, the attention output and gate/up; the
    norms and the activation are recomputed from those inside the fused backward kernels. Eager blocks keep every
    intermediate that an operation's backward reads.
    """
    residual, qkv = shape.hidden, shape.q_width + 2 * shape.kv_width
    if recompute == "full":
        return 2 * residual
    kept = 2 * residual + qkv + shape.q_width + 2 * shape.intermediate
    if compiled or recompute == "selective":
        return kept
    # Eager, additionally: both norms' outputs, rotated q and k, sigmoid(gate), silu(gate) and the product.
    return kept + 2 * residual + (shape.q_width + shape.kv_width) + 2 * shape.intermediate


def training_memory(
    shape: ModelShape,
    *,
    micro_tokens: int,
    precision: str,
    recompute: str,
    compiled: bool,
    loss_chunk: int,
    accumulation: int = 1,
) -> Memory:
    """Predicted peak for replicated weights and AdamW, weights and moments in fp32."""
    width = BYTES[precision]
    parameters = shape.num_parameters
    rows = min(loss_chunk, micro_tokens)
    block = activation_width(shape, recompute=recompute, compiled=compiled) * width
    # Row statistics in fp32: log-sum-exp of each head, the two norms' scales.
    block += 4 * (shape.heads + 2)
    activations = shape.layers * micro_tokens * block
    if recompute != "none":
        # While a block's backward runs, its own activations are all there again.
        inner = activation_width(shape, recompute="none", compiled=compiled) * width
        activations += micro_tokens * max(inner - block, 0)
    # Outside the blocks: the last residual and its norm, the loss's gradient of it, rotary tables, token ids.
    activations += micro_tokens * (4 * shape.hidden * width + 4 * shape.head_dim + 4 * 8)
    return Memory(
        weights=4 * parameters,
        weight_copies=0 if width == 4 else width * shape.matmul_weights,
        gradients=4 * (parameters if accumulation > 1 else shape.vocab * shape.hidden),
        optimizer=8 * parameters,
        activations=activations,
        logits=rows * shape.vocab * (width + width) + 4 * shape.vocab * shape.hidden,
        workspace=32 * 2**20,
    )


def kv_cache_bytes_per_token(shape: ModelShape, *, precision: str) -> int:
    """Keys and values of one position over all blocks."""
    return 2 * shape.layers * shape.kv_width * BYTES[precision]


def checkpoint_bytes(shape: ModelShape, *, weights_only: bool) -> int:
    """Size of one checkpoint on disk: fp32 weights and, unless left out, AdamW's two moments."""
    return 4 * shape.num_parameters * (1 if weights_only else 3)


# What an H200 reached with this decoder, as shares of the datasheet; see docs/predictions.md.
MATMUL_SHARE = 0.66
ATTENTION_SHARE = 0.24
BANDWIDTH_SHARE = 0.7


def step_seconds(
    shape: ModelShape,
    *,
    tokens: int,
    sequence_length: int,
    flops: Flops,
    precision: str,
    peak_flops: float,
    bandwidth: float | None,
    compiled: bool,
) -> float:
    """Predicted seconds of one optimizer step of `tokens` on one device, from three lanes that add up.

    Matmuls at a share of the peak, attention at a smaller one, element-wise traffic at a share of the bandwidth.
    """
    attention_flops = 3 * 4 * shape.layers * shape.q_width * (sequence_length + 1) / 2
    matmul = (flops.executed - attention_flops) * tokens / (MATMUL_SHARE * peak_flops)
    attention = attention_flops * tokens / (ATTENTION_SHARE * peak_flops)
    if not bandwidth:
        return matmul + attention
    width = BYTES[precision]
    passes = 3 if compiled else 8
    block = passes * width * (12 * shape.hidden + 3 * shape.intermediate)
    logits = (4 if compiled else 10) * width * shape.vocab
    traffic = tokens * (shape.layers * block + logits) + 28 * shape.num_parameters
    return matmul + attention + traffic / (BANDWIDTH_SHARE * bandwidth)
