"""Decides how a run uses its hardware: every decision with its reason, and a prediction to hold it to.

Needs no torch and no device, so `flatout plan --on A100-80GBx8` works on a laptop; `flatout train` takes the same
path with the hardware it finds. A plan states wishes; `engine.resolve` states what the device then granted.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from flatout import hub
from flatout.config.settings import (
    DataSettings,
    Decisions,
    LoraSettings,
    ModelSettings,
    PlanSettings,
    Settings,
    settable,
)
from flatout.cost import (
    BYTES,
    GIB,
    SHORT_DOCUMENT,
    TARGETS,
    Adapters,
    BlockPath,
    Flops,
    Memory,
    ModelShape,
    Rates,
    StepTime,
    checkpoint_bytes,
    flops_per_token,
    kv_cache_bytes_per_token,
    step_time,
    training_memory,
)
from flatout.errors import UsageError
from flatout.files import TEXT_BYTES, typed
from flatout.hardware import Hardware
from flatout.record import Run

# Share of the device's memory that the predicted peak may take, by preset.
MEMORY_BUDGET = {"safe": 0.75, "balanced": 0.85, "max": 0.92}
# A micro-batch of this many tokens fills the device; a larger one only costs memory.
FULL_TOKENS = {"gpu": 65536, "cpu": 4096}
# The same with adapters on 16-bit weights: 22,528 tokens were as fast as 65,536 on an H200, passes launched whole.
FULL_TOKENS_ADAPTED = 32768
# With fewer tokens than this in a micro-batch, recomputing activations to fit more is worth its time.
THIN_TOKENS = 2048
# Seconds the first step takes longer with nothing compiled yet, as seen on an H200's host.
COMPILE_S = 40.0
LOSS_ROWS = {"gpu": 8192, "cpu": 2048}
# More completions at once than this gain nothing: by then the weights are no longer what a step reads most.
MOST_ROWS = {"gpu": 2048, "cpu": 32}
# A pass is recorded only if the predicted peak is at most this share of the device's memory.
GRAPHS_SHARE = 0.5
# Why a model of another architecture has no fast paths.
ADAPTED = "the model runs as transformers builds it"
# Narrower layers gain nothing by 8-bit matmuls.
FP8_HIDDEN = 768


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be run on what: all that a plan is a function of."""

    shape: ModelShape
    hardware: Hardware
    sequence_length: int
    batch_tokens: int
    num_ranks: int
    steps: int | None = None
    packing: str = "concat"
    # Positions a token attends to on average, where documents end inside sequences; None: half the sequence.
    mean_context: float | None = None
    # Tokens of the longest document, where documents are packed; None: unknown.
    longest: int | None = None
    # Share of the tokens that the loss looks at, where only answers are learnt; None: all of them.
    trained_share: float | None = None
    weights_only: bool = False
    # CPU only: measured speed of bf16 matmuls relative to fp32; None when nobody measured.
    cpu_bf16_ratio: float | None = None
    pins: PlanSettings = field(default_factory=PlanSettings)
    # What is trained instead of the weights, and the model those come from.
    adapters: Adapters | None = None
    base: str | None = None
    # Recipe rft: the model that writes completions, and how many at once where that is pinned.
    generator: ModelShape | None = None
    rows: int | None = None

    @property
    def device(self) -> str:
        return "cpu" if self.hardware.gpu is None and self.hardware.sm is None else "gpu"

    def flops(self, recompute: str) -> Flops:
        """Operations per token of this job."""
        return flops_per_token(
            self.shape,
            sequence_length=self.sequence_length,
            mean_context=self.mean_context,
            adapters=self.adapters,
            recompute=recompute,
        )

    @property
    def rank_sequences(self) -> int:
        """Sequences of one optimizer step on one rank."""
        sequences, left = divmod(self.batch_tokens, self.sequence_length)
        if left:
            raise UsageError(
                f"train.batch_tokens {self.batch_tokens} is not a multiple of "
                f"data.sequence_length {self.sequence_length}"
            )
        share, left = divmod(sequences, self.num_ranks)
        if left:
            low = max(1, share) * self.num_ranks * self.sequence_length
            raise UsageError(
                f"train.batch_tokens {self.batch_tokens} is {sequences} sequences of {self.sequence_length}, "
                f"which {self.num_ranks} ranks cannot share evenly: {low} would do"
            )
        return share


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    job: Job
    decisions: Decisions
    reasons: Mapping[str, str]
    predicted: Prediction
    rows: int | None = None  # completions written at once, where the recipe samples; its reason is among the others

    def but(self, **changes: Any) -> Plan:
        """The same job with some decisions pinned to other values, everything else decided anew."""
        return decide(replace(self.job, pins=replace(self.job.pins, **changes)))

    @property
    def flops(self) -> Flops:
        return self.job.flops(self.decisions.recompute or "none")

    @property
    def rates(self) -> Rates:
        peak = _peak(self.job, precision=self.decisions.precision or "fp32", tf32=bool(self.decisions.tf32))
        return Rates(flops=self.flops, peak_flops=peak, num_devices=self.job.num_ranks)

    def explain(self) -> list[tuple[str, Any, str]]:
        """Rows of (decision, value, reason) in the order they are declared."""
        return [(f.name, getattr(self.decisions, f.name), self.reasons[f.name]) for f in fields(Decisions)]

    def to_json(self) -> dict[str, Any]:
        return {
            "decisions": asdict(self.decisions),
            "reasons": dict(self.reasons),
            "predicted": asdict(self.predicted),
            "job": {
                "shape": self.job.shape.to_json(),
                "sequence_length": self.job.sequence_length,
                "batch_tokens": self.job.batch_tokens,
                "num_ranks": self.job.num_ranks,
                "steps": self.job.steps,
                "packing": self.job.packing,
                "hardware": self.job.hardware.name,
                "preset": self.job.pins.preset,
                "adapters": None if self.job.adapters is None else asdict(self.job.adapters),
                "base": self.job.base,
            },
            "rows": self.rows,
            "rates": self.rates.to_json(),
        }


