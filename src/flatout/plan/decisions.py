"""The decisions of a plan: every field has a value, whether a user pinned it (`PlanSettings`) or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from flatout.config.settings import Attention, Compile, PlanSettings, Precision, Recompute, Sharding

T = TypeVar("T")
PINNED = "pinned in the configuration"


def pin_reason(pins: PlanSettings, name: str) -> str:
    """Why a decision is not the plan's: the user pinned it, or the preset sets it."""
    return f"set by preset {pins.preset}" if name in pins.implied else PINNED


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """The fields of `PlanSettings` except the preset, in display order."""

    precision: Precision
    micro_batch: int
    accumulation: int
    sharding: Sharding
    recompute: Recompute
    compile: Compile
    attention: Attention
    fused_qkv: bool
    fused_mlp: bool
    fused_loss: bool
    fp8: bool
    loss_chunk: int
    tf32: bool
    graphs: bool
    fused_optimizer: bool
    workers: int
    prefetch: int
    pin_memory: bool
    expandable_segments: bool
    memory_fraction: float
    manual_gc: bool
    threads: int


@dataclass(kw_only=True)
class Choices:
    """Collects decisions one after the other; pinned values are kept."""

    pins: PlanSettings
    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def choose(self, name: str, value: T, reason: str) -> T:
        """Records and returns the pinned value, or else this one."""
        pinned: T | None = getattr(self.pins, name)
        self.values[name] = value if pinned is None else pinned
        self.reasons[name] = reason if pinned is None else pin_reason(self.pins, name)
        chosen: T = self.values[name]
        return chosen

    def decisions(self) -> Decisions:
        return Decisions(**self.values)
