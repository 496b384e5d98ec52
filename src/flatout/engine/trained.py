"""The model a run has come to: its newest whole checkpoint and its tokenizer (`export`, `demo`)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from flatout.config.settings import ModelSettings
from flatout.cost import ModelShape
from flatout.data.tokenizer import Tokenizer, load_tokenizer
from flatout.engine.checkpoint import Checkpoints, restore
from flatout.errors import UsageError
from flatout.model import Model
from flatout.model.loading import empty_model
from flatout.record import Run


@dataclass(frozen=True, kw_only=True)
class Trained:
    model: Model
    tokenizer: Tokenizer
    step: int


def model_settings(run: Run) -> ModelSettings:
    """The `model` section of a run's configuration, as far as this version knows its keys."""
    known = {field.name for field in fields(ModelSettings)}
    return ModelSettings(**{key: value for key, value in run.config["model"].items() if key in known})


def open_trained(run: Run) -> Trained:
    checkpoint, problems = Checkpoints(run.checkpoints_dir, identity=None, keep=2).latest()
    if checkpoint is None:
        raise UsageError(f"{run.path} has no whole checkpoint" + (": " + "; ".join(problems) if problems else " yet"))
    model = empty_model(model_settings(run), shape=ModelShape(**run.plan["job"]["shape"]))
    restore(checkpoint, model=model, optimizer=None)
    if not run.tokenizer_dir.is_dir():
        raise UsageError(f"{run.path} has no tokenizer folder: it was removed, or the run was killed while it began")
    tokenizer = load_tokenizer(str(run.tokenizer_dir), documents=None, cache=run.tokenizer_dir)
    return Trained(model=model, tokenizer=tokenizer, step=checkpoint.step)
