"""What a plan decides: every field filled, whether a user pinned it (`PlanSettings`) or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from flatout.config.settings import Attention, Compile, PlanSettings, Precision, Recompute

T = TypeVar("T")
PINNED = "pinned in the configuration"


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """The fields of `PlanSettings` but its preset, in the order in which they are shown."""

    precision: Precision
    micro_batch: int
    accumulation: int
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
    """Decisions while they are made, one after the other; a pinned value is taken as it is."""

    pins: PlanSettings
    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def settle(self, name: str, value: T, reason: str) -> T:
        """The pinned value, or else this one."""
        pinned: T | None = getattr(self.pins, name)
        self.values[name] = value if pinned is None else pinned
        self.reasons[name] = reason if pinned is None else PINNED
        chosen: T = self.values[name]
        return chosen

    def decisions(self) -> Decisions:
        return Decisions(**self.values)
