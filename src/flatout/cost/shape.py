"""The sizes of a decoder and its adapters, without building them. They are checked once, here.

A shape comes from a configuration, a model's config.json or a run folder; impossible sizes are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Literal

from flatout import limits
from flatout.errors import Unsupported, UsageError
from flatout.files import typed

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

# Fields of `ModelShape` that came after the first release.
_LATER = ("out_bias", "rope_scaling", "window", "full_layers", "foreign")
# What run folders call `foreign`.
_FOREIGN = "adapter"
# Positions of a model whose config.json names no limit.
UNLIMITED = limits.POSITIONS
# The largest accepted sizes of a decoder, from any source; the smallest is 1.
LARGEST = {
    "layers": limits.LAYERS,
    "hidden": limits.HIDDEN,
    "heads": limits.HEADS,
    "kv_heads": limits.HEADS,
    "head_dim": limits.HEAD_DIM,
    "intermediate": limits.INTERMEDIATE,
    "vocab": limits.VOCAB,
    "positions": UNLIMITED,
    "window": UNLIMITED,
}
LARGEST_BANK = 64


def _whole(value: Any, what: str, *, most: int, least: int = 1) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UsageError(f"{what} is {shown(value)}, and must be a whole number from {least} to {most}")
    return value


def _real(value: Any, what: str, *, least: float = 0.0, most: float = 1e30, above: bool = True) -> float:
    """A finite number above `least`, or from it on."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
    if not number or (above and value == least):
        raise UsageError(f"{what} is {shown(value)}, and must be a number {'above' if above else 'from'} {least:g}")
    return float(value)


def _flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{what} is {shown(value)}, and must be true or false")
    return value


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the rotary frequencies are scaled for longer texts, with the names of Hugging Face's config.json."""

    rope_type: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                _real(value, f"rope scaling's {name}", above=not name.startswith("mscale"))
        if self.rope_type == "llama3" and not (self.low_freq_factor or 0) < (self.high_freq_factor or 0):
            raise UsageError("rope scaling's low_freq_factor must be less than its high_freq_factor")

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any], *, positions: int) -> RopeScaling | None:
        """From `rope_scaling` or `rope_parameters`; None where nothing is stretched."""
        kind = _rope_kind(rope)
        if kind == "default":
            return None
        known = {f.name for f in fields(cls)} - {"rope_type"}
        values = {name: value for name, value in rope.items() if name in known and value is not None}
        original = values.get("original_max_position_embeddings")
        if kind == "yarn" and "factor" not in values and original is not None:
            values["factor"] = positions / _whole(original, "original_max_position_embeddings", most=UNLIMITED)
        needed = {"factor": values.get("factor")}
        if kind == "llama3":
            needed |= {name: values.get(name) for name in ("low_freq_factor", "high_freq_factor")}
        if missing := [name for name, value in needed.items() if value is None]:
            raise UsageError(f"the model's config.json asks for {kind} rope scaling but lacks {', '.join(missing)}")
        if kind != "linear":
            values.setdefault("original_max_position_embeddings", positions)
        return typed(cls, {**values, "rope_type": kind}, source="rope scaling of the model's config.json")


