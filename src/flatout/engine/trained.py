"""The model a run has come to: its newest whole checkpoint and its tokenizer (`export`, `demo`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flatout import hub
from flatout.cost import Adapters, ModelShape
from flatout.data.tokenizer import Tokenizer, load_tokenizer
from flatout.engine.checkpoint import Checkpoints, restore
from flatout.errors import UsageError
from flatout.model import Model, load_adapted, peft
from flatout.model.loading import empty_model
from flatout.plan import model_settings
from flatout.record import Run

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Trained:
    model: Model
    tokenizer: Tokenizer
    step: int
    adapters: Adapters | None = None  # on the model, whose other weights are those of `base`
    base: str | None = None
    fingerprint: str | None = None


def open_trained(
    run: Run,
    *,
    best: bool = False,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    as_trained: bool = False,
    trust: str | None = None,
) -> Trained:
    """Weights on the device in `dtype`. Under adapters the base is held in 16 bits or more, or `as_trained`.

    `trust` is the user's pin for code that comes with the model the run began as; the run itself gives none.
    """
    checkpoints = Checkpoints(run.checkpoints_dir, identity=None, keep=2)
    checkpoint, problems = checkpoints.latest()
    if best and (checkpoint := checkpoints.best()) is None:
        raise UsageError(f"{run.path} keeps no best checkpoint: train with save.best: true, or export the newest")
    if checkpoint is None:
        raise UsageError(f"{run.path} has no whole checkpoint" + (": " + "; ".join(problems) if problems else " yet"))
    job = run.plan["job"]
    adapters = job.get("adapters")
    spec = None if adapters is None else Adapters(**{**adapters, "targets": tuple(adapters["targets"])})
    base = job.get("base")
    fingerprint = None
    shape = ModelShape(**job["shape"])
    if spec is None:
        model: Model = empty_model(model_settings(run, trust=trust), shape=shape, device=device, dtype=dtype)
    else:
        if base is None:
            raise UsageError(f"{run.path} trained adapters on random weights, which nobody else has: nothing to write")
        folder = hub.folder(base, weights=True, revision=model_settings(run).revision)
        fingerprint = peft.fingerprint(folder)
        if fingerprint != checkpoint.state["base"]:
            raise UsageError(f"{base} holds other weights than those the adapters of {run.path} were trained on")
        held = spec if as_trained else replace(spec, base_bits=16)
        model = load_adapted(folder, held, shape=shape, device=device, compute_dtype=dtype)
    restore(checkpoint, model=model, optimizer=None)
    if not run.tokenizer_dir.is_dir():
        raise UsageError(f"{run.path} has no tokenizer folder: it was removed, or the run was killed while it began")
    tokenizer = load_tokenizer(str(run.tokenizer_dir), documents=None, cache=run.tokenizer_dir)
    return Trained(
        model=model, tokenizer=tokenizer, step=checkpoint.step, adapters=spec, base=base, fingerprint=fingerprint
    )
