"""`flatout export`: a run's weights and tokenizer as a Hugging Face folder."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatout import hub
from flatout.cli.shared import Trust, out, print_plain, require_torch, warn
from flatout.errors import EnvironmentLacks, UsageError

if TYPE_CHECKING:
    import torch

    from flatout.engine.trained import Trained


def export(
    run: Annotated[Path, typer.Argument(help="run folder")],
    to: Annotated[Path | None, typer.Option(help="folder to write")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32")] = "bf16",
    merge: Annotated[bool, typer.Option("--merge", help="merge adapters into the base weights")] = False,
    force: Annotated[bool, typer.Option("--force", help="overwrite an earlier export in the folder")] = False,
    best: Annotated[bool, typer.Option("--best", help="the best checkpoint (save.best), not the newest")] = False,
    step: Annotated[int | None, typer.Option(help="the checkpoint of this step, not the newest", min=0)] = None,
    push: Annotated[
        str | None, typer.Option(help="upload to this model on the hub, private", metavar="USER/NAME")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="make the model of --push public")] = False,
    trust: Trust = None,
) -> None:
    """Write a run's newest weights and tokenizer as a Hugging Face folder; adapters in PEFT format, unless merged."""
    require_torch()
    from safetensors import SafetensorError

    from flatout.engine.checkpoint import as_os_error
    from flatout.engine.resolve import DTYPES
    from flatout.engine.trained import open_trained
    from flatout.record import Run

    if to is None and push is None:
        raise UsageError("nothing to do: give --to FOLDER, --push USER/NAME, or both")
    if public and push is None:
        raise UsageError("--public applies to the model that --push names: give --push USER/NAME")
    if push is not None:
        hub.check_name(push)
    if to is None:
        with tempfile.TemporaryDirectory(prefix="flatout-export-") as private:
            export(run, Path(private), dtype, merge, force, best, step, push, public, trust)
        return
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype!r} must be one of {', '.join(DTYPES)}")
    earlier = any((to / name).is_file() for name in ("config.json", "adapter_config.json"))
    if to.exists() and not (to.is_dir() and (not any(to.iterdir()) or (force and earlier))):
        way = "; --force overwrites the export in it" if earlier else ""
        raise UsageError(f"{to} is not an empty folder, and nothing is overwritten: choose another folder{way}")
    if best and step is not None:
        raise UsageError("--best and --step each name a checkpoint: give one of them")
    trained = open_trained(Run.open(run), best=best, step=step, trust=trust)
    warn(trained.notices)
    if merge and trained.adapters is None:
        raise UsageError(f"{run} trained all weights, so there is nothing to merge: remove --merge")
    try:
        if force:
            _remove_export(to)
        _write(trained, run, to, dtype=DTYPES[dtype], merge=merge)
    except (OSError, SafetensorError) as error:
        why = as_os_error(error, to).strerror or error
        raise EnvironmentLacks(f"{to} cannot be written: {why}. The folder is incomplete: remove it") from None
    if push is not None:
        print_plain(f"uploaded to {hub.push(push, to, public=public, message=f'Step {trained.step}')}")


def _remove_export(folder: Path) -> None:
    """Removes the files of an earlier export, so that the weights of two of them never mix."""
    names = (
        "config.json",
        "generation_config.json",
        "adapter_config.json",
        "*.safetensors",
        "*.safetensors.index.json",
    )
    for pattern in names:
        for path in folder.glob(pattern):
            path.unlink()


def _write(trained: Trained, run: Path, to: Path, *, dtype: torch.dtype, merge: bool) -> None:
    from flatout.engine.trained import export_whole
    from flatout.model import Decoder, foreign_lora, peft

    if trained.adapters is not None and not merge:
        trained.tokenizer.save(to)
        if trained.adapters.names and isinstance(trained.model, Decoder):
            for which, name in enumerate(trained.adapters.names):
                at = {"base": trained.base, "fingerprint": trained.fingerprint, "which": which}
                peft.save(trained.model, to / name, trained.adapters, **at)  # type: ignore[arg-type]
            names = ", ".join(trained.adapters.names)
            print_plain(f"wrote the adapters {names} of step {trained.step} of {run} to {to}, each in its own folder")
            return
        if isinstance(trained.model, Decoder):
            peft.save(trained.model, to, trained.adapters, base=trained.base, fingerprint=trained.fingerprint)
        else:
            foreign_lora.save(trained.model, to, base=trained.base)
        print_plain(f"wrote the adapter of step {trained.step} of {run} to {to}; its base model is {trained.base}")
        return
    if trained.adapters is not None and trained.adapters.base_bits == 4:
        out.print(
            "the adapters were trained on 4-bit weights and are merged into the unquantised ones: close, not equal"
        )
    export_whole(trained, to, dtype=dtype)
    print_plain(f"wrote step {trained.step} of {run} to {to}")
