"""The outcome of a run in numbers, which is recorded last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from flatout.files import Count, Finite


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Training speed of the steps after warm-up, without evaluations and saves. None: too few steps."""

    ignores_unknown: ClassVar[bool] = True

    steps: Count = 0
    tokens_per_s: Finite | None = None  # of all devices together, without padding
    tokens_per_s_per_device: Finite | None = None
    padded_tokens_per_s: Finite | None = None  # of all devices together, with padding
    step_s: Finite | None = None
    mfu: Finite | None = None
    hfu: Finite | None = None
    mfu_common: Finite | None = None
    data_share: Finite | None = None
    unattributed_share: Finite | None = None
    # In the time of its own update. None: there are no rollouts, it has no trunk of its own, or it was not timed apart.
    actor_mfu: Finite | None = None
    critic_mfu: Finite | None = None
    phases_s: Mapping[str, Finite] = field(default_factory=dict)  # of a step, by phase or role/phase


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Everything that a criterion can check. None is unknown, never a guess."""

    ignores_unknown: ClassVar[bool] = True

    stopped_by: str
    # Older versions did not record these.
    steps: Count = 0
    tokens: Count = 0
    hours: Finite = 0.0
    speed: Speed = field(default_factory=Speed)
    loss_first_tenth: float | None = None
    loss_last_tenth: float | None = None
    val_losses: tuple[float, ...] = ()
    task_scores: tuple[float, ...] = ()  # means over the tasks that have answers
    reward_first_tenth: float | None = None
    reward_last_tenth: float | None = None
    peak_gib: Finite | None = None
    memory_share: Finite | None = None
    utilisation: Finite | None = None
    saves: Count = 0
    saved_step: Count | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of one criterion."""

    criterion: str
    wanted: str
    got: str
    met: bool | None  # None: could not be measured here
