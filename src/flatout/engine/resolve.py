"""Decides once, before the first step, which of the plan's requests this device supports, with the reasons."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.cost import SHORT_DOCUMENT, ModelShape
from flatout.errors import EnvironmentLacks, first_line
from flatout.hardware import Hardware, unsupported_build
from flatout.model import Attend, Rectangular, Short, Varlen
from flatout.plan import Plan, no_short
from flatout.words import counted

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Attention backends in the order they are tried after the requested one.
PREFERENCE = {"cuda": ("flash", "cudnn", "efficient", "math"), "cpu": ("flash", "math")}


@dataclass(frozen=True, kw_only=True)
class Active:
    """The active paths. `facts` describes each, for the terminal and the record."""

    device: torch.device
    dtype: torch.dtype
    attention: str
    repeat_kv: bool
    varlen: bool
    compile: str
    fused_optimizer: bool
    facts: Mapping[str, str]
    fused_qkv: bool = False
    fused_mlp: bool = False
    fused_loss: bool = False
    fp8: bool = False
    graphs: bool = False
    window: int | None = None  # of the layers after the first `full_layers`
    full_layers: int = 0


def check_build(hardware: Hardware) -> None:
    """Refuses a torch build that cannot use this machine's GPU, before anything is allocated."""
    if hardware.gpu is None:
        return
    if not torch.cuda.is_available():
        raise EnvironmentLacks(
            f"this machine has {hardware.num_gpus} x {hardware.gpu}, but torch {torch.__version__} cannot use it "
            f"(built for CUDA: {torch.version.cuda or 'no'}; driver {hardware.driver or 'unknown'}): install a CUDA "
            "build of torch that this driver supports, or train on the CPU with CUDA_VISIBLE_DEVICES="
        )
    problem = unsupported_build(
        sm=hardware.sm, arch_list=torch.cuda.get_arch_list(), torch_version=str(torch.__version__)
    )
    if problem:
        raise EnvironmentLacks(problem)


def resolve(plan: Plan, *, local_rank: int, deterministic: bool) -> Active:
    """Applies the plan's process-wide settings and finds the available paths."""
    requested = plan.decisions
    dtype = DTYPES[requested.precision]
    facts: dict[str, str] = {}
    torch.set_num_threads(requested.threads)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        facts["deterministic"] = "on: bit-equal from run to run"
    on_gpu = plan.job.device == "gpu"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        if requested.expandable_segments:
            # torch reads this at the first allocation, which has not happened yet.
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(device)
        torch.cuda.set_per_process_memory_fraction(requested.memory_fraction, device)
        torch.backends.cuda.matmul.fp32_precision = "tf32" if requested.tf32 else "ieee"
        facts["device"] = torch.cuda.get_device_name(device)
    else:
        facts["device"] = f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    held = "weights and optimizer in fp32"
    if (adapters := plan.job.adapters) is not None:
        frozen = "4 bits" if adapters.base_bits == 4 else requested.precision
        held = f"frozen weights in {frozen}, adapters of rank {adapters.rank} and optimizer in fp32"
    facts["precision"] = f"{requested.precision}, {held}" + (", dynamic loss scaling" if dtype == torch.float16 else "")
    if plan.job.shape.foreign:
        facts["model"] = f"as transformers builds it: {plan.job.shape.foreign}"
        attention, repeat_kv, facts["attention"] = "transformers", False, "as transformers chooses it"
    else:
        # Batches without short documents use the library's kernel.
        backend = "flash" if requested.attention == "short" else requested.attention
        attention, repeat_kv, facts["attention"] = _attention(backend, plan.job.shape, dtype, device)
    varlen, window = False, plan.job.shape.window
    slides = window is not None and plan.job.sequence_length > window
    if plan.job.packing == "documents" and plan.job.shape.foreign:
        facts["attention"] = "documents packed or padded, attention as transformers chooses it"
    elif plan.job.packing == "documents" or slides:
        sm = plan.job.hardware.sm
        varlen = on_gpu and dtype != torch.float32 and sm is not None and sm >= (8, 0)
        why = "on a CPU" if not on_gpu else "in fp32" if dtype == torch.float32 else "below SM 8.0"
        what = (
            "documents padded or masked: no kernel for them" if plan.job.packing == "documents" else "masked: no kernel"
        )
        how = "; attention: math" if requested.attention == "math" else ""
        facts["attention"] = "variable-length flash kernel" if varlen else f"{what} {why}{how}"
        repeat_kv = repeat_kv and plan.job.packing != "documents"  # layers without a window use the other kernel
        if varlen and (problem := _try_varlen(plan.job.shape, dtype, device)):
            repeat_kv = True
            facts["attention"] += f", keys and values repeated for it: {problem}"
    if requested.attention == "short" and not plan.job.shape.foreign:
        if problem := _try_short(plan, dtype, device):
            facts["attention"] += f"; short is not available: {problem}"
        else:
            attention, facts["attention"] = "short", f"our own for documents of at most {SHORT_DOCUMENT} tokens"
    kernels, words = _kernels(plan, dtype, device)
    facts |= words
    compiler, facts["compile"] = _compiler(requested.compile, on_gpu=on_gpu)
    problem = _no_graphs(plan, compiler, on_gpu=on_gpu)
    if requested.graphs:
        facts["graphs"] = f"off: {problem}" if problem else "forward and backward pass as CUDA graphs"
    facts["optimizer"] = "AdamW, fused" if requested.fused_optimizer else "AdamW, one operation at a time"
    return Active(
        device=device,
        dtype=dtype,
        attention=attention,
        repeat_kv=repeat_kv,
        varlen=varlen,
        compile=compiler,
        fused_optimizer=requested.fused_optimizer,
        facts=facts,
        graphs=requested.graphs and problem is None,
        window=window,
        full_layers=plan.job.shape.full_layers,
        **kernels,
    )


