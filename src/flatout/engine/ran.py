"""What a step ran, by the names of the operators and kernels that a profiler saw: it stands beside the plan.

A plan decides and `resolve` tests each path; only this says what was called in the end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flatout.plan import Decisions

DTYPES = {"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16"}
EIGHT_BITS = "8-bit"
PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"))
# Operators of the attention kernels, by the names that a plan gives them.
ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "torch_attn::_varlen_attn": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
    "_Attend": "short",
}
# Kernels of the same, which a replayed CUDA graph launches without an operator.
ATTENTION_KERNELS = {
    "cudnn": re.compile("cudnn.*sdpa"),
    "flash": re.compile("flash_fwd"),
    "efficient": re.compile("fmha_"),
}
# The autograd functions of the fused segments and the operator of 8-bit products, and their kernels.
SEGMENTS = {
    "fused_qkv": ("_NormQkvRope", "_rotate", "_norm_rotate"),
    "fused_mlp": ("_NormMlp", "_swiglu_forward"),
    "fp8": ("aten::_scaled_mm", "_quantise"),
}
FUSED_OPTIMIZER, COMPILED, GRAPH = "aten::_fused_adamw_", "Torch-Compiled Region", "cudaGraphLaunch"
UNFUSED_OPTIMIZER = re.compile(r"aten::(_foreach_)?addcdiv_")


@dataclass(frozen=True, kw_only=True)
class Calls:
    """How often each operator was called, and the data types of the matrix products."""

    names: Mapping[str, int]
    products: Mapping[str, int]

    @classmethod
    def of(cls, events: Iterable[Any]) -> Calls:
        """From the raw events of torch's profiler, recorded with shapes."""
        names, products = Counter[str](), Counter[str]()
        for event in events:
            name = str(event.name())
            names[name] += 1
            if name in PRODUCTS:
                dtype = next(iter(event.dtypes()), "")
                products[EIGHT_BITS if "Float8" in dtype else DTYPES.get(dtype, dtype or "unknown")] += 1
        return cls(names=names, products=products)

    def count(self, prefix: str) -> int:
        return sum(number for name, number in self.names.items() if name.startswith(prefix))


@dataclass(frozen=True, kw_only=True)
class Path:
    """A decision of the plan, what ran in its place, and what says so."""

    planned: str
    ran: str
    seen: str


def paths(calls: Calls, decisions: Decisions, *, on_gpu: bool) -> dict[str, Path]:
    """What ran, for each decision that names can tell; those that they cannot are left out."""
    planned = {name: _word(value) for name, value in asdict(decisions).items()}
    found = {
        "precision": _precision(calls),
        "attention": _attention(calls),
        "compile": _compile(calls, planned["compile"]),
        "fused_optimizer": _optimizer(calls),
    }
    if on_gpu:
        replayed = calls.names.get(GRAPH, 0)
        for name, functions in SEGMENTS.items():
            seen = next((each for each in functions if calls.names.get(each)), functions[0])
            if (number := calls.names.get(seen, 0)) or calls.products or not replayed:
                found[name] = (_word(number > 0), f"{seen} called {number} times")
        if replayed:
            found["graphs"] = ("yes", f"{GRAPH} called {replayed} times")
    return {
        name: Path(planned=planned[name], ran=one[0], seen=one[1]) for name, one in found.items() if one is not None
    }


def _word(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _precision(calls: Calls) -> tuple[str, str] | None:
    """The type of most matrix products; those in 8 bits are the matter of another decision."""
    plain = Counter({name: number for name, number in calls.products.items() if name != EIGHT_BITS})
    if not plain:
        return None
    rest = [f"{name} in {number}" for name, number in Counter(calls.products).most_common()]
    return plain.most_common(1)[0][0], f"{', '.join(rest)} of {sum(calls.products.values())} matrix products"


def _attention(calls: Calls) -> tuple[str, str] | None:
    kernels = Counter[str]()
    for name, number in calls.names.items():
        operator = next((known for known in ATTENTION if name.removesuffix(".default") == known), None)
        if operator is not None:
            kernels[operator] += number
    if not kernels:
        return _attention_kernel(calls)
    kinds = list(dict.fromkeys(ATTENTION[name] for name, _ in kernels.most_common()))
    return ", ".join(kinds), ", ".join(f"{name} called {number} times" for name, number in kernels.most_common())


def _attention_kernel(calls: Calls) -> tuple[str, str] | None:
    for kind, pattern in ATTENTION_KERNELS.items():
        for name, number in calls.names.items():
            if pattern.search(name):
                return kind, f"{name:.60} called {number} times"
    return None


def _compile(calls: Calls, planned: str) -> tuple[str, str]:
    number = calls.count(COMPILED)
    if not number:
        return "none", "no compiled region was called"
    return "default" if planned == "none" else planned, f"{number} calls of compiled regions"


def _optimizer(calls: Calls) -> tuple[str, str] | None:
    if number := calls.names.get(FUSED_OPTIMIZER, 0):
        return "yes", f"{FUSED_OPTIMIZER} called {number} times"
    number = sum(count for name, count in calls.names.items() if UNFUSED_OPTIMIZER.fullmatch(name))
    return ("no", f"addcdiv called {number} times") if number else None
