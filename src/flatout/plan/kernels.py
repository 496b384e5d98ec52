"""Precision and kernels: fused segments, FP8, compilation, attention, CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

from flatout.config.settings import Attention, Compile, Precision, Recompute
from flatout.cost import SHORT_DOCUMENT, BlockPath
from flatout.plan.job import Job
from flatout.plan.predict import COMPILE_S, GRAPHS_SHARE, Passes, compile_break_even, full_step_s, leaves_room, time_of

# Why a model that transformers runs has no fast paths.
FOREIGN = "transformers runs this model"
# Narrower layers gain nothing from FP8 matmuls.
FP8_HIDDEN = 768


# bf16 trains faster on a CPU if its matmuls are this many times as fast as in fp32, and the layers this wide; see
# docs/predictions.md.
FAST_BF16, WIDE_FOR_BF16 = 1.5, 256


def precision(job: Job) -> tuple[Precision, str]:
    sm = job.hardware.sm
    if job.device == "cpu":
        peaks = job.hardware.peak_flops
        if "bf16" not in peaks or "fp32" not in peaks:
            return "fp32", "a CPU whose bf16 speed was not measured"
        ratio, hidden = peaks["bf16"] / peaks["fp32"], job.shape.hidden
        if ratio >= FAST_BF16 and hidden >= WIDE_FOR_BF16:
            return "bf16", f"bf16 matmuls measured {ratio:.1f} times as fast as fp32 on this CPU"
        if ratio >= FAST_BF16:
            return "fp32", f"a CPU spends little time in matmuls of width {hidden}, so that bf16 gains nothing"
        return "fp32", f"a CPU without fast bf16 units: bf16 measured {ratio:.2g} times the speed of fp32"
    if sm is None:
        return "fp32", "the GPU's SM version is unknown"
    if sm < (8, 0):
        return "fp16", f"SM {sm[0]}.{sm[1]} has fp16 tensor cores but no bf16 units; loss scaling is on"
    return "bf16", f"SM {sm[0]}.{sm[1]} has bf16 tensor cores; no loss scaling needed"


def segments(job: Job, *, precision: Precision) -> list[tuple[str, bool, str]]:
    """The fused segments, and FP8 matmuls in them."""
    shape = job.shape
    no = _no_segments(job, precision=precision)
    foreign = FOREIGN if shape.foreign else None
    odd_heads = shape.qk_norm and shape.head_dim & (shape.head_dim - 1)
    uneven = f"query and key norms need heads of a power of two, not {shape.head_dim}" if odd_heads else None
    rows = [
        ("fused_qkv", no or foreign or uneven, "norm and rotary embeddings in one kernel per direction"),
        ("fused_mlp", no or foreign, "norm and SwiGLU in one kernel per direction"),
        ("fused_loss", no, "each logit is read and written once"),
    ]
    lacking = "it needs all fused segments" if foreign or uneven else None
    eight = ("fp8", *_fp8(job, precision=precision, no=no or lacking))
    return [*((name, problem is None, problem or gain) for name, problem, gain in rows), eight]


def _no_segments(job: Job, *, precision: Precision) -> str | None:
    """Why no fused segment runs, or None."""
    sm = job.hardware.sm
    if job.device == "cpu":
        return "these kernels need a GPU"
    if job.pins.preset == "safe":
        return "preset safe uses library operations only"
    if sm is None or sm < (8, 0) or precision == "fp32":
        return "these kernels need bf16 on SM 8.0 or later"
    if job.adapters is not None and job.adapters.base_bits == 4:
        return "the fused segments do not support 4-bit weights"
    if job.adapters is not None and job.is_sharded:
        return "the fused segments append adapters to whole weights, and these are sharded"
    if job.adapters is not None and job.adapters.dropout:
        return "the fused segments do not support adapter dropout"
    if job.pins.recompute == "selective":
        return "selective recomputation needs tensors that the fused segments overwrite"
    return None


def _fp8(job: Job, *, precision: Precision, no: str | None) -> tuple[bool, str]:
    sm, shape = job.hardware.sm, job.shape
    if no is not None:
        return False, no
    if job.is_sharded:
        return False, "8-bit copies of sharded weights are not supported"
    if job.adapters is not None:
        return False, "adapters are trained with 16-bit matmuls"
    if precision != "bf16":
        return False, f"FP8 works only with bf16, not {precision}"
    if sm is None or sm < (8, 9):
        return False, "FP8 tensor cores need SM 8.9 or later"
    if sm[0] != 9:
        return False, f"tested on SM 9.0 only; set plan.fp8: true to try it on SM {sm[0]}.{sm[1]}"
    odd = {"hidden": shape.hidden, "intermediate": shape.intermediate, "vocab": shape.vocab}
    if uneven := [name for name, size in odd.items() if size % 16]:
        return False, f"FP8 matmuls need multiples of 16, but model.{uneven[0]} is {odd[uneven[0]]}"
    if shape.hidden < FP8_HIDDEN:
        return False, f"layers narrower than {FP8_HIDDEN} gain nothing from FP8"
    fused, eight = (full_step_s(job, precision=precision, path=path) for path in _WITHOUT_AND_WITH)
    if fused is None or eight is None or eight >= fused:
        return False, "too few tokens per micro-batch to gain from FP8"
    gain = fused / eight - 1
    return True, f"predicted {gain:.0%} faster: twice the tensor-core rate, with scales from the largest recent values"


_WITHOUT_AND_WITH: tuple[BlockPath, BlockPath] = ("fused", "fp8")


def compiler(job: Job, *, precision: Precision, fused: bool) -> tuple[Compile, str]:
    if job.device == "cpu":
        return "none", "eager kernels are close to a CPU's limit, and compiling takes minutes"
    if job.pins.preset == "safe":
        return "none", "preset safe runs in eager mode"
    if job.shape.foreign:
        return "none", FOREIGN
    if fused:
        return "none", "every segment has a fused kernel, so compiling would gain nothing"
    gain = "fuses norms, rotary embeddings, SwiGLU and the loss; all blocks share one compiled graph"
    step = compile_break_even(job, precision=precision)
    if step is None:
        return "default", gain
    if job.steps is not None and job.steps < step:
        return "none", f"compiling takes about {COMPILE_S:.0f} s and would pay off only at step {step} (estimated)"
    return "default", f"{gain}; compiling takes about {COMPILE_S:.0f} s and pays off at step {step} (estimated)"


def attention(job: Job, *, precision: Precision, compile: Compile, recompute: Recompute) -> tuple[Attention, str]:
    sm = job.hardware.sm
    if job.device == "cpu":
        return "flash", "torch's CPU flash kernel: no T x T scores in memory"
    if sm is None or sm < (8, 0):
        return "efficient", "flash kernels need SM 8.0 or later"
    if precision == "fp32":
        return "efficient", "the only fused kernel that supports fp32"
    if no_short(job, precision=precision, compile=compile, recompute=recompute) is None:
        return "short", f"no document has more than {SHORT_DOCUMENT} tokens, so its scores fit in one tile"
    if job.packing == "documents":
        return "flash", "packed documents use the variable-length flash kernel"
    if sm >= (9, 0) and job.shape.head_dim <= 128:
        return "cudnn", f"cuDNN's kernel is the fastest on SM {sm[0]}.{sm[1]}"
    return "flash", f"flash is the fastest kernel on SM {sm[0]}.{sm[1]} for heads of {job.shape.head_dim}"


def no_short(job: Job, *, precision: Precision, compile: Compile, recompute: Recompute) -> str | None:
    """The reason why the kernel for short documents cannot be used here, or None."""
    sm, width = job.hardware.sm, job.shape.head_dim
    if job.packing != "documents":
        return "documents are not packed"
    if job.longest is None:
        return f"the length of the longest document is unknown, and it takes at most {SHORT_DOCUMENT} tokens"
    if job.longest > SHORT_DOCUMENT:
        return f"the longest document has {job.longest} tokens, more than the supported {SHORT_DOCUMENT}"
    if job.device == "cpu" or sm is None or sm < (8, 0) or precision == "fp32":
        return "it needs bf16 or fp16, and SM 8.0 or later"
    if not 16 <= width <= 128 or width & (width - 1):
        return f"it has no tile for heads of {width}"
    if compile != "none" or recompute == "selective":
        return "it does not work with compile or selective recomputation"
    return None


def tf32(job: Job) -> tuple[bool, str]:
    if job.device == "cpu" or job.hardware.sm is None or job.hardware.sm < (8, 0):
        return False, "the device has no TF32 units"
    if job.pins.preset == "safe":
        return False, "preset safe keeps fp32 matmuls exact"
    return True, "speeds up the few matmuls that stay in fp32"


def graphs(job: Job, passes: Passes, *, compile: Compile) -> tuple[bool, str]:
    """CUDA graphs, if kernel launches may take longer than the kernels and the graphs' private memory fits."""
    if job.device == "cpu":
        return False, "CUDA graphs need a GPU"
    if job.shape.foreign:
        return False, FOREIGN
    if job.is_sharded:
        return False, "sharded weights change their addresses"
    if job.adapters is None:
        time = time_of(job, replace(passes, graphs=False))
        if time is None:
            return False, "the speed of the device is unknown, so the gain is too"
        if not time.may_wait:
            return False, "enough tokens per micro-batch to hide kernel launches"
    if passes.path not in ("fused", "fp8") or compile != "none" or passes.recompute == "selective":
        return False, "they need a fused kernel for every segment, and no compilation"
    if not leaves_room(job, passes):
        return False, f"CUDA graphs keep their activations: the peak must be under {GRAPHS_SHARE:.0%} of memory"
    many = "few tokens" if job.adapters is None else "adapters"
    return True, f"{many} mean many small kernels, and CUDA graphs launch them without waiting for the host"