def _no_graphs(plan: Plan, compiler: str, *, on_gpu: bool) -> str | None:
    """Why CUDA graphs cannot be used, or None."""
    adapters = plan.job.adapters
    if not on_gpu:
        return "CUDA graphs need a GPU"
    if plan.job.shape.foreign:
        return "the model runs as transformers builds it"
    if compiler != "none" or plan.decisions.recompute == "selective":
        return "they do not work with compile or selective recomputation"
    return "dropout needs new random numbers in every pass" if adapters is not None and adapters.dropout else None


def _kernels(plan: Plan, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, bool], dict[str, str]]:
    """Which fused kernels run here, and the reason if a requested one does not."""
    requested = plan.decisions
    kernels_requested = {"qkv": requested.fused_qkv, "mlp": requested.fused_mlp, "loss": requested.fused_loss}
    available = dict.fromkeys(kernels_requested, False)
    words: dict[str, str] = {}
    general = no_triton(device) if any(kernels_requested.values()) else None
    adapters = plan.job.adapters
    if adapters is not None and (adapters.dropout or adapters.base_bits == 4):
        general = "they do not support adapter dropout or 4-bit weights"
    if requested.recompute == "selective":
        general = "selective recomputation keeps what they would overwrite"
    no_fp8 = None
    if requested.fp8:
        no_fp8 = why_no_fp8(device, dtype) if adapters is None else "adapters need 16-bit matmuls"
    eight = requested.fp8 and no_fp8 is None and device.type == "cuda"
    for name, wanted in kernels_requested.items():
        problem = general
        if wanted and not general:
            problem = try_kernel(name, shape=plan.job.shape, dtype=dtype, device=device, eight=eight)
        available[name] = wanted and problem is None
        words[f"{name} kernel"] = "fused" if available[name] else f"plain: {problem}" if wanted else "plain"
    fp8 = requested.fp8 and any(available.values()) and no_fp8 is None
    if requested.fp8:
        words["fp8"] = "on: 8-bit matmuls in the fused segments" if fp8 else f"off: {no_fp8 or 'no fused segment'}"
    return {f"fused_{name}": on for name, on in available.items()} | {"fp8": fp8}, words


