"""The fields that readers use of plan.json, config.json and the monitor's samples, and their types.

Other fields are ignored. A file whose data has other types is refused by name,
so that no reader gets text where it expects a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, TypedDict

from flatout.files import Count, Finite

# The value of a table cell. Any: code that uses it as a number checks first.
Scalar = Annotated[
    Any,
    lambda value: (
        value is None or isinstance(value, str | bool | float) or (isinstance(value, int) and abs(value) < 2**63)
    ),
    "a number, a text, true, false or null",
]
Positive = Annotated[float, lambda value: 0 < value <= 1e30, "a number above 0"]
Process = Annotated[int, lambda value: 0 < value < 2**31, "the number of a process"]


# -- plan.json, config.json, monitor.jsonl


@dataclass
class _Flops:
    forward: Positive
    backward: Annotated[float, lambda value: 0 <= value <= 1e30, "a number from 0 on"]
    recomputed: Finite
    common: Finite
    attention: Finite = 0.0
    critic: Finite = 0.0


@dataclass
class _Rates:
    flops: _Flops
    peak_flops: Positive | None
    num_devices: Annotated[int, lambda value: 0 < value < 10**9, "a number of devices"] = 1
    precision: str | None = None
    peak_source: str | None = None


class _Job(TypedDict, total=False):
    steps: Count | None


class _Predicted(TypedDict, total=False):
    peak_gib: Finite | None
    memory_gib: Mapping[str, Finite]
    tokens_per_s: Finite | None
    step_s: Finite | None
    mfu: Finite | None
    mfu_common: Finite | None
    hours: Finite | None
    parts_s: Mapping[str, Finite | None]
    parts_unknown: Mapping[str, str]
    actor_mfu: Finite | None
    critic_mfu: Finite | None


class _Decisions(TypedDict, total=False):
    micro_batch: Count | None
    accumulation: Count | None
    workers: Count | None
    recompute: str | None
    precision: str | None
    tf32: bool | None
    sharding: str | None
    compile: str | None
    fused_qkv: bool | None
    fused_mlp: bool | None
    fused_loss: bool | None
    fp8: bool | None


class PlanView(TypedDict, total=False):
    foreign: bool
    decisions: _Decisions
    reasons: Mapping[str, str]
    predicted: _Predicted
    job: _Job
    rates: _Rates


class _Target(TypedDict, total=False):
    val_loss: Finite | None


class ConfigView(TypedDict, total=False):
    recipe: str
    model: Mapping[str, Any]
    criteria: Mapping[str, Any]
    target: _Target | None
    train: Mapping[str, Any] | None
    plan: Mapping[str, Any] | None
    eval: Mapping[str, Any] | None
    save: Mapping[str, Any] | None


class _Measured(TypedDict, total=False):
    flops: Mapping[str, Finite]


class HardwareView(TypedDict, total=False):
    gpu: str | None
    measured: _Measured | None
    bandwidth: Positive | None
    peak_flops: Mapping[str, Positive]


class EnvironmentView(TypedDict, total=False):
    run_id: Annotated[str, lambda value: len(value) == 32, "32 hexadecimal digits"]


class LimitView(TypedDict, total=False):
    """Of findings.json."""

    tokens_per_s: Finite | None
    ceiling_tokens_per_s: Finite | None
    share: Finite | None


class _Gpu(TypedDict):
    index: Count
    throttle: NotRequired[list[str]]
    busy: NotRequired[Finite]
    sm_active: NotRequired[Finite]
    tensor_active: NotRequired[Finite]
    dram_active: NotRequired[Finite]
    memory_gib: NotRequired[Finite]
    memory_total_gib: NotRequired[Finite]
    power_w: NotRequired[Finite]
    temperature_c: NotRequired[Finite]
    sm_clock_mhz: NotRequired[Finite]


GPU_NUMBERS = tuple(name for name in _Gpu.__annotations__ if name not in ("index", "throttle"))


class Sample(TypedDict):
    time: Finite
    cpu: NotRequired[Finite]
    ram_gib: NotRequired[Finite]
    ram_total_gib: NotRequired[Finite]
    gpus: NotRequired[list[_Gpu]]
