"""The functions that other Python programs call: `import flatout` offers them by name, see docs/python.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flatout.config import from_mapping, load, to_mapping
from flatout.config.settings import Settings
from flatout.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.engine.accelerate import Accelerated
    from flatout.plan import Plan
    from flatout.record import Outcome

Config = Settings | Mapping[str, Any] | str | Path


def settings(config: Config, **overrides: Any) -> Settings:
    """Checked settings from a file, a mapping or other settings.

    An override is a key, or a section with some of its keys: `settings("run.yaml", seed=1, train={"lr": 3e-4})`. As on
    the command line, the environment counts for a file and an override counts for more.
    """
    if isinstance(config, str | Path):
        return load(config, overrides=[f"{key}={_text(value)}" for key, value in _dotted(overrides)]).settings
    values = to_mapping(config) if isinstance(config, Settings) else {key: _copied(config[key]) for key in config}
    for key, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(values.get(key), Mapping)
        values[key] = {**values[key], **value} if both else value
    return from_mapping(values)


def train(config: Config, *, run: str | Path | None = None, resume: bool = False, **overrides: Any) -> Outcome:
    """Trains as `flatout train` does, and returns the numbers of the run. The folder is `run`, or the settings' own."""
    from flatout import recipes

    chosen = settings(config, **overrides)
    folder = run or chosen.run
    if folder is None:
        raise UsageError("no run folder: give run=..., or set `run` in the configuration")
    if Path(folder).exists() and any(Path(folder).iterdir()) and not resume:
        raise UsageError(f"{folder} is not empty: give another folder, or resume=True to continue its run")
    return recipes.run(chosen, folder=Path(folder), resume=resume)


def plan(config: Config, *, on: str | None = None, **overrides: Any) -> Plan:
    """The plan for this machine, or for a named one such as "A100-80GBx8", with its reasons and predictions."""
    from flatout import hardware
    from flatout.files import cache_folder
    from flatout.plan import decide, job_of

    here = hardware.with_cpu_facts(hardware.detect(), cache=cache_folder()) if on is None else hardware.parse(on)
    return decide(job_of(settings(config, **overrides), hardware=here, num_ranks=max(1, here.num_gpus)))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    chunk: int = 2048,
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T` against the targets, without ever holding all logits.

    `hidden` is [..., C], `weight` [V, C], `targets` [...] with -100 where a token is not learnt. Targets are taken as
    they are: shift them yourself. `chunk` rows of logits exist at a time.
    """
    from flatout import losses

    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != weight.shape[-1]:
        raise UsageError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} do not "
            "fit: hidden is [..., C], weight [V, C], targets [...]"
        )
    flat = targets.reshape(-1)
    total = losses.linear_cross_entropy(hidden.reshape(len(flat), -1), weight, flat, chunk=chunk)
    return total if reduction == "sum" else total / (flat != losses.IGNORED).sum().clamp(min=1)


def accelerate(model: Any, *, segments: bool = True, loss: bool = True) -> Accelerated:
    """Runs flatout's fused segments and loss in this instance of a Llama, Mistral, Qwen2 or Qwen3 of transformers.

    Call it when the model is on its device, after adapters were added, and before it is wrapped or compiled. With
    labels and in training mode the model then returns its loss without logits. The result says what was changed and
    why the rest was not; its `undo()` restores the model. A model in which nothing can be changed is refused.
    """
    from flatout.engine import accelerate as engine

    return engine.accelerate(model, segments=segments, loss=loss)


def pack(lengths: Sequence[int], *, capacity: int, seed: int = 0) -> list[list[int]]:
    """Which examples share a sequence of `capacity` tokens: best fit, the longest first. Items are their numbers."""
    import numpy as np

    from flatout.data import packed

    found = np.asarray(lengths, np.int64)
    if len(found) and int(found.min()) < 1:
        raise UsageError(f"a length of {int(found.min())}; every example needs at least one token")
    return packed.pack(found, capacity=capacity, seed=seed)


def _dotted(overrides: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in overrides.items():
        name = f"{prefix}{key}"
        found += _dotted(value, f"{name}.") if isinstance(value, Mapping) else [(name, value)]
    return found


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return json.dumps(value) if isinstance(value, str | bool | list | tuple) else str(value)


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value
