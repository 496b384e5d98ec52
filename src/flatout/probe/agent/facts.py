"""Facts of the environment, the model's parts and the optimizer."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections import Counter
from typing import Any

from .hooks import quietly
from .tensors import number

# Settings of the environment that cost time or tell how the job was started; never the whole environment.
VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_DEBUG",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_COMPILE_DISABLE",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_LOGS",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TORCHDYNAMO_DISABLE",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
)


def plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def dtype_name(dtype: Any) -> str:
    return str(dtype).replace("torch.", "")


def is_linear(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__ in ("Linear", "Conv1D", "NonDynamicallyQuantizableLinear")
        and weight is not None
        and weight.dim() == 2
    )


def matmul_weights(module: Any) -> list[Any]:
    """The matrices of this module, without its children's, that multiply its input."""
    if is_linear(module):
        return [module.weight]
    if type(module).__name__ != "MultiheadAttention":
        return []
    names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    return [weight for weight in (getattr(module, name, None) for name in names) if weight is not None]


def config_of(config: Any) -> dict[str, Any]:
    """The numbers and words of a model's configuration; nothing nested, nothing executable."""
    values = config.to_dict() if hasattr(config, "to_dict") else getattr(config, "__dict__", {})
    return {str(k): v for k, v in values.items() if isinstance(v, (int, float, str, bool)) and len(str(v)) < 100}


def optimizer_facts(optimizer: Any) -> dict[str, Any]:
    group = optimizer.param_groups[0]
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    return {
        "class": type(optimizer).__name__,
        "module": type(optimizer).__module__,
        "fused": group.get("fused"),
        "foreach": group.get("foreach"),
        "lr": number(group.get("lr")),
        "tensors": len(parameters),
        "elements": sum(p.numel() for p in parameters),
        "devices": dict(Counter(p.device.type for p in parameters)),
        "dtypes": dict(Counter(dtype_name(p.dtype) for p in parameters)),
    }


def plain_lr(optimizer: Any) -> float | None:
    """A learning rate that is a tensor on the device is not read: that would wait for it."""
    rate = optimizer.param_groups[0].get("lr")
    return float(rate) if isinstance(rate, (int, float)) else None


def trainer_arguments() -> list[str] | None:
    """The names this version of transformers knows, so that no advice names another."""
    module = sys.modules.get("transformers.training_args")
    fields = getattr(getattr(module, "TrainingArguments", None), "__dataclass_fields__", None)
    return None if fields is None else sorted(fields)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_cores() -> int:
    """This rank's part of the cores."""
    return max(1, num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def version_of(name: str) -> str | None:
    module = sys.modules.get(name)
    if module is None:
        return None
    if found := getattr(module, "__version__", None):
        return str(found)
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def matmul_precision(torch: Any) -> str:
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # from 2.9 on: set by fp32_precision, after which this question is refused
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def flags_of(torch: Any) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "matmul_precision": matmul_precision(torch),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": dtype_name(torch.get_default_dtype()),
    }
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        enabled = getattr(torch.backends.cuda, f"{name}_sdp_enabled", None)
        flags[f"{name}_sdp"] = None if enabled is None else quietly(enabled)()
    return flags


def gpu_facts(torch: Any) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    stats = torch.cuda.memory_stats()
    return {
        "name": properties.name,
        "sm": [properties.major, properties.minor],
        "memory_gib": properties.total_memory / 2**30,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "alloc_retries": stats.get("num_alloc_retries", 0),
        "device_mallocs": stats.get("num_device_alloc", None),
    }


def process_cpu_s() -> float:
    """CPU seconds of this process and of the children that have ended: what the job itself uses, graders included."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def compile_seconds() -> float:
    """Seconds torch.compile has worked so far in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    times = getattr(utils, "compilation_time_metrics", None) or {}
    with contextlib.suppress(Exception):
        # The outermost entry holds all others; its name has changed once.
        outer = [v for k, v in times.items() if k.endswith("compile_inner")] or [
            v for k, v in times.items() if "_compile" in k
        ][:1]
        return float(sum(sum(v) for v in outer))
    return 0.0


def graph_count() -> int | None:
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    return None if counters is None else int(counters["stats"].get("unique_graphs", 0))
