"""The trained model of a run: its newest intact checkpoint and its tokenizer (`export`, `demo`)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flatout import files, hub
from flatout.config.settings import RouterSettings, settable
from flatout.cost import Adapters, ModelShape
from flatout.data.tokenizer import FILES, Tokenizer, load_tokenizer
from flatout.engine.checkpoint import Checkpoint, Checkpoints, restore
from flatout.errors import UsageError
from flatout.model import Decoder, Model, Router, foreign_lora, load_adapted, lora, peft
from flatout.model.loading import empty_model, export_model
from flatout.model.lora import names_of
from flatout.plan import model_settings
from flatout.record import Run

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Trained:
    model: Model
    tokenizer: Tokenizer
    step: int
    checksum: str  # of the checkpoint
    notices: tuple[str, ...] = ()  # why it is not the newest checkpoint
    adapters: Adapters | None = None  # on the model, whose other weights come from `base`
    base: str | None = None
    fingerprint: str | None = None


def open_trained(
    run: Run,
    *,
    best: bool = False,
    step: int | None = None,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    as_trained: bool = False,
    trust: str | None = None,
) -> Trained:
    """Loads the weights on the device in `dtype`. Under adapters the base has 16 bits or more, or is `as_trained`.

    `trust` is the user's pin for code of the model that the run started from; the run itself cannot supply it.
    """
    checkpoint, notices = chosen_checkpoint(run, best=best, step=step)
    check_tokenizer(run.tokenizer_dir, checkpoint)
    shape, spec, base = _job(run)
    fingerprint = None
    if spec is None:
        model: Model = empty_model(model_settings(run, trust=trust), shape=shape, device=device, dtype=dtype)
    else:
        if base is None:
            raise UsageError(f"{run.path} trained adapters on random weights, so there is no base model to export for")
        folder = hub.folder(base, weights=True, revision=model_settings(run).revision)
        fingerprint = peft.fingerprint(folder)
        if fingerprint != checkpoint.state.get("base"):
            raise UsageError(f"{base} does not have the weights that the adapters of {run.path} were trained on")
        held = spec if as_trained else replace(spec, base_bits=16)
        model = load_adapted(folder, held, shape=shape, device=device, compute_dtype=dtype, name=base, trust=trust)
        if isinstance(model, Decoder):
            equip(model, run)
    restore(checkpoint, model=model, optimizer=None)
    tokenizer = load_tokenizer(str(run.tokenizer_dir), documents=None, cache=run.tokenizer_dir)
    return Trained(
        model=model,
        tokenizer=tokenizer,
        step=checkpoint.step,
        checksum=checkpoint.checksum,
        notices=notices,
        adapters=spec,
        base=base,
        fingerprint=fingerprint,
    )


def export_whole(trained: Trained, folder: Path, *, dtype: torch.dtype) -> None:
    """Writes weights and tokenizer as a Hugging Face folder, with the adapters merged into their base."""
    if trained.adapters is not None:
        if trained.adapters.names:
            raise UsageError(
                f"{trained.adapters.count} adapters cannot all be merged into one model: `flatout export` without "
                "--merge writes each of them into its own folder"
            )
        if isinstance(trained.model, Decoder):
            lora.merge(trained.model)
        else:
            foreign_lora.require_mergeable(trained.model)
            foreign_lora.merge(trained.model)
    trained.tokenizer.save(folder)
    export_model(trained.model, folder, dtype=dtype, eos_token_id=trained.tokenizer.eos_id)


def equip(model: Decoder, run: Run) -> None:
    """Adds the router that a run has trained beside its adapters, if any."""
    found = run.config.get("router")
    if not (names := names_of(model)) or not isinstance(found, dict) or found.get("phase") == "1":
        return
    known = {field.name for field in settable(RouterSettings)}
    source = f"the router section of {run.path}"
    settings = files.typed(RouterSettings, {key: value for key, value in found.items() if key in known}, source=source)
    model.router = router_of(settings, names, width=model.shape.hidden).to(model.embedding.device)


def router_of(settings: RouterSettings, names: Sequence[str], *, width: int) -> Router:
    """The router that a configuration describes; an annealed temperature ends where inference takes place."""
    annealed = settings.temperature_mode == "annealed"
    return Router(
        names,
        width=width,
        hidden=settings.hidden,
        temperature=settings.temperature_end if annealed else settings.temperature,
        lowest=min(settings.temperature, settings.temperature_end),
        learned=settings.temperature_mode == "learned",
    )


def chosen_checkpoint(run: Run, *, best: bool = False, step: int | None = None) -> tuple[Checkpoint, tuple[str, ...]]:
    """The newest intact checkpoint, with a sentence for each newer damaged one; or only the best, or that of a step."""
    checkpoints = Checkpoints(run.checkpoints_dir, identity=None, keep=2, run=run.id)
    if step is not None:
        found, damaged = checkpoints.at(step)
        if found is None:
            there = ", ".join(map(str, checkpoints.steps())) or "none"
            why = f"is damaged: {damaged[0]}" if damaged else f"is not there; the steps that are kept: {there}"
            raise UsageError(f"the checkpoint of step {step} of {run.path} {why}")
        return found, ()
    checkpoint, problems = checkpoints.best() if best else checkpoints.latest()
    why = "; ".join(problems)
    if checkpoint is None and best and problems:
        raise UsageError(f"the best checkpoint of {run.path} cannot be used: {why}. Without --best, the newest is used")
    if checkpoint is None and best:
        raise UsageError(f"{run.path} keeps no best checkpoint: train with save.best: true, or export the newest")
    if checkpoint is None:
        raise UsageError(f"{run.path} has no intact checkpoint" + (f": {why}" if problems else " yet"))
    return checkpoint, tuple(f"{run.path}: {text}. Step {checkpoint.step} is used instead" for text in problems)


def tokenizer_fingerprint(folder: Path) -> str:
    """One hash over all files that a tokenizer is read from."""
    digest = hashlib.sha256()
    for name in sorted(FILES):
        try:
            content = files.read_bytes(folder / name, root=folder)
        except FileNotFoundError:
            continue
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def check_tokenizer(folder: Path, checkpoint: Checkpoint) -> None:
    """Refuses a tokenizer that the run's weights were not trained with; older checkpoints do not name theirs."""
    again = "remove the folder, and `flatout train --resume` rebuilds it"
    if not (folder / "tokenizer.json").is_file():
        raise UsageError(f"{folder} has no complete tokenizer: {again}")
    if checkpoint.tokenizer is not None and tokenizer_fingerprint(folder) != checkpoint.tokenizer:
        raise UsageError(f"{folder} was changed after {checkpoint.folder.name} was saved: restore it, or {again}")


def _job(run: Run) -> tuple[ModelShape, Adapters | None, str | None]:
    """The model's shape, adapters and base, from the plan."""
    source, job = run.path / "plan.json", run.plan.get("job")
    job = job if isinstance(job, dict) else {}
    adapters, base = job.get("adapters"), job.get("base")
    return (
        ModelShape.from_json(job.get("shape"), source=source),
        None if adapters is None else files.typed(Adapters, adapters, source=source),
        base if isinstance(base, str) else None,
    )
