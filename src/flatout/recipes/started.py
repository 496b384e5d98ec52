"""A run as the starting point of another: its newest weights become a Hugging Face folder in the cache."""

from __future__ import annotations

import fcntl
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from flatout import files
from flatout.config.recipes import RECIPES
from flatout.config.settings import Settings
from flatout.data.prepare import cache_folder
from flatout.engine.checkpoint import as_os_error
from flatout.engine.trained import chosen_checkpoint, export_whole, open_trained
from flatout.errors import EnvironmentLacks, UsageError
from flatout.recipes.sealed import Seals
from flatout.record import Run


def from_run(settings: Settings) -> Settings:
    """The settings with a folder of the weights in place of a run folder. Recipe rft exports its student itself.

    The weights are written once for each checkpoint, in fp32, with merged adapters, and checked before every later use;
    other ranks wait for the first.
    """
    name = settings.model.name
    if name is None or not Run.is_named_by(name) or RECIPES[settings.recipe].samples:
        return settings
    run = Run.open(name)
    checkpoint, problems = chosen_checkpoint(run)
    if problems:
        raise UsageError(
            f"{problems[0]}: to start from that step, `flatout export` it and name the export as the model"
        )
    models = _models(cache_folder(settings.data))
    folder = models / f"{run.id}-{checkpoint.step}-{checkpoint.checksum[:16]}"
    seals = Seals(root=models, run=checkpoint.checksum)
    try:
        models.mkdir(parents=True, exist_ok=True)
        with open(models / ".lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                seals.check_folder(folder)
            else:
                trained = open_trained(run, step=checkpoint.step, trust=settings.model.trust)
                with seals.writing_folder(folder) as partial:
                    export_whole(trained, partial, dtype=torch.float32)
    except (OSError, SafetensorError) as error:
        why = as_os_error(error, folder).strerror or error
        raise EnvironmentLacks(f"the weights of {name} cannot be written to {folder}: {why}") from None
    return replace(settings, model=replace(settings.model, name=str(folder)))


def is_cached(base: str, run: Run) -> bool:
    """Whether the base of a run is a copy that `from_run` made."""
    data = run.config.get("data")
    chosen = data.get("cache") if isinstance(data, dict) else None
    caches = [files.cache_folder(), *([Path(chosen).expanduser()] if isinstance(chosen, str) else [])]
    return Path(base).resolve().parent in [_models(cache).resolve() for cache in caches]


def _models(cache: Path) -> Path:
    return cache / "models"
