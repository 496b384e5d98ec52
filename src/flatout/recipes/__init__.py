"""The recipes: the data and the objective of each kind of training. They share one loop and one set-up."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.config.settings import Settings
    from flatout.record import Outcome, Sink


def run(settings: Settings, *, folder: Path, resume: bool = False, sinks: Sequence[Sink] = ()) -> Outcome:
    """Runs the recipe that the settings name in a run folder. The command, launchers and tools call this."""
    from flatout.recipes.inputs import check_inputs
    from flatout.recipes.started import from_run

    check_inputs(settings)
    recipe = import_module(f"flatout.recipes.{settings.recipe}")
    settings = from_run(settings)
    outcome: Outcome = recipe.run(settings, folder=folder, resume=resume, sinks=sinks)
    return outcome


def sample(settings: Settings, *, folder: Path, resume: bool = False, sinks: Sequence[Sink] = ()) -> Outcome:
    """Runs the first half of rejection sampling: the dataset of the first round, without training."""
    from flatout.recipes import rft
    from flatout.recipes.inputs import check_inputs

    check_inputs(settings)
    return rft.run(settings, folder=folder, resume=resume, sinks=sinks, train=False)