def no_triton(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from flatout.kernels.launch import interpreted

    if device.type != "cuda" and not interpreted():
        return "the kernels need a GPU"
    return None


def why_no_fp8(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why 8-bit matmuls do not run here; None if they do, and the kernels around them are correct."""
    if device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "FP8 tensor cores need SM 8.9 or newer"
    if dtype != torch.bfloat16:
        return f"it works only with bf16, not {dtype}"
    from flatout.kernels import fp8, rows

    # Triton 3.6 transposes some 8-bit tiles wrongly, so any version is checked.
    x = torch.randn(64, 192, device=device, dtype=dtype)
    scale = fp8.Scale.own(fp8.FORWARD, device)
    try:
        copy = fp8.quantise(x, scale)
        _, gradient = rows.cross_entropy8(x, torch.arange(64, device=device), scale)
        if not all(torch.equal(both.rows.float().t(), both.cols.float()) for both in (copy, gradient)):
            return "this version of Triton transposes 8-bit tiles wrongly"
        fp8.matmul(copy.rows, copy.rows, copy.inverse, copy.inverse, dtype=dtype, fast=True)
    except Exception as error:  # any error of a compiler or library on this machine is the answer
        return f"{type(error).__name__}: {first_line(error)}"[:120]
    return None


def try_kernel(
    name: str, *, shape: ModelShape, dtype: torch.dtype, device: torch.device, eight: bool = False
) -> str | None:
    """Why a fused segment cannot be used for training here; None if a forward and backward pass succeeded.

    With `eight` it is tried in 8 bits, as the run uses it, so that no unused kernel is compiled.
    """
    from flatout.kernels import fp8, rows, segments

    if name == "qkv" and shape.qk_norm and shape.head_dim & (shape.head_dim - 1):
        return f"query and key norms need a head width that is a power of two, not {shape.head_dim}"
    tokens = 16

    def zeros(*size: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(size, device=device, dtype=kind, requires_grad=True)

    def stream() -> torch.Tensor:
        return zeros(tokens, shape.hidden, kind=dtype)

    def scale(kind: torch.dtype) -> fp8.Scale:
        return fp8.Scales([kind], device)[0]

    def copies(*weights: torch.Tensor) -> list[fp8.Weight]:
        made = [fp8.Weight(weight) for weight in weights]
        fp8.Weight.refresh(list(weights), made)
        return made

    up, down = fp8.FORWARD, fp8.BACKWARD
    try:
        if name == "qkv":
            weight, angles = zeros(shape.q_width + 2 * shape.kv_width, shape.hidden), (tokens, 1, shape.head_dim // 2)
            cos = torch.ones(angles, device=device)
            eight_qkv = None
            if eight and not shape.qkv_bias:
                eight_qkv = segments.Qkv8(x=scale(up), d_qkv=scale(down), weight=copies(weight)[0])
            q_norm, k_norm = (zeros(shape.head_dim) if shape.qk_norm else None for _ in range(2))
            _, q, k, v = segments.norm_qkv_rope(
                stream(), stream(), zeros(shape.hidden), weight, None, q_norm, k_norm, cos, cos, eps=1e-5,
                heads=shape.heads, groups=shape.kv_heads, scales=eight_qkv,
            )  # fmt: skip
            (q.sum() + k.sum() + v.sum()).backward()
        elif name == "mlp":
            wide, narrow = zeros(2 * shape.intermediate, shape.hidden), zeros(shape.hidden, shape.intermediate)
            eight_mlp = None
            if eight:
                gate_up, narrowed = copies(wide, narrow)
                kinds = {"x": scale(up), "h": scale(up), "d_out": scale(down), "d_gate_up": scale(down)}
                eight_mlp = segments.Mlp8(**kinds, gate_up=gate_up, down=narrowed)
            normed = zeros(shape.hidden)
            out = segments.norm_mlp(stream(), stream(), normed, wide, narrow, eps=1e-5, scales=eight_mlp)[1]
            out.sum().backward()
        else:
            logits = torch.zeros(tokens, 512, device=device, dtype=dtype)
            rows.cross_entropy_(logits, torch.zeros(tokens, dtype=torch.long, device=device))
    except Exception as error:  # any error of a compiler on this machine is the answer
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0] if text else ''}"[:120]
    return None


def _attention(requested: str, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> tuple[str, bool, str]:
    """The first backend, starting with the requested one, that runs a forward and backward pass as in training.

    Only it and plain math stay enabled. Also returns whether keys and values must be repeated for it, and why.
    """
    refused: list[str] = []
    for name in (requested, *(other for other in PREFERENCE[device.type] if other != requested)):
        for repeat_kv in (False, True) if shape.heads != shape.kv_heads else (False,):
            problem = None if name == "math" else _try_attention(name, shape, dtype, device, repeat_kv=repeat_kv)
            if problem is None:
                _enable(name, math=True)
                groups = ", keys and values repeated for it" if repeat_kv else ""
                before = f" ({'; '.join(refused)})" if refused else ""
                return name, repeat_kv, f"{name}{groups}: supports {dtype} heads of {shape.head_dim} here{before}"
        refused.append(f"{name} failed: {problem}")
    raise AssertionError("math takes everything")


def _try_attention(
    name: str, shape: ModelShape, dtype: torch.dtype, device: torch.device, *, repeat_kv: bool
) -> str | None:
    """Why this backend cannot be used for training; None if it can."""
    _enable(name, math=False)
    sizes = ((128, heads, shape.head_dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    inputs = [torch.zeros(size, device=device, dtype=dtype, requires_grad=True) for size in sizes]
    try:
        Rectangular(batch=1, repeat_kv=repeat_kv)(*inputs).sum().backward()
    except RuntimeError as error:
        return first_line(error)[:100]
    return None


def _try_varlen(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the variable-length kernel needs repeated keys and values here; None if its grouped heads are correct."""
    if shape.heads == shape.kv_heads:
        return None
    ends = _ends(80, device)
    repeated, as_they_are = (Varlen(cu_seqlens=ends, longest=80, repeat_kv=repeat) for repeat in (True, False))
    return _differs(as_they_are, repeated, ends, shape, dtype)


def _try_short(plan: Plan, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernel for short documents does not run here. It is tried with the tile that the run's documents need."""
    longest = plan.job.longest or 0
    requested = plan.decisions
    refused = no_short(
        plan.job, precision=requested.precision, compile=requested.compile, recompute=requested.recompute
    )
    if problem := refused or no_triton(device):
        return problem
    ends = _ends(longest, device)
    library = Varlen(cu_seqlens=ends, longest=longest, repeat_kv=True)
    return _differs(Short(cu_seqlens=ends, longest=longest), library, ends, plan.job.shape, dtype)


def _ends(longest: int, device: torch.device) -> Tensor:
    """The ends of two documents and an empty one, to try a kernel on."""
    last = longest + (longest + 1) // 2
    return torch.tensor([0, longest, last, last], dtype=torch.int32, device=device)


def _differs(tried: Attend, plain: Attend, ends: Tensor, shape: ModelShape, dtype: torch.dtype) -> str | None:
    """Why one attention cannot replace another, including gradients; None if it can."""
    generator = torch.Generator(ends.device).manual_seed(0)
    sizes = [(int(ends[-1]), heads, shape.head_dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    inputs = [torch.randn(size, device=ends.device, dtype=dtype, generator=generator) for size in sizes]
    found = []
    try:
        for attend in (plain, tried):
            given = [x.clone().requires_grad_() for x in inputs]
            out = attend(*given)
            out.float().square().sum().backward()
            found.append([out.detach().float(), *(x.grad.float() for x in given if x.grad is not None)])
    except Exception as error:  # any error of a compiler or library on this machine is the answer
        return f"{type(error).__name__}: {first_line(error)}"[:120]
    apart = [float((a - b).norm() / a.norm()) for a, b in zip(*found, strict=True)]
    return None if all(x < 2e-2 for x in apart) else f"its results differ by {max(apart):.2g}"


def _enable(name: str, *, math: bool) -> None:
    cuda = torch.backends.cuda
    cuda.enable_cudnn_sdp(name == "cudnn")
    cuda.enable_flash_sdp(name == "flash")
    cuda.enable_mem_efficient_sdp(name == "efficient")
    cuda.enable_math_sdp(math or name == "math")


def _compiler(requested: str, *, on_gpu: bool) -> tuple[str, str]:
    if requested == "none":
        return requested, "off: eager"
    if on_gpu:
        if importlib.util.find_spec("triton") is None:
            return "none", "off: triton is not installed"
    elif not (shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")):
        return "none", "off: compiling for a CPU needs a C++ compiler on the PATH"
    return requested, f"per block, whole graph, static shapes ({requested})"
