"""What the device granted of what the plan wished, decided once, with the reason, before the first step."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flatout.cost import ModelShape
from flatout.errors import EnvironmentLacks
from flatout.hardware import Hardware, unsupported_build
from flatout.plan import Plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# torch's own numbering of its attention backends
BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}


@dataclass(frozen=True, kw_only=True)
class Active:
    """The paths that are really taken. `facts` says each in words, for the terminal and the record."""

    device: torch.device
    dtype: torch.dtype
    attention: str
    varlen: bool
    compile: str
    fused_optimizer: bool
    facts: Mapping[str, str]


def check_build(hardware: Hardware) -> None:
    """Says before anything is allocated when this torch cannot use the GPU that is there."""
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
    """Applies the plan's process-wide settings and finds out what is available."""
    wish = plan.decisions
    dtype = DTYPES[wish.precision or "fp32"]
    facts: dict[str, str] = {}
    if wish.threads:
        torch.set_num_threads(wish.threads)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        facts["deterministic"] = "on: bit-equal from run to run"
    on_gpu = plan.job.device == "gpu"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        if wish.expandable_segments:
            # Read when the first byte is allocated, which has not happened yet.
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(device)
        if wish.memory_fraction:
            torch.cuda.set_per_process_memory_fraction(wish.memory_fraction, device)
        torch.backends.cuda.matmul.fp32_precision = "tf32" if wish.tf32 else "ieee"
        facts["device"] = torch.cuda.get_device_name(device)
    else:
        facts["device"] = f"CPU, {torch.get_num_threads()} threads"
    facts["precision"] = f"{wish.precision}, weights and optimizer in fp32" + (
        ", dynamic loss scaling" if dtype == torch.float16 else ""
    )
    attention, facts["attention"] = _attention(wish.attention or "math", plan.job.shape, dtype, device)
    varlen = plan.job.packing == "documents" and on_gpu and dtype != torch.float32 and attention != "math"
    if plan.job.packing == "documents":
        how = (
            "variable-length flash kernel" if varlen else f"document mask ({'no kernel in fp32' if on_gpu else 'CPU'})"
        )
        facts["attention"] = how
    compiler, facts["compile"] = _compiler(wish.compile or "none", on_gpu=on_gpu)
    facts["optimizer"] = "AdamW, fused" if wish.fused_optimizer else "AdamW, one operation at a time"
    return Active(
        device=device,
        dtype=dtype,
        attention=attention,
        varlen=varlen,
        compile=compiler,
        fused_optimizer=bool(wish.fused_optimizer),
        facts=facts,
    )


def _attention(wish: str, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> tuple[str, str]:
    """Leaves only the wished backend and plain math on, and asks torch's dispatcher which one it then takes."""
    cuda = torch.backends.cuda
    cuda.enable_cudnn_sdp(wish == "cudnn")
    cuda.enable_flash_sdp(wish == "flash")
    cuda.enable_mem_efficient_sdp(wish == "efficient")
    cuda.enable_math_sdp(True)
    q = torch.zeros(1, shape.heads, 128, shape.head_dim, device=device, dtype=dtype)
    k = torch.zeros(1, shape.kv_heads, 128, shape.head_dim, device=device, dtype=dtype)
    chosen = torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=shape.heads != shape.kv_heads)
    found = BACKENDS.get(int(chosen), "math")
    if found == wish:
        return found, f"{found}, as torch's dispatcher chose"
    return found, f"{found}: torch's dispatcher refused {wish} for {dtype} heads of {shape.head_dim} on this device"


def _compiler(wish: str, *, on_gpu: bool) -> tuple[str, str]:
    if wish == "none":
        return wish, "off: eager"
    if on_gpu:
        if importlib.util.find_spec("triton") is None:
            return "none", "off: triton is not installed"
    elif not (shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")):
        return "none", "off: compiling for a CPU needs a C++ compiler, and none is on the PATH"
    return wish, f"per block, whole graph, static shapes ({wish})"
