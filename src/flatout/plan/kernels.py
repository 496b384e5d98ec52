"""Arithmetic and kernels: precision, fused segments, 8 bits, compilation, attention, recorded passes."""

from __future__ import annotations

from dataclasses import replace

from flatout.config.settings import Attention, Compile, Precision, Recompute
from flatout.cost import SHORT_DOCUMENT, BlockPath
from flatout.plan.job import Job
from flatout.plan.predict import COMPILE_S, GRAPHS_SHARE, Passes, compile_break_even, full_step_s, leaves_room, time_of

# Why a foreign model has no fast paths.
FOREIGN = "the model runs as transformers builds it"
# Narrower layers gain nothing by 8-bit matmuls.
FP8_HIDDEN = 768


def precision(job: Job) -> tuple[Precision, str]:
    sm = job.hardware.sm
    if job.device == "cpu":
        peaks = job.hardware.peak_flops
        if "bf16" not in peaks or "fp32" not in peaks:
            return "fp32", "a CPU, bf16 speed not measured"
        ratio = peaks["bf16"] / peaks["fp32"]
        if ratio >= 1.5:
            return "bf16", f"bf16 matmuls measured {ratio:.1f} times as fast as fp32 on this CPU"
        return "fp32", f"a CPU without fast bf16 units: bf16 measured {ratio:.2g} times the speed of fp32"
    if sm is None:
        return "fp32", "the GPU's SM version is unknown"
    if sm < (8, 0):
        return "fp16", f"SM {sm[0]}.{sm[1]} has fp16 tensor cores but no bf16 units; loss scaling is on"
    return "bf16", f"SM {sm[0]}.{sm[1]} has bf16 tensor cores; no loss scaling needed"


def segments(job: Job, *, precision: Precision) -> list[tuple[str, bool, str]]:
    """The fused segments, and 8-bit matmuls in them."""
    shape = job.shape
    no = _no_segments(job, precision=precision)
    foreign = FOREIGN if shape.foreign else None
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


def _no_segments(job: Job, *, precision: Precision) -> str | None:
    """Why no fused segment runs, or None."""
    sm = job.hardware.sm
    if job.device == "cpu":
        return "kernels are for GPUs"
    if job.pins.preset == "safe":
        return "preset safe uses library operations only"
    if sm is None or sm < (8, 0) or precision == "fp32":
        return "written for bf16 tensor cores, SM 8.0 and up"
    if job.adapters is not None and job.adapters.base_bits == 4:
        return "the fused segments take no 4-bit weights"
    if job.adapters is not None and job.adapters.dropout:
        return "the fused segments take no adapter dropout"
    if job.pins.recompute == "selective":
        return "selective recomputation keeps what they would overwrite"
    return None


def _fp8(job: Job, *, precision: Precision, no: str | None) -> tuple[bool, str]:
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
    fused, eight = (full_step_s(job, precision=precision, path=path) for path in _WITHOUT_AND_WITH)
    if fused is None or eight is None or eight >= fused:
        return False, "too few tokens a micro-batch to gain by it"
    gain = fused / eight - 1
    return True, f"predicted {gain:.0%} faster: twice the tensor-core rate, scales follow the largest values seen"


_WITHOUT_AND_WITH: tuple[BlockPath, BlockPath] = ("fused", "fp8")


def compiler(job: Job, *, precision: Precision, fused: bool) -> tuple[Compile, str]:
    if job.device == "cpu":
        return "none", "eager kernels are near the limit of a CPU, and compiling takes minutes"
    if job.pins.preset == "safe":
        return "none", "preset safe runs eager"
    if job.shape.foreign:
        return "none", FOREIGN
    if fused:
        return "none", "every segment has its kernel: nothing is left to fuse, and nothing to wait for"
    gain = "fuses norms, rotary positions, SwiGLU and the loss; one graph serves every block"
    step = compile_break_even(job, precision=precision)
    if step is None:
        return "default", gain
    if job.steps is not None and job.steps < step:
        return "none", f"about {COMPILE_S:.0f} s of compiling would pay from step {step} on (estimated)"
    return "default", f"{gain}; about {COMPILE_S:.0f} s of compiling pay from step {step} on (estimated)"


def attention(job: Job, *, precision: Precision, compile: Compile, recompute: Recompute) -> tuple[Attention, str]:
    sm = job.hardware.sm
    if job.device == "cpu":
        return "flash", "torch's blocked CPU kernel: no T x T scores in memory"
    if sm is None or sm < (8, 0):
        return "efficient", "flash kernels need SM 8.0"
    if precision == "fp32":
        return "efficient", "the one fused kernel that takes fp32"
    if no_short(job, precision=precision, compile=compile, recompute=recompute) is None:
        return "short", f"no document has more than {SHORT_DOCUMENT} tokens: its scores are made whole, in one tile"
    if job.packing == "documents":
        return "flash", "packed documents run by the variable-length flash kernel"
    if sm >= (9, 0) and job.shape.head_dim <= 128:
        return "cudnn", f"cuDNN's kernel is the fastest on SM {sm[0]}.{sm[1]}"
    return "flash", f"flash is the fastest kernel on SM {sm[0]}.{sm[1]} for heads of {job.shape.head_dim}"


def no_short(job: Job, *, precision: Precision, compile: Compile, recompute: Recompute) -> str | None:
    """Why the kernel for short documents does not go with the rest, or None."""
    sm, width = job.hardware.sm, job.shape.head_dim
    if job.packing != "documents":
        return "documents are not packed"
    if job.longest is None:
        return f"the length of the longest document is unknown, and it takes at most {SHORT_DOCUMENT} tokens"
    if job.longest > SHORT_DOCUMENT:
        return f"the longest document has {job.longest} tokens, not at most {SHORT_DOCUMENT}"
    if job.device == "cpu" or sm is None or sm < (8, 0) or precision == "fp32":
        return "it is for 16 bits from SM 8.0 on"
    if not 16 <= width <= 128 or width & (width - 1):
        return f"it has no tile for heads of {width}"
    if compile != "none" or recompute == "selective":
        return "not with compile or selective recomputation"
    return None


def tf32(job: Job) -> tuple[bool, str]:
    if job.device == "cpu" or job.hardware.sm is None or job.hardware.sm < (8, 0):
        return False, "the device has no TF32 units"
    if job.pins.preset == "safe":
        return False, "preset safe keeps fp32 matmuls exact"
    return True, "for the few matmuls that stay in fp32"


def graphs(job: Job, passes: Passes, *, compile: Compile) -> tuple[bool, str]:
    """Where launches may take longer than what they launch, and memory is left for what a recording keeps to itself."""
    if job.device == "cpu":
        return False, "nothing is launched"
    if job.shape.foreign:
        return False, FOREIGN
    if job.adapters is None:
        time = time_of(job, replace(passes, graphs=False))
        if time is None:
            return False, "how fast the device is, and whether it might wait, is not known"
        if not time.may_wait:
            return False, "enough tokens a micro-batch to hide the launches"
    if passes.path not in ("fused", "fp8") or compile != "none" or passes.recompute == "selective":
        return False, "only where every segment has its kernel, and nothing is compiled"
    if not leaves_room(job, passes):
        return False, f"a recording keeps its activations: only where the peak is under {GRAPHS_SHARE:.0%} of memory"
    many = "few tokens" if job.adapters is None else "adapters"
    return True, f"{many} mean many small kernels: launched whole, they do not wait for the host"
