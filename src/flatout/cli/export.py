"""`flatout export`: a run's weights and tokenizer as a Hugging Face folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatout import hub, limits
from flatout.cli.shared import Trust, file_path, out, print_plain, require_torch, warn
from flatout.errors import EnvironmentLacks, UsageError

if TYPE_CHECKING:
    import torch

    from flatout.engine.trained import Trained
    from flatout.record import Run

BASE = "base"  # the folder of a base that is exported with its adapters


def export(
    run: Annotated[Path, typer.Argument(help="run folder", parser=file_path)],
    to: Annotated[Path | None, typer.Option(help="folder to write", parser=file_path, metavar="PATH")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32")] = "bf16",
    merge: Annotated[bool, typer.Option("--merge", help="merge adapters into the base weights")] = False,
    force: Annotated[bool, typer.Option("--force", help="overwrite an earlier export in the folder")] = False,
    best: Annotated[bool, typer.Option("--best", help="the best checkpoint (save.best), not the newest")] = False,
    step: Annotated[
        int | None, typer.Option(help="the checkpoint of this step, not the newest", min=0, max=limits.STEPS)
    ] = None,
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
    opened = Run.open(run)
    trained = open_trained(opened, best=best, step=step, trust=trust)
    warn(trained.notices)
    if merge and trained.adapters is None:
        raise UsageError(f"{run} trained all weights, so there is nothing to merge: remove --merge")
    try:
        if force:
            _remove_export(to)
        _write(trained, opened, to, dtype=DTYPES[dtype], merge=merge, pushed=push is not None)
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


def _write(trained: Trained, run: Run, to: Path, *, dtype: torch.dtype, merge: bool, pushed: bool) -> None:
    from flatout.engine.trained import export_whole

    if trained.adapters is not None and not merge:
        _write_adapters(trained, run, to, pushed=pushed)
    else:
        if trained.adapters is not None and trained.adapters.base_bits == 4:
            out.print(
                "the adapters were trained on 4-bit weights and are merged into the unquantised ones: close, not equal"
            )
        export_whole(trained, to, dtype=dtype)
        print_plain(f"wrote step {trained.step} of {run.path} to {to}")
    _follow_umask(to)


def _write_adapters(trained: Trained, run: Run, to: Path, *, pushed: bool) -> None:
    """Each of several adapters in a folder of its own."""
    from flatout.model import Decoder, foreign_lora, peft

    assert trained.adapters is not None
    trained.tokenizer.save(to)
    base = _with_base(trained, run, to)
    if not trained.adapters.names:
        name = _base_name(base, to, pushed=pushed)
        if isinstance(trained.model, Decoder):
            peft.save(trained.model, to, trained.adapters, base=name, fingerprint=trained.fingerprint)
        else:
            foreign_lora.save(trained.model, to, base=name)
        print_plain(f"wrote the adapter of step {trained.step} of {run.path} to {to}; its base model is {base}")
        return
    assert isinstance(trained.model, Decoder)
    for which, adapter in enumerate(trained.adapters.names):
        folder = to / adapter
        name = _base_name(base, folder, pushed=pushed)
        spec, fingerprint = trained.adapters, trained.fingerprint
        peft.save(trained.model, folder, spec, base=name, fingerprint=fingerprint, which=which)
    names = ", ".join(trained.adapters.names)
    print_plain(f"wrote the adapters {names} of step {trained.step} of {run.path} to {to}, each in its own folder")


def _with_base(trained: Trained, run: Run, to: Path) -> str:
    """The adapters' base. One that only our cache has, the weights of another run, is copied beside them."""
    from flatout.recipes.started import is_cached

    assert trained.base is not None
    if not is_cached(trained.base, run):
        return trained.base
    shutil.copytree(trained.base, to / BASE, dirs_exist_ok=True)
    return str(to / BASE)


def _base_name(base: str, folder: Path, *, pushed: bool) -> str:
    """The base for people elsewhere: its name on the hub, or else the way from the adapter to it."""
    if not hub.is_here(base):
        return base
    real = Path(base).expanduser().resolve()
    if published := hub.name_in_cache(real):
        return published
    return real.name if pushed else os.path.relpath(real, folder.resolve())


def _follow_umask(folder: Path) -> None:
    """Safetensors and temporary folders are for their owner only; an export is for whom the umask lets read."""
    probe = folder / ".umask"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*"):
        if path.suffix in (".safetensors", ".json", ".jinja") and path.is_file() and not path.is_symlink():
            path.chmod(mode)
