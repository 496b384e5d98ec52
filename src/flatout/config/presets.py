"""The settings that a preset implies beyond the plan's decisions, if a fine-tuning configuration names one.

`safe` is the conservative configuration of the fine-tuning guide this recipe replaces, `max` its full one; docs/sft.md
maps every setting of it. `sample.preset` names the three generation modes of the guide that recipe rft replaces
(docs/rft.md). The plan decides the values that depend on the device. Explicit settings override a preset.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flatout.config.recipes import RECIPES
from flatout.config.settings import Settings

# Both presets print few lines, use the fused optimizer, and decay the learning rate.
_BOTH: dict[str, Any] = {"log.every": 50, "plan.fused_optimizer": True, "train.schedule": "cosine", "train.clip": 1.0}
SFT: dict[str, dict[str, Any]] = {
    # Activations are recomputed even where they would fit, and nothing is compiled.
    "safe": {**_BOTH, "plan.recompute": "full", "plan.compile": "none", "save.keep": 2},
    # Recomputation only if memory requires it, warm-up, two verified checkpoints instead of the guide's one.
    "max": {**_BOTH, "train.warmup_steps": 50, "plan.prefetch": 2, "save.keep": 2},
}


# Recipe rft trains adapters, as its guide does, unless `lora.rank: null` is set.
RFT: dict[str, Any] = {"lora.rank": 16, "lora.alpha": 64.0}
# Rollouts are drawn from the policy itself, and a step has one learning rate from the start.
RL: dict[str, Any] = {"sample.temperature": 1.0, "train.schedule": "constant"}
SAMPLE: dict[str, dict[str, Any]] = {
    "quality": {"rft.oversample": 50, "sample.temperature": 0.5},
    "balanced": {"rft.oversample": 30, "sample.temperature": 0.7},
    "speed": {"rft.oversample": 20, "sample.temperature": 0.9},
}


@dataclass(frozen=True, kw_only=True)
class Implied:
    """A value, and what implies it: `preset max`, or `recipe rft`."""

    value: Any
    label: str


def implied(given: Mapping[str, Any]) -> dict[str, Implied]:
    """The settings implied by the recipe and its presets, except those that were given."""
    name = given.get("recipe", Settings.recipe)
    recipe, found = RECIPES.get(name), dict[str, Implied]()
    if recipe is None:  # a misspelled one is refused elsewhere
        return found

    def imply(values: Mapping[str, Any], label: str) -> None:
        found.update({key: Implied(value=value, label=label) for key, value in values.items()})

    for key, table, has in (
        ("plan.preset", SFT, recipe.takes_adapters),
        ("sample.preset", SAMPLE, recipe.samples),
    ):
        if has:
            imply(table.get(given.get(key, ""), {}), f"preset {given.get(key)}")
    if recipe.samples and "lora.rank" not in given:
        imply(RFT, f"recipe {name}")
    if recipe.routes and "lora.rank" not in given:
        imply({"lora.rank": 16}, f"recipe {name}")
    if recipe.rolls_out:
        imply(RL | {"train.batch_tokens": _update_tokens(given)}, f"recipe {name}")
    found = {key: one for key, one in found.items() if key not in given}
    steps, warmup = given.get("train.steps"), found.get("train.warmup_steps")
    if warmup is not None and isinstance(steps, int) and steps <= warmup.value:
        del found["train.warmup_steps"]  # a run shorter than its warm-up would never reach the peak
    return found


def _update_tokens(given: Mapping[str, Any]) -> int:
    """The tokens of a step that learns from rollouts, for the plan: how long completions become is not known before."""

    def value(key: str, default: int) -> int:
        found = given.get(key, default)
        return found if isinstance(found, int) and found > 0 else default  # a wrong one is refused elsewhere

    rl, length = Settings().rl, value("data.sequence_length", Settings().data.sequence_length)
    rows = value("rl.prompts", rl.prompts) * value("rl.samples", rl.samples) / value("rl.updates", rl.updates)
    tokens = rows * min(length, 2 * value("sample.max_tokens", Settings().sample.max_tokens))
    return length * max(8, 1 << max(0, math.ceil(math.log2(tokens / length))))