def _rope_kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type") or rope.get("type") or "default"


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
    out_bias: bool = False
    rope_scaling: RopeScaling | None = None
    # A token attends to this many tokens, itself included, in all layers but the first `full_layers`.
    window: int | None = None
    full_layers: int = 0
    # Why our decoder cannot run the model, which then runs as transformers builds it; the numbers are its nearest.
    foreign: str = ""

    def __post_init__(self) -> None:
        """Checks the sizes from any source: config.json, a run folder, a configuration."""
        scaling: Any = self.rope_scaling
        if isinstance(scaling, Mapping):  # as a run folder's JSON has it
            object.__setattr__(
                self, "rope_scaling", typed(RopeScaling, dict(scaling), source="the model's rope scaling")
            )
        for name, most in LARGEST.items():
            if (value := getattr(self, name)) is not None or name not in _LATER:
                _whole(value, f"the model's {name}", most=most)
        _whole(self.full_layers, "the model's full_layers", most=self.layers, least=0)
        for name in ("tied", "qk_norm", "qkv_bias", "out_bias"):
            _flag(getattr(self, name), f"the model's {name}")
        _real(self.rope_theta, "the model's rope_theta", least=1.0 if self.rope_scaling else 0.0)
        _real(self.norm_eps, "the model's norm_eps", most=1.0)
        if not isinstance(self.foreign, str):
            raise UsageError(f"the model's foreign is {shown(self.foreign)}, and must be text")
        if not self.foreign and (self.heads % self.kv_heads or self.head_dim % 2):
            raise UsageError(
                f"a model of {self.heads} heads of width {self.head_dim} with {self.kv_heads} key and value heads "
                "cannot be built: key and value heads divide the heads, and rotary embeddings need an even width"
            )

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
        block += self.hidden if self.out_bias else 0
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * block + tables + self.hidden

    def context(self, length: int) -> float:
        """How many positions a token of a causal sequence of this length attends to, on average over all layers."""
        full = (length + 1) / 2
        if self.window is None or self.window >= length:
            return full
        within = self.window - self.window * (self.window - 1) / (2 * length)
        return (self.full_layers * full + (self.layers - self.full_layers) * within) / self.layers

    def to_json(self) -> dict[str, Any]:
        """What came later is left out where it says nothing, so that older runs keep their identity."""
        values = asdict(self) | {"rope_scaling": self.rope_scaling and self.rope_scaling.to_json()}
        said = {name: value for name, value in values.items() if value or name not in _LATER}
        if self.window is not None and not self.full_layers:  # as version 0.1 wrote it, which had no windows
            said |= {"positions": min(self.window, self.positions), "max_positions": self.positions}
        # Under the name it has had in run folders from the start: checkpoints are identified by it.
        return said | ({_FOREIGN: said.pop("foreign")} if "foreign" in said else {})

    @classmethod
    def from_json(cls, values: Any, *, source: Path | str) -> ModelShape:
        """Read back `to_json`."""
        if isinstance(values, Mapping) and _FOREIGN in values:
            values = {"foreign" if name == _FOREIGN else name: value for name, value in values.items()}
        if isinstance(values, Mapping) and "max_positions" in values:
            rest = {name: value for name, value in values.items() if name != "max_positions"}
            values = rest | {"positions": values["max_positions"]}
        return typed(cls, values, source=source)

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """The shape of any causal model: our decoder's, or the nearest to a foreign model."""
        try:
            return cls.from_hf(config)
        except Unsupported as refusal:
            return cls.nearest(config, why=str(refusal))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelShape:
        """The shape of a Hugging Face `config.json`; features that our decoder lacks are refused by name."""
        kind = config.get("model_type")
        if kind not in ("llama", "mistral", "qwen2", "qwen3"):
            raise Unsupported(
                f"model_type {shown(kind)} is not one of llama, mistral, qwen2, qwen3, which this decoder can run"
            )
        rope = {**_part(config, "rope_scaling"), **_part(config, "rope_parameters")}
        scaling = _rope_kind(rope)
        turned = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        act = config.get("hidden_act", "silu")
        refused = {
            f"{scaling if isinstance(scaling, str) else shown(scaling)} rope scaling": scaling
            not in ("default", "linear", "llama3", "yarn"),
            f"partial_rotary_factor {shown(turned)}": turned not in (None, 1.0),
            "mlp_bias": bool(config.get("mlp_bias")),
            f"hidden_act {shown(act)}": act not in ("silu", "swish"),
        }
        if found := [name for name, present in refused.items() if present]:
            raise Unsupported(f"the model's config.json asks for {', '.join(found)}, which this decoder lacks")
        _require(config, "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
        heads, hidden = _size(config, "num_attention_heads", "heads"), _size(config, "hidden_size", "hidden")
        positions = _size(config, "max_position_embeddings", "positions", 2048)
        window, full_layers = _window(config)
        biased = _said(config, "attention_bias") and kind in ("llama", "qwen3")
        theta = next((one for one in (rope.get("rope_theta"), config.get("rope_theta")) if one is not None), 10000.0)
        return cls(
            layers=_size(config, "num_hidden_layers", "layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=_size(config, "num_key_value_heads", "kv_heads", heads),
            head_dim=_size(config, "head_dim", "head_dim", 128 if kind == "qwen3" else hidden // heads),
            intermediate=_size(config, "intermediate_size", "intermediate"),
            vocab=_size(config, "vocab_size", "vocab"),
            positions=positions,
            tied=_said(config, "tie_word_embeddings"),
            qk_norm=kind == "qwen3",
            qkv_bias=kind == "qwen2" or biased,
            out_bias=biased,
            rope_theta=_real(theta, "config.json: rope_theta"),
            norm_eps=_real(config.get("rms_norm_eps", 1e-6), "config.json: rms_norm_eps", most=1.0),
            rope_scaling=RopeScaling.from_hf(rope, positions=positions),
            window=window,
            full_layers=full_layers,
        )

    @classmethod
    def nearest(cls, config: Mapping[str, Any], *, why: str) -> ModelShape:
        """The shape of our decoder that is closest to another model: for estimates, not for building it."""
        text = _part(config, "text_config") or config
        heads = _first(text, "heads", "num_attention_heads", "n_head", "n_heads")
        hidden = _first(text, "hidden", "hidden_size", "n_embd", "d_model", "dim")
        layers = _first(text, "layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
        vocab = _first(text, "vocab", "vocab_size")
        if heads is None or hidden is None or layers is None or vocab is None:
            sizes = {"layers": layers, "width": hidden, "heads": heads, "vocabulary": vocab}
            missing = ", no ".join(name for name, size in sizes.items() if size is None)
            raise UsageError(f"{why}; and its config.json has no {missing}, which the plan needs")
        inner = _first(text, "intermediate", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=_first(text, "kv_heads", "num_key_value_heads") or heads,
            head_dim=_first(text, "head_dim", "head_dim") or max(1, hidden // heads),
            intermediate=inner or 4 * hidden,
            vocab=vocab,
            positions=_first(text, "positions", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
            or UNLIMITED,
            tied=_said(config, "tie_word_embeddings", True),
            foreign=why,
        )


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object inside config.json; nothing where it is left out."""
    part = config.get(name)
    if part is not None and not isinstance(part, Mapping):
        raise UsageError(f"config.json: {name} is {shown(part)}, and must be an object")
    return part or {}


def _size(config: Mapping[str, Any], name: str, ours: str, default: int | None = None) -> int:
    value = default if config.get(name) is None else config[name]
    return _whole(value, f"config.json: {name}", most=LARGEST[ours], least=0 if ours == "window" else 1)


def _said(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = config.get(name)
    return default if value is None else _flag(value, f"config.json: {name}")


def _first(config: Mapping[str, Any], ours: str, *names: str) -> int | None:
    """The first of these keys that holds a number."""
    found = [name for name in names if isinstance(config.get(name), (int, float))]
    return _size(config, found[0], ours) if found else None


def _require(config: Mapping[str, Any], *names: str) -> None:
    if missing := [name for name in names if config.get(name) is None]:
        raise UsageError(f"the model's config.json lacks {', '.join(missing)}, which its shape needs")


def _window(config: Mapping[str, Any]) -> tuple[int | None, int]:
    """The sliding window, if there is one, and how many of the first layers have none."""
    layers = _size(config, "num_hidden_layers", "layers")
    if config.get("model_type") == "mistral":
        return _size({"sliding_window": 4096, **config}, "sliding_window", "window", 0) or None, 0
    slides = config.get("model_type") in ("qwen2", "qwen3") and config.get("use_sliding_window")
    if not slides or not config.get("sliding_window"):
        return None, 0
    full = _size(config, "max_window_layers", "window", 28)  # the default of transformers
    if isinstance(kinds := config.get("layer_types"), list):
        full = kinds.count("full_attention")
        if kinds != ["full_attention"] * full + ["sliding_attention"] * (layers - full):
            raise Unsupported(
                "the model's config.json asks for layers with a sliding window before others without one, which this "
                "decoder lacks"
            )
    return (_size(config, "sliding_window", "window"), full) if full < layers else (None, 0)


# What an adapter may sit on, in the order in which fused projections stack them.
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
# Bytes of a weight in 4 bits: two to a byte, and an fp32 scale for each block of 64.
NF4_BLOCK = 64
NF4_BYTES = 0.5 + 4 / NF4_BLOCK


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Low-rank adapters on frozen weights (LoRA): what is trained, and how the rest is held."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS
    dropout: float = 0.0
    rslora: bool = False
    base_bits: int = 16
    names: tuple[str, ...] = ()  # of the adapters of a bank, all on one base; none: a single adapter

    def __post_init__(self) -> None:
        if len(self.names) > LARGEST_BANK or len(set(self.names)) < len(self.names):
            raise UsageError(f"the adapters' names are {shown(self.names)}: at most {LARGEST_BANK}, each once")
        _whole(self.rank, "the adapters' rank", most=limits.RANK)
        _real(self.alpha, "the adapters' alpha")
        _real(self.dropout, "the adapters' dropout", most=math.nextafter(1.0, 0.0), above=False)
        _flag(self.rslora, "the adapters' rslora")
        if self.base_bits not in (4, 16):
            raise UsageError(f"the adapters' base_bits is {shown(self.base_bits)}, and must be 4 or 16")
        if not self.targets or not all(name in TARGETS for name in self.targets):
            raise UsageError(
                f"the adapters' targets are {shown(self.targets)}, and must be some of {', '.join(TARGETS)}"
            )

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def count(self) -> int:
        return len(self.names) or 1

    def num_parameters(self, shape: ModelShape) -> int:
        """Of all adapters of a bank."""
        return self.count * self.parameters_of_one(shape)

    def parameters_of_one(self, shape: ModelShape) -> int:
        widths = projections(shape)
        return shape.layers * self.rank * sum(sum(widths[name]) for name in self.targets)

    def base_bytes(self, shape: ModelShape, *, precision: str) -> float:
        """The frozen weights: the blocks' matrices in 4 bits or in the compute type, as all the rest is."""
        blocks = shape.layers * shape.block_matmul_weights
        each = NF4_BYTES if self.base_bits == 4 else BYTES[precision]
        return each * blocks + BYTES[precision] * (shape.num_parameters - blocks)


def projections(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Input and output width of each target."""
    hidden, q, kv, ff = shape.hidden, shape.q_width, shape.kv_width, shape.intermediate
    outputs = {"q": q, "k": kv, "v": kv, "o": hidden, "gate": ff, "up": ff, "down": hidden}
    inputs = {"o": q, "down": ff}
    return {name: (inputs.get(name, hidden), outputs[name]) for name in TARGETS}