def shape_of(settings: Settings) -> ModelShape:
    """The decoder a configuration asks for: its own numbers, or a Hugging Face config.json."""
    model, length = settings.model, settings.data.sequence_length
    if model.name is not None:
        shape = named_shape(model, length=length)
    else:
        if model.layers is None or model.hidden is None or model.heads is None:
            raise UsageError("model needs `name`, or `layers`, `hidden` and `heads`")
        shape = ModelShape(
            layers=model.layers,
            hidden=model.hidden,
            heads=model.heads,
            kv_heads=model.kv_heads or model.heads,
            head_dim=model.head_dim or model.hidden // model.heads,
            intermediate=model.intermediate or _up(model.hidden * 8 // 3, 128),
            vocab=model.vocab or _up(vocabulary(settings.data), 64),
            positions=model.positions or length,
            tied=model.tied,
            qk_norm=model.qk_norm,
            qkv_bias=model.qkv_bias,
            rope_theta=model.rope_theta,
            norm_eps=model.norm_eps,
        )
    if length > shape.positions:
        raise UsageError(
            f"data.sequence_length {length} is longer than the model's {shape.positions} positions: "
            "shorten the sequences" + ("" if model.name else ", or raise model.positions")
        )
    return shape


def named_shape(model: ModelSettings, *, length: int | None = None) -> ModelShape:
    """The shape of a model by its folder or name, to be run on sequences of at most `length`."""
    if model.name is None:
        raise UsageError("model.name is missing: give a folder or a name on the hub")
    config = hub.config_of(model.name, revision=model.revision, trust=model.trust)
    return ModelShape.of_config(config, length=length)


def vocabulary(data: DataSettings) -> int:
    """Number of ids the data uses: its tokenizer's, or what the manifest of prepared shards says."""
    for folder in (Path(data.path or "") / "train", Path(data.path or "")):
        if data.source == "tokens" and (manifest := folder / "manifest.json").is_file():
            tokenizer = hub.read_json(manifest).get("tokenizer")
            if isinstance(tokenizer, dict) and isinstance(size := tokenizer.get("vocab_size"), int):
                return size
    return tokenizer_size(data.tokenizer)


def tokenizer_size(spec: str) -> int:
    """Number of ids a tokenizer uses, read without loading it."""
    if spec == "byte":
        return 257
    if match := re.fullmatch(r"bpe:(\d{1,9})", spec):
        return int(match[1])
    path = Path(os.path.expanduser(spec))
    file = path if os.path.isfile(path) else hub.folder(spec, weights=False) / "tokenizer.json"
    content = hub.read_json(file, limit=TEXT_BYTES)
    try:
        vocab = content["model"]["vocab"]
        # Unigram models list their tokens in the order of their ids; the others map each token to its id.
        ids = [*(range(len(vocab)) if isinstance(vocab, list) else vocab.values())]
        return int(max([*ids, *(token["id"] for token in content.get("added_tokens") or [])])) + 1
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise UsageError(f"{file} is no tokenizer.json: it has no vocabulary at model.vocab") from None


def decide(job: Job) -> Plan:
    """One pass over the decisions, later ones standing on earlier ones; a pinned value is taken as it is."""
    _refuse_for_adapter(job)
    chosen: dict[str, Any] = {}
    reasons: dict[str, str] = {}

    def settle(name: str, value: Any, reason: str) -> Any:
        pinned = getattr(job.pins, name)
        chosen[name] = value if pinned is None else pinned
        reasons[name] = reason if pinned is None else "pinned in the configuration"
        return chosen[name]

    precision = settle("precision", *_precision(job))
    for name, value, reason in _kernels(job, precision=precision):
        settle(name, value, reason)
    settle("compile", *_compile(job, precision=precision, fused=_fused(chosen)))
    path = _path(chosen)
    micro_batch, accumulation, recompute, why = _batch(job, precision=precision, path=path)
    chosen |= {"micro_batch": micro_batch, "accumulation": accumulation, "recompute": recompute}
    reasons |= why
    settle("attention", *_attention(job, chosen))
    settle("loss_chunk", *_loss_chunk(job, micro_batch * job.sequence_length))
    settle("tf32", *_tf32(job))
    settle("graphs", *_graphs(job, chosen))
    memory = _memory_of(job, chosen, graphs=chosen["graphs"])
    if job.pins.micro_batch is None:
        reasons["micro_batch"] = f"{_room(job, chosen, memory)}; {reasons['micro_batch']}"
    settle("fused_optimizer", True, "one pass over weights, gradients and moments instead of many")
    settle("workers", *_workers(job))
    ahead = 4 if job.pins.preset == "max" else 2
    settle("prefetch", ahead, f"{ahead} steps of data stand ready while the device works")
    on_gpu = job.device == "gpu"
    settle("pin_memory", on_gpu, "page-locked memory copies while kernels run" if on_gpu else "no device to copy to")
    settle("expandable_segments", *_segments(job))
    settle("memory_fraction", *_fraction(job))
    settle("manual_gc", True, "a collection in the middle of a step would stall every rank")
    settle("threads", *_threads(job))

    decisions = Decisions(**chosen)
    rows = None
    if job.generator is not None:
        rows, reasons["rows"] = _rows(job, job.generator, precision=precision)
    return Plan(job=job, decisions=decisions, reasons=reasons, predicted=_predict(job, decisions, memory), rows=rows)


def _rows(job: Job, shape: ModelShape, *, precision: str) -> tuple[int | None, str]:
    """A power of two of completions, each with a cache as long as a training sequence, beside the weights."""
    most = MOST_ROWS[job.device]
    if job.rows is not None:
        return job.rows, "pinned in the configuration"
    total_gib = job.hardware.memory_gib if job.device == "gpu" else job.hardware.ram_gib
    if total_gib is None:
        return None, "memory unknown: left to the sampler"
    row_bytes = job.sequence_length * kv_cache_bytes_per_token(shape, precision=precision)
    weights_bytes = shape.num_parameters * BYTES[precision]
    free_bytes = MEMORY_BUDGET[job.pins.preset] * total_gib * GIB - weights_bytes
    if free_bytes < row_bytes:
        raise UsageError(
            f"sampling needs {(weights_bytes + row_bytes) / GIB:.1f} GiB for the weights and one completion, and the "
            f"{job.pins.preset} preset may use {MEMORY_BUDGET[job.pins.preset] * total_gib:.1f} of {total_gib:.1f} "
            "GiB: a smaller rft.generator or a shorter data.sequence_length would fit"
        )
    rows = min(most, 1 << int(math.log2(free_bytes / row_bytes)))
    size = f"{weights_bytes / GIB:.1f} GiB of weights and {rows} x {row_bytes / 2**20:.0f} MiB of cache"
    sm = job.hardware.sm
    slow = "; written step by step: kernels and graphs begin with SM 8.0" if sm is not None and sm < (8, 0) else ""
    return rows, f"{size} in {total_gib:.1f} GiB" + ("; more gain nothing" if rows == most else "") + slow


def _refuse_for_adapter(job: Job) -> None:
    """What was asked for and cannot be had where a model runs as transformers builds it; all of it at once."""
    pins = job.pins
    asked = {
        "data.packing documents": job.packing == "documents",
        "plan.fused_qkv": bool(pins.fused_qkv),
        "plan.fused_mlp": bool(pins.fused_mlp),
        "plan.fp8": bool(pins.fp8),
        f"plan.compile {pins.compile}": pins.compile not in (None, "none"),
        "plan.recompute selective": pins.recompute == "selective",
    }
    if job.shape.adapter and (found := [name for name, present in asked.items() if present]):
        raise UsageError(
            f"{', '.join(found)} cannot be had: {job.shape.adapter}, so the model runs as transformers builds it; "
            "leave out what is named, or choose a model of the llama, mistral, qwen2 or qwen3 family"
        )


def _fused(chosen: Mapping[str, Any]) -> bool:
    return all(chosen[name] for name in ("fused_qkv", "fused_mlp", "fused_loss"))


def _path(chosen: Mapping[str, Any]) -> BlockPath:
    """How the blocks run, as `cost` counts it."""
    if _fused(chosen):
        return "fp8" if chosen["fp8"] else "fused"
    return "eager" if chosen["compile"] == "none" else "compiled"


def _precision(job: Job) -> tuple[str, str]:
    sm = job.hardware.sm
    if job.device == "cpu":
        ratio = job.cpu_bf16_ratio
        if ratio is not None and ratio >= 1.5:
            return "bf16", f"bf16 matmuls measured {ratio:.1f} times as fast as fp32 on this CPU"
        measured = "" if ratio is None else f": bf16 measured {ratio:.2g} times the speed of fp32"
        return "fp32", f"a CPU without fast bf16 units{measured}" if measured else "a CPU, bf16 speed not measured"
    if sm is None:
        return "fp32", "the GPU's SM version is unknown"
    if sm < (8, 0):
        return "fp16", f"SM {sm[0]}.{sm[1]} has fp16 tensor cores but no bf16 units; loss scaling is on"
    return "bf16", f"SM {sm[0]}.{sm[1]} has bf16 tensor cores; no loss scaling needed"


def _kernels(job: Job, *, precision: str) -> list[tuple[str, bool, str]]:
    """The fused segments, and 8-bit matmuls in them."""
    sm, shape = job.hardware.sm, job.shape
    foreign = ADAPTED if shape.adapter else None
    no = None
    if job.device == "cpu":
        no = "kernels are for GPUs"
    elif job.pins.preset == "safe":
        no = "preset safe uses library operations only"
    elif sm is None or sm < (8, 0) or precision == "fp32":
        no = "written for bf16 tensor cores, SM 8.0 and up"
    elif job.adapters is not None and job.adapters.base_bits == 4:
        no = "the fused segments take no 4-bit weights"
    elif job.adapters is not None and job.adapters.dropout:
        no = "the fused segments take no adapter dropout"
    elif job.pins.recompute == "selective":
        no = "selective recomputation keeps what they would overwrite"
    odd_heads = shape.qk_norm and shape.head_dim & (shape.head_dim - 1)
    uneven = f"query and key norms need heads of a power of two, not {shape.head_dim}" if odd_heads else None
    rows = [
        ("fused_qkv", no or foreign or uneven, "norm and rotary positions, one pass each way"),
        ("fused_mlp", no or foreign, "norm and SwiGLU, one pass each way"),
        ("fused_loss", no, "one read and one write of each logit"),
    ]
    lacking = "it needs all fused segments" if foreign or uneven else None
    eight = ("fp8", *_fp8(job, precision=precision, no=no or lacking))
    return [*((name, problem is None, problem or gain) for name, problem, gain in rows), eight]


def _fp8(job: Job, *, precision: str, no: str | None) -> tuple[bool, str]:
    sm, shape = job.hardware.sm, job.shape
    if no is not None:
        return False, no
    if job.adapters is not None:
        return False, "adapters learn beside 16-bit matmuls"
    if precision != "bf16":
        return False, f"FP8 goes with bf16, not {precision}"
    if sm is None or sm < (8, 9):
        return False, "FP8 tensor cores begin with SM 8.9"
    if sm[0] != 9:
        return False, f"measured on SM 9.0 only; pin plan.fp8: true to try it on SM {sm[0]}.{sm[1]}"
    odd = {"hidden": shape.hidden, "intermediate": shape.intermediate, "vocab": shape.vocab}
    if uneven := [name for name, size in odd.items() if size % 16]:
        return False, f"FP8 matmuls need multiples of 16, and model.{uneven[0]} is {odd[uneven[0]]}"
    if shape.hidden < FP8_HIDDEN:
        return False, f"layers narrower than {FP8_HIDDEN} gain nothing by FP8"
    fused, eight = (_step_of(job, precision=precision, path=path) for path in ("fused", "fp8"))
    if fused is None or eight is None or eight >= fused:
        return False, "too few tokens a micro-batch to gain by it"
    gain = fused / eight - 1
    return True, f"predicted {gain:.0%} faster: twice the tensor-core rate, scales follow the largest values seen"


def _compile(job: Job, *, precision: str, fused: bool) -> tuple[str, str]:
    if job.device == "cpu":
        return "none", "eager kernels are near the limit of a CPU, and compiling takes minutes"
    if job.pins.preset == "safe":
        return "none", "preset safe runs eager"
    if job.shape.adapter:
        return "none", ADAPTED
    if fused:
        return "none", "every segment has its kernel: nothing is left to fuse, and nothing to wait for"
    gain = "fuses norms, rotary positions, SwiGLU and the loss; one graph serves every block"
    step = compile_break_even(job, precision=precision)
    if step is None:
        return "default", gain
    if job.steps is not None and job.steps < step:
        return "none", f"about {COMPILE_S:.0f} s of compiling would pay from step {step} on (estimated)"
    return "default", f"{gain}; about {COMPILE_S:.0f} s of compiling pay from step {step} on (estimated)"


def compile_break_even(job: Job, *, precision: str, compile_s: float = COMPILE_S) -> int | None:
    """The step from which on compiling has paid, by the predicted saving; None where nothing can be predicted."""
    eager = _step_of(job, precision=precision, path="eager")
    compiled = _step_of(job, precision=precision, path="compiled")
    if eager is None or compiled is None or eager <= compiled:
        return None
    return math.ceil(compile_s / (eager - compiled))


def _step_of(job: Job, *, precision: str, path: BlockPath) -> float | None:
    """Predicted seconds of a step in micro-batches that fill the device, as far as the batch does.

    Where it does not, passes are taken to be recorded if nothing stands against it.
    """
    tokens = job.rank_sequences * job.sequence_length
    micro_tokens = min(tokens, _full_tokens(job))
    accumulation = max(1, tokens // micro_tokens)

    def of(*, graphs: bool) -> StepTime | None:
        return _time(
            job, precision=precision, micro_tokens=micro_tokens, accumulation=accumulation, path=path, graphs=graphs
        )

    time = of(graphs=False)
    unpinned = job.pins.graphs is not False and job.pins.compile in (None, "none")
    if time is not None and time.may_wait and path in ("fused", "fp8") and unpinned:
        size = max(1, job.rank_sequences // accumulation)
        memory = _memory(job, micro_batch=size, recompute="none", precision=precision, path=path, graphs=True)
        time = of(graphs=_leaves_room(job, memory))
    return None if time is None else time.seconds


def _attention(job: Job, chosen: Mapping[str, Any]) -> tuple[str, str]:
    sm, precision = job.hardware.sm, chosen["precision"]
    if job.device == "cpu":
        return "flash", "torch's blocked CPU kernel: no T x T scores in memory"
    if sm is None or sm < (8, 0):
        return "efficient", "flash kernels need SM 8.0"
    if precision == "fp32":
        return "efficient", "the one fused kernel that takes fp32"
    if no_short(job, chosen) is None:
        return "short", f"no document has more than {SHORT_DOCUMENT} tokens: its scores are made whole, in one tile"
    if job.packing == "documents":
        return "flash", "packed documents run by the variable-length flash kernel"
    if sm >= (9, 0) and job.shape.head_dim <= 128:
        return "cudnn", f"cuDNN's kernel is the fastest on SM {sm[0]}.{sm[1]}"
    return "flash", f"flash is the fastest kernel on SM {sm[0]}.{sm[1]} for heads of {job.shape.head_dim}"


def _tf32(job: Job) -> tuple[bool, str]:
    if job.device == "cpu" or job.hardware.sm is None or job.hardware.sm < (8, 0):
        return False, "the device has no TF32 units"
    if job.pins.preset == "safe":
        return False, "preset safe keeps fp32 matmuls exact"
    return True, "for the few matmuls that stay in fp32"


def _loss_chunk(job: Job, micro_tokens: int) -> tuple[int, str]:
    chunks = math.ceil(micro_tokens / LOSS_ROWS[job.device])
    # A multiple of what 8-bit matmuls and tiles want.
    rows = min(micro_tokens, _up(math.ceil(micro_tokens / chunks), 128))
    saved = (micro_tokens - rows) * job.shape.vocab * 2 / GIB
    return rows, f"{chunks} chunks a micro-batch; holds {saved:.1f} GiB fewer logits than all at once"


def _workers(job: Job) -> tuple[int, str]:
    cores = job.hardware.num_cpus
    if cores is None:
        return 2, "the number of CPU cores is not known; more are added if the device waits for data"
    count = max(1, min(4, cores // job.num_ranks - 1))
    return count, f"{cores} cores for {job.num_ranks} rank(s); more are added if the device waits for data"


def _full_tokens(job: Job) -> int:
    adapted = job.device == "gpu" and job.adapters is not None and job.adapters.base_bits == 16
    return FULL_TOKENS_ADAPTED if adapted else FULL_TOKENS[job.device]


def no_short(job: Job, chosen: Mapping[str, Any]) -> str | None:
    """Why the kernel for short documents does not go with the rest, or None."""
    sm, width = job.hardware.sm, job.shape.head_dim
    if job.packing != "documents":
        return "documents are not packed"
    if job.longest is None or job.longest > SHORT_DOCUMENT:
        return f"the longest document has {job.longest or 'nobody knows how many'} tokens, not at most {SHORT_DOCUMENT}"
    if job.device == "cpu" or sm is None or sm < (8, 0) or chosen["precision"] == "fp32":
        return "it is for 16 bits from SM 8.0 on"
    if not 16 <= width <= 128 or width & (width - 1):
        return f"it has no tile for heads of {width}"
    if chosen["compile"] != "none" or chosen["recompute"] == "selective":
        return "not with compile or selective recomputation"
    return None


def _graphs(job: Job, chosen: Mapping[str, Any]) -> tuple[bool, str]:
    """Where launches may take longer than what they launch, and memory is left for what a recording keeps to itself."""
    if job.device == "cpu":
        return False, "nothing is launched"
    if job.shape.adapter:
        return False, ADAPTED
    if job.adapters is None:
        time = _time_of(job, chosen, graphs=False)
        if time is None:
            return False, "how fast the device is, and whether it might wait, is not known"
        if not time.may_wait:
            return False, "enough tokens a micro-batch to hide the launches"
    if not _fused(chosen) or chosen["compile"] != "none" or chosen["recompute"] == "selective":
        return False, "only where every segment has its kernel, and nothing is compiled"
    if not _leaves_room(job, _memory_of(job, chosen, graphs=True)):
        return False, f"a recording keeps its activations: only where the peak is under {GRAPHS_SHARE:.0%} of memory"
    many = "few tokens" if job.adapters is None else "adapters"
    return True, f"{many} mean many small kernels: launched whole, they do not wait for the host"


def _leaves_room(job: Job, memory: Memory) -> bool:
    """For what recorded passes keep to themselves."""
    total_gib = _total_gib(job)
    return total_gib is not None and memory.gib <= GRAPHS_SHARE * total_gib


def _total_gib(job: Job) -> float | None:
    """The memory there is, as if the device had only the share of it that the run may use."""
    total_gib = job.hardware.memory_gib if job.device == "gpu" else job.hardware.ram_gib
    return None if total_gib is None else (job.pins.memory_fraction or 1.0) * total_gib


def _segments(job: Job) -> tuple[bool, str]:
    if job.device == "cpu":
        return False, "an allocator setting for GPUs"
    return True, "freed blocks of any size can be used again, against fragmentation"


def _fraction(job: Job) -> tuple[float, str]:
    share = {"safe": 0.90, "balanced": 0.95, "max": 0.98}[job.pins.preset]
    if job.device == "cpu":
        return share, "an allocator setting for GPUs"
    return share, "the rest is left to the driver and the libraries' own buffers"


def _threads(job: Job) -> tuple[int, str]:
    cores = job.hardware.num_cpus
    if cores is None:
        return 4, "the number of CPU cores is not known"
    share = max(1, cores // job.num_ranks)
    if job.device == "cpu":
        return share, f"all of this rank's share of {cores} cores"
    return min(8, share), "the GPU does the arithmetic; a few threads serve the host's part"


def _memory_of(job: Job, chosen: Mapping[str, Any], *, graphs: bool) -> Memory:
    """With what has been decided so far."""
    return _memory(
        job,
        micro_batch=chosen["micro_batch"],
        recompute=chosen["recompute"],
        precision=chosen["precision"],
        path=_path(chosen),
        graphs=graphs,
    )


def _memory(
    job: Job, *, micro_batch: int, recompute: str, precision: str, path: BlockPath, graphs: bool = False
) -> Memory:
    micro_tokens = micro_batch * job.sequence_length
    rows, _ = _loss_chunk(job, micro_tokens)
    return training_memory(
        job.shape,
        micro_tokens=micro_tokens,
        precision=precision,
        recompute=recompute,
        path=path,
        loss_chunk=job.pins.loss_chunk or rows,
        # Rounded up to sixteenths, as batches are laid out.
        loss_rows=None if job.trained_share is None else math.ceil(16 * job.trained_share) * micro_tokens // 16,
        accumulation=max(1, job.rank_sequences // micro_batch),
        num_ranks=job.num_ranks,
        adapters=job.adapters,
        graphs=graphs,
    )


def _batch(job: Job, *, precision: str, path: BlockPath) -> tuple[int, int, str, dict[str, str]]:
    """Micro-batch, accumulation and recomputation together: they share the memory and must hold the batch."""
    pins, sequences = job.pins, job.rank_sequences
    total_gib = _total_gib(job)
    budget = None if total_gib is None else MEMORY_BUDGET[pins.preset] * total_gib
    sizes = [n for n in range(sequences, 0, -1) if sequences % n == 0]
    if pins.micro_batch and pins.accumulation and pins.micro_batch * pins.accumulation != sequences:
        raise UsageError(
            f"plan.micro_batch {pins.micro_batch} x plan.accumulation {pins.accumulation} is not the "
            f"{sequences} sequences of a step on one rank"
        )
    if pins.micro_batch or pins.accumulation:
        name = "micro_batch" if pins.micro_batch else "accumulation"
        pinned = getattr(pins, name)
        if sequences % pinned:
            raise UsageError(
                f"plan.{name} {pinned} does not divide the {sequences} sequences of a step on one rank: "
                f"choose one of {', '.join(map(str, sorted(sizes)))}"
            )
        sizes = [pins.micro_batch or sequences // pinned]
    else:
        fitting = [n for n in sizes if n * job.sequence_length <= _full_tokens(job)]
        sizes = fitting or [1]

    # Fused kernels overwrite what selective recomputation would keep.
    # Under adapters it would keep each projection twice, with and without its adapter.
    plain = path not in ("fused", "fp8") and not job.shape.adapter and job.adapters is None
    modes = ["none", "selective", "full"] if plain else ["none", "full"]
    modes = [pins.recompute] if pins.recompute else modes

    def needs(size: int, mode: str) -> Memory:
        graphs = bool(pins.graphs) and job.device == "gpu"  # unpinned, they are only taken where room is left
        return _memory(job, micro_batch=size, recompute=mode, precision=precision, path=path, graphs=graphs)

    def fits(size: int, mode: str) -> bool:
        return budget is None or needs(size, mode).gib <= budget

    # Per mode the largest size that fits; the first mode whose micro-batch is not thin, else the largest of all.
    best = [(next((n for n in sizes if fits(n, mode)), 0), mode) for mode in modes]
    enough = min(THIN_TOKENS, sizes[0] * job.sequence_length)
    size, mode = next((b for b in best if b[0] * job.sequence_length >= enough), max(best, key=lambda b: b[0]))
    if size == 0:
        least = sizes[-1]
        memory = needs(least, modes[-1])
        raise UsageError(
            f"the model needs {memory.gib:.1f} GiB with micro-batch {least} and recomputation {modes[-1]}, but the "
            f"{pins.preset} preset may use {budget:.1f} of {total_gib:.1f} GiB (largest part: {memory.largest()}): "
            + _way_out(job, budget=budget or 0.0, precision=precision, path=path)
        )
    tokens = size * job.sequence_length
    full = tokens >= _full_tokens(job) or size == sequences
    why = {
        "micro_batch": "enough to fill the device" if full else "the largest that fits the memory or divides the batch",
        "accumulation": f"{size} x {sequences // size} x {job.num_ranks} rank(s) = {sequences * job.num_ranks} "
        f"sequences = {job.batch_tokens} tokens, exactly the batch asked for",
        "recompute": {
            "none": "activations fit in memory",
            "selective": "matmul outputs are kept, the rest is recomputed, to fit",
            "full": "only block inputs fit; a block's forward runs twice",
        }[mode],
    }
    for name in ("micro_batch", "accumulation", "recompute"):
        if getattr(pins, name) is not None:
            why[name] = "pinned in the configuration"
    return size, sequences // size, mode, why


def _room(job: Job, chosen: Mapping[str, Any], memory: Memory) -> str:
    total_gib = _total_gib(job)
    peak = "memory unknown" if total_gib is None else f"predicted peak {memory.gib:.1f} of {total_gib:.1f} GiB"
    return f"{chosen['micro_batch'] * job.sequence_length} tokens a pass; {peak}"


def _way_out(job: Job, *, budget: float, precision: str, path: BlockPath) -> str:
    """What would fit, changing as little as will do: pins, then the frozen weights, then the length."""
    bases = [("", job)]
    if job.adapters is not None and job.adapters.base_bits != 4:
        bases.append(("lora.base: 4-bit", replace(job, adapters=replace(job.adapters, base_bits=4))))
    whole = job.sequence_length
    lengths = [("", whole)]
    lengths += [
        (f"data.sequence_length: {n}", n) for n in (whole // 2, whole // 4) if n >= 128 and job.batch_tokens % n == 0
    ]
    for shorter, length in lengths:
        for smaller, other in bases:
            how: BlockPath = "eager" if smaller else path  # the fused segments take no 4-bit weights
            tried = replace(other, sequence_length=length)
            needs = _memory(tried, micro_batch=1, recompute="full", precision=precision, path=how).gib
            if needs <= budget:
                changes = (
                    " and ".join(filter(None, (smaller, shorter))) or "plan.micro_batch: 1 and plan.recompute: full"
                )
                return f"{changes} would fit ({needs:.1f} GiB, with full recomputation)"
    return "a smaller model, shorter sequences or a larger device would fit"


def _predict(job: Job, decisions: Decisions, memory: Memory) -> Prediction:
    precision, recompute = decisions.precision or "fp32", decisions.recompute or "none"
    flops = job.flops(recompute)
    peak = _peak(job, precision=precision, tf32=bool(decisions.tf32))
    time = _time_of(job, asdict(decisions), graphs=bool(decisions.graphs))
    seconds = None if time is None else time.seconds
    rates = Rates(flops=flops, peak_flops=peak, num_devices=job.num_ranks)
    shares = rates.shares(tokens=job.batch_tokens, seconds=seconds or 0.0)
    return Prediction(
        peak_gib=memory.gib,
        memory_gib={name: size / GIB for name, size in asdict(memory).items()},
        tokens_per_s=job.batch_tokens / seconds if seconds else None,
        step_s=seconds,
        mfu=shares.mfu,
        mfu_common=shares.mfu_common,
        hours=seconds * job.steps / 3600 if seconds and job.steps else None,
        checkpoint_gib=checkpoint_bytes(job.shape, weights_only=job.weights_only, adapters=job.adapters) / GIB,
    )


def _documents(job: Job, attention: str | None) -> Literal["varlen", "short"] | None:
    """Which kernel takes packed documents, where one does."""
    if job.packing != "documents":
        return None
    return "short" if attention == "short" else "varlen" if attention == "flash" else None


def _time_of(job: Job, chosen: Mapping[str, Any], *, graphs: bool) -> StepTime | None:
    """With what has been decided so far."""
    return _time(
        job,
        precision=chosen["precision"],
        micro_tokens=chosen["micro_batch"] * job.sequence_length,
        accumulation=chosen["accumulation"],
        path=_path(chosen),
        recompute=chosen["recompute"],
        tf32=bool(chosen["tf32"]),
        graphs=graphs,
        documents=_documents(job, chosen["attention"]),
    )


def _time(
    job: Job,
    *,
    precision: str,
    micro_tokens: int,
    accumulation: int,
    path: BlockPath,
    recompute: str = "none",
    tf32: bool = True,
    graphs: bool = False,
    documents: Literal["varlen", "short"] | None = None,
) -> StepTime | None:
    """Predicted time of a step; None on a CPU, and where the device's peak is not known."""
    peak = _peak(job, precision=precision, tf32=tf32)
    if not peak or job.device == "cpu":
        return None
    return step_time(
        job.shape,
        sequence_length=job.sequence_length,
        micro_tokens=micro_tokens,
        accumulation=accumulation,
        flops=job.flops(recompute),
        precision=precision,
        peak_flops=peak,
        fp8_flops=job.hardware.peak_flops.get("fp8"),
        bandwidth=job.hardware.bandwidth,
        path=path,
        adapters=job.adapters,
        graphs=graphs,
        documents=documents,
    )


def _peak(job: Job, *, precision: str, tf32: bool) -> float | None:
    """The device's peak in the arithmetic the matmuls really use; None for a model whose operations nobody counted."""
    if job.shape.adapter:
        return None
    return job.hardware.peak_flops.get("tf32" if precision == "fp32" and tf32 else precision)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def job_of(
    settings: Settings,
    *,
    hardware: Hardware,
    num_ranks: int,
    total_steps: int | None = None,
    mean_context: float | None = None,
    longest: int | None = None,
    trained_share: float | None = None,
    cpu_bf16_ratio: float | None = None,
) -> Job:
    """The job a configuration describes, on this hardware."""
    train = settings.train
    if total_steps is None:
        total_steps = train.steps or (math.ceil(train.tokens / train.batch_tokens) if train.tokens else None)
    generator = None
    if settings.recipe == "rft":
        settings = _of_runs(settings)
        name = settings.rft.generator
        asked = ModelSettings(name=name, trust=settings.model.trust)
        generator = shape_of(settings) if name is None else named_shape(asked)
    return Job(
        shape=shape_of(settings),
        hardware=hardware,
        sequence_length=settings.data.sequence_length,
        batch_tokens=train.batch_tokens,
        num_ranks=num_ranks,
        steps=total_steps,
        # Rows of recipes sft and rft are packed by document, whatever the setting for running text says.
        packing="documents" if settings.recipe in ("sft", "rft") else settings.data.packing,
        mean_context=mean_context,
        longest=longest,
        trained_share=trained_share,
        weights_only=settings.save.weights_only,
        cpu_bf16_ratio=cpu_bf16_ratio,
        pins=settings.plan,
        adapters=adapters_of(settings.lora),
        base=settings.model.name if settings.model.weights == "load" else None,
        generator=generator,
        rows=settings.sample.rows,
    )


def _of_runs(settings: Settings) -> Settings:
    """Where the student is one of our runs, its shape is that run's; a generator that is one, is taken to be alike."""
    if settings.rft.generator is not None and Run.is_at(settings.rft.generator):
        settings = replace(settings, rft=replace(settings.rft, generator=None))
    if settings.model.name is None or not Run.is_at(settings.model.name):
        return settings
    run = Run.open(settings.model.name)
    return replace(
        settings,
        model=model_settings(run, trust=settings.model.trust),
        data=replace(settings.data, tokenizer=str(run.tokenizer_dir)),
    )


def model_settings(run: Run, *, trust: str | None = None) -> ModelSettings:
    """The `model` section of a run's configuration, as far as this version knows its keys. No run grants trust."""
    known, recorded = {field.name for field in settable(ModelSettings)}, run.config.get("model")
    if isinstance(recorded, Mapping):
        recorded = {key: value for key, value in recorded.items() if key in known}
    return replace(typed(ModelSettings, recorded, source=f"the model section of {run.path}"), trust=trust)


def adapters_of(lora: LoraSettings) -> Adapters | None:
    """The adapters a configuration asks for; a target that matches nothing is refused."""
    if lora.rank is None:
        return None
    names = [name.strip().removesuffix("_proj") for name in lora.targets.split(",") if name.strip()]
    known = TARGETS if names == ["all-linear"] else tuple(name for name in TARGETS if name in names)
    unknown = [name for name in names if name not in (*TARGETS, "all-linear")]
    if unknown or not known or (len(names) > 1 and "all-linear" in names):
        what = ", ".join(repr(name) for name in unknown) or repr(lora.targets)
        raise UsageError(
            f"lora.targets: {what} matches no projection of this model: "
            f"give all-linear, or some of {', '.join(TARGETS)}"
        )
    return Adapters(
        rank=lora.rank,
        alpha=2.0 * lora.rank if lora.alpha is None else lora.alpha,
        targets=known,
        dropout=lora.dropout,
        rslora=lora.rslora,
        base_bits=4 if lora.base == "4-bit" else 16,
    )
