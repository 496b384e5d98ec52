"""Atomic checkpoints: safetensors and a JSON manifest with hashes, committed by a rename.

Protocol of a save: write into `step-N.tmp-ID/`, fsync every file and the folder, write the manifest with hashes taken
in memory, read the files back against it, rename the folder, fsync its parent, swap the pointer `latest`, and only
then purge old ones, never below two verified. A reader checks every hash before any parameter changes, and falls back
to the next older checkpoint when one is damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from flatout import files
from flatout.engine.pieces import (
    MOMENTS,
    FileFacts,
    Piece,
    Saved,
    as_os_error,
    different,
    is_file_name,
    kept,
    on_host,
    optimizer_file,
    pieces,
    weights_file,
    write,
)
from flatout.engine.ranks import Ranks
from flatout.errors import first_line
from flatout.files import BadFile
from flatout.optim import Optimizer, is_sharded, local, rows_of

__all__ = ["MANIFEST", "Checkpoint", "Checkpoints", "Manifest", "as_os_error", "restore"]

FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,18})")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of `manifest.json`. Older ones do not name the run, validation data or tokenizer."""

    format: int
    identity: str | None
    step: int
    state: dict[str, Any]
    world: int
    torch: str
    files: dict[str, FileFacts]
    run: str | None = None
    valid: str | None = None
    tokenizer: str | None = None
    checksum: str = ""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint. `checksum` is that of its manifest, which includes the hashes of its tensors."""

    folder: Path
    step: int
    state: Mapping[str, Any]
    resumable: bool
    checksum: str
    files: Mapping[str, FileFacts]
    tokenizer: str | None = None

    def saved(self, kind: Literal["weights", "optimizer"]) -> Saved:
        """The tensors of one kind, from the files of all ranks."""
        return Saved(self.folder, {name: facts for name, facts in self.files.items() if name.startswith(kind)})


class Checkpoints:
    """The `checkpoints` folder of a run.

    `identity`, `run` (the run's id) and `valid` (its validation data) tie a checkpoint to its run; a reader outside
    the run gives no identity. `tokenizer` is the fingerprint of the run's tokenizer files, for later readers.
    """

    def __init__(
        self,
        folder: Path,
        *,
        identity: str | None,
        keep: int,
        run: str | None = None,
        valid: str | None = None,
    ) -> None:
        self.folder, self.identity, self.keep, self.run, self.valid = folder, identity, keep, run, valid
        self.tokenizer: str | None = None
        # Files already hashed in this process, by path; unchanged files are not hashed again.
        self._seen: dict[Path, tuple[int, ...]] = {}

    def save(self, step: int, *, model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any]) -> Path:
        """Commits the state after `step` steps. On failure it raises OSError and leaves nothing behind."""
        final = self.begin(step)
        if final.exists():
            return final
        partial = self.partial(final)
        try:
            facts = self.write(partial, on_host(pieces(model, optimizer, ranks=Ranks())))
            return self.commit(partial, final, written=facts, state=state)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def begin(self, step: int) -> Path:
        """Makes room for a checkpoint, whose folder exists now only if an intact one of this step is there."""
        final = self.folder / f"step-{step:08}"
        if final.exists() and self.problem(final):
            files.remove(final)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        return final

    def partial(self, final: Path) -> Path:
        """A temporary folder for a checkpoint, which a later save removes if this process is killed."""
        return final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}")

    def write(self, partial: Path, groups: Mapping[str, Mapping[str, Piece]]) -> dict[str, FileFacts]:
        """Writes this rank's pieces; called on every rank that has some."""
        partial.mkdir(exist_ok=True)
        return write(partial, groups)

    def commit(
        self, partial: Path, final: Path, *, written: Mapping[str, FileFacts], state: Mapping[str, Any], world: int = 1
    ) -> Path:
        """Writes the manifest of everything that was written, checks all of it, and puts it in its place."""
        step = int(final.name.removeprefix("step-"))
        self._write_manifest(partial, step=step, written=written, state=state, world=world)
        if problem := self.problem(partial):
            raise OSError(f"read back differently than written: {problem}")
        partial.rename(final)
        files.sync_folder(self.folder)
        self._seen = {
            (final / path.name if path.parent == partial else path): mark for path, mark in self._seen.items()
        }
        self._point(final)
        self._purge()
        return final

    def mark_best(self, step: int) -> None:
        """Keeps the checkpoint of a step until another one is better, however old it gets."""
        self._point(self.folder / f"step-{step:08}", name="best")
        self._purge()

    def best(self) -> tuple[Checkpoint | None, list[str]]:
        """The checkpoint with the lowest validation loss, if the run keeps one, and a sentence if it is damaged."""
        try:
            name = self._best_name()
        except BadFile as error:
            return None, [f"best {error.why}"]
        return self._first([self.folder / name] if name else [])

    def at(self, step: int) -> tuple[Checkpoint | None, list[str]]:
        """The checkpoint of this step, and a sentence if it is damaged."""
        named = [
            folder for folder in self._folders() if (name := _NAME.fullmatch(folder.name)) and int(name[1]) == step
        ]
        return self._first(named)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, newest first."""
        return [int(name[1]) for folder in self._folders() if (name := _NAME.fullmatch(folder.name))]

    def latest(self, *, upto: int | None = None) -> tuple[Checkpoint | None, list[str]]:
        """The newest intact checkpoint, of at most `upto` steps, and a sentence for each newer one that is damaged."""
        return self._first([path for path in self._folders() if upto is None or int(path.name[5:]) <= upto])

    def tidy(self, newest: Checkpoint | None) -> None:
        """Removes files of killed saves, and points `latest` at the checkpoint that a resumed run starts from."""
        with suppress(OSError):  # the next save reports it if writing fails
            self._sweep()
            pointer = self.folder / "latest"
            if newest is None:
                pointer.unlink(missing_ok=True)
            else:
                with suppress(BadFile, FileNotFoundError):
                    if self._pointed("latest") == newest.folder.name:
                        return
                self._point(newest.folder)

    def _first(self, folders: list[Path]) -> tuple[Checkpoint | None, list[str]]:
        problems: list[str] = []
        for folder in folders:
            try:
                manifest = self._verified(folder)
            except BadFile as error:
                problems.append(f"{folder.name}: {error.path.name} {error.why}")
                continue
            checkpoint = Checkpoint(
                folder=folder,
                step=manifest.step,
                state=manifest.state,
                resumable=optimizer_file() in manifest.files,
                checksum=manifest.checksum,
                files=manifest.files,
                tokenizer=manifest.tokenizer,
            )
            return checkpoint, problems
        return None, problems

    def problem(self, folder: Path) -> str | None:
        """Why this checkpoint must not be loaded; None if it is intact."""
        try:
            self._verified(folder)
        except BadFile as error:
            return f"{error.path.name} {error.why}"
        return None

    def _verified(self, folder: Path) -> Manifest:
        """Its manifest, after every hash in it was checked; BadFile names a file that is damaged."""
        path = folder / MANIFEST
        try:
            manifest = self._manifest(path)
            for name, facts in manifest.files.items():
                path = folder / name
                self._check(path, facts)
            return manifest
        except FileNotFoundError:
            raise BadFile(path, "is missing") from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            raise BadFile(path, f"cannot be read: {first_line(error)}") from None

    def _manifest(self, path: Path) -> Manifest:
        body = files.read_json(path, root=self.folder)
        checksum = body.pop("checksum", None)
        if checksum != _digest(body):
            raise BadFile(path, "does not match its own checksum")
        if body.get("format") != FORMAT:
            raise BadFile(path, f"has another format than {FORMAT}, which this version of flatout reads")
        manifest = replace(files.typed(Manifest, body, source=path), checksum=checksum)
        if self.identity is not None and manifest.identity != self.identity:
            raise BadFile(path, "belongs to another run (other model, data or seed)")
        if manifest.run is not None and manifest.run != self.run:
            raise BadFile(path, "belongs to another run (its id differs): put this run's own checkpoint there")
        if None not in (self.valid, manifest.valid) and manifest.valid != self.valid:
            raise BadFile(path, "belongs to a run with other validation data: give the data the run started with")
        if path.parent.name.partition(".tmp-")[0] != f"step-{manifest.step:08}":
            raise BadFile(path, f"is of step {manifest.step}")
        # So no name points outside the folder, and weights are never read as optimizer state.
        if weights_file() not in manifest.files or not all(map(is_file_name, manifest.files)):
            raise BadFile(path, f"names {', '.join(map(repr, manifest.files)) or 'no file'}, not {weights_file()}")
        return manifest

    def _check(self, path: Path, facts: FileFacts) -> None:
        with files.opened(path, root=self.folder) as file:
            found = os.fstat(file.fileno())
        if found.st_size != facts.bytes:
            raise BadFile(path, f"has {found.st_size} bytes, not {facts.bytes}")
        mark = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
        if self._seen.get(path) != mark:
            if name := different(path, facts.tensors):
                raise BadFile(path, f"does not match its SHA-256 ({name})")
            self._seen[path] = mark

    def _folders(self) -> list[Path]:
        """Committed checkpoints, newest first."""
        if not self.folder.is_dir():
            return []
        named = ((_NAME.fullmatch(path.name), path) for path in self.folder.iterdir())
        return [path for _, path in sorted(((int(name[1]), path) for name, path in named if name), reverse=True)]

    def _write_manifest(
        self, folder: Path, *, step: int, written: Mapping[str, FileFacts], state: Mapping[str, Any], world: int
    ) -> None:
        manifest = Manifest(
            format=FORMAT,
            identity=self.identity,
            step=step,
            state=dict(state),
            world=world,
            torch=str(torch.__version__),
            files=dict(written),
            run=self.run,
            valid=self.valid,
            tokenizer=self.tokenizer,
        )
        body = {key: value for key, value in asdict(manifest).items() if key != "checksum"}
        files.write_atomic(folder / MANIFEST, json.dumps(body | {"checksum": _digest(body)}).encode())

    def _best_name(self) -> str | None:
        """The folder that `best` names; BadFile if that is not a checkpoint."""
        try:
            name = self._pointed("best")
        except FileNotFoundError:
            return None
        if not _NAME.fullmatch(name):
            raise BadFile(self.folder / "best", "does not name a checkpoint")
        return name

    def _pointed(self, name: str) -> str:
        return files.read_text(self.folder / name, root=self.folder, limit=256).strip()

    def _point(self, final: Path, *, name: str = "latest") -> None:
        files.write_atomic(self.folder / name, f"{final.name}\n".encode())

    def _purge(self) -> None:
        """Removes checkpoints older than the newest `keep` intact ones, except for the best one."""
        try:
            good, best = 0, self._best_name()
        except BadFile:
            return  # the best one is unknown, so all are kept
        for folder in self._folders():
            if good >= max(2, self.keep):
                if folder.name != best:
                    files.remove(folder)
            elif self.problem(folder) is None:
                good += 1

    def _sweep(self) -> None:
        """Removes files of killed saves."""
        files.sweep(self.folder)
        for path in self.folder.glob("*.tmp-*"):
            files.remove(path)


def restore(
    checkpoint: Checkpoint, *, model: nn.Module, optimizer: Optimizer | None, ranks: Ranks | None = None
) -> None:
    """Loads a verified checkpoint into the model and, unless None, the optimizer. Nothing changes unless all fits.

    Each rank reads the rows it holds, whatever number of ranks saved them.
    """
    ranks = ranks or Ranks()
    parameters, wanted = dict(model.named_parameters()), kept(model)
    weights = checkpoint.saved("weights")
    for name, tensor in wanted.items():
        # A buffer may be newer than the checkpoint: a run that started without 8-bit scales has none.
        if name in weights:
            exact = optimizer is not None and name in parameters
            _require_fit(weights, name, tensor.shape, dtype=tensor.dtype, exact=exact)
        elif name in parameters:
            raise _unfit(checkpoint.folder / weights_file(), f"it has no {name}")
    loaded = {name: _rows(weights, name, tensor, ranks) for name, tensor in wanted.items() if name in weights}
    moments = {} if optimizer is None else _moments_for(parameters, checkpoint.saved("optimizer"), ranks)
    with torch.no_grad():
        for name, value in loaded.items():
            local(wanted[name]).copy_(value)
    for name, found in moments.items():
        assert optimizer is not None
        for moment, value in found.items():
            optimizer.state[parameters[name]][moment] = value.to(local(parameters[name]).device)


def _rows(saved: Saved, name: str, tensor: Tensor, ranks: Ranks) -> Tensor:
    """This rank's rows of a tensor."""
    return saved.read(name, *rows_of(tensor, ranks.rank, ranks.world)) if is_sharded(tensor) else saved.read(name)


def _moments_for(parameters: Mapping[str, nn.Parameter], saved: Saved, ranks: Ranks) -> dict[str, dict[str, Tensor]]:
    """The optimizer state of each parameter; a parameter that never had a gradient has no state."""
    found = dict[str, dict[str, Tensor]]()
    for full in saved.names():
        moment, _, name = full.partition(".")
        if name not in parameters or moment not in MOMENTS:
            raise _unfit(saved.path(full), f"{full} belongs to no parameter in it")
        parameter = parameters[name]
        shape = torch.Size() if moment == "step" else parameter.shape
        _require_fit(saved, full, shape, dtype=torch.float32)
        found.setdefault(name, {})[moment] = _rows(saved, full, parameter, ranks) if shape else saved.read(full)
    for name, moments in found.items():
        if missing := set(MOMENTS) - set(moments):
            raise _unfit(saved.path(f"{next(iter(moments))}.{name}"), f"it has no {sorted(missing)[0]}.{name}")
    return found


def _require_fit(saved: Saved, name: str, shape: torch.Size, *, dtype: torch.dtype, exact: bool = False) -> None:
    """Checks shape and type; a reader may load floating-point numbers in another width."""
    path, found = saved.path(name), getattr(torch, saved.dtype(name).removeprefix("torch."), None)
    if saved.shape(name) != tuple(shape):
        raise _unfit(path, f"{name} has shape {list(saved.shape(name))}, not {list(shape)}")
    if found != dtype and (
        exact or not isinstance(found, torch.dtype) or not (found.is_floating_point and dtype.is_floating_point)
    ):
        raise _unfit(path, f"{name} is {saved.dtype(name)}, not {dtype}")


def _unfit(path: Path, why: str) -> BadFile:
    return BadFile(path, f"does not fit the model of the run: {why}")


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
