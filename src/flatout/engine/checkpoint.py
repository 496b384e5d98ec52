"""Atomic checkpoints: safetensors and a JSON manifest with hashes, committed by a rename.

Protocol of a save: write into `step-N.tmp-ID/`, fsync every file and the folder, write the manifest with hashes taken
in memory, read the files back against it, rename the folder, fsync its parent, swap the pointer `latest`, and only
then purge old ones, never below two verified. A reader checks every hash before any parameter changes, and falls back
to the next older checkpoint when one is damaged.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flatout import files
from flatout.errors import first_line
from flatout.files import BadFile
from flatout.optim import Optimizer

FORMAT = 1
MANIFEST, WEIGHTS, OPTIMIZER = "manifest.json", "weights-rank00000.safetensors", "optimizer-rank00000.safetensors"
# Threads that hash and write a checkpoint: SHA-256 takes most of the time, at about 1 GB/s per thread.
THREADS = min(16, os.cpu_count() or 1)
_NAME = re.compile(r"step-(\d{8,18})")
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """Global shape and the offset of this part: one rank's replicated tensors are the simplest case."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    dtype: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    bytes: int
    tensors: dict[str, TensorFacts]


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
    tokenizer: str | None = None


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
        final = self.folder / f"step-{step:08}"
        if final.exists():
            if not self.problem(final):
                return final
            files.remove(final)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        partial = self.folder / f"{final.name}.tmp-{uuid.uuid4().hex[:8]}"
        try:
            partial.mkdir()
            tensors = {WEIGHTS: _once(_kept(model))}
            if optimizer is not None:
                tensors[OPTIMIZER] = _moments(model, optimizer)
            facts = _write(partial, {name: _copied(group) for name, group in tensors.items()})
            self._write_manifest(partial, step=step, written=facts, state=state)
            if problem := self.problem(partial):
                raise OSError(f"read back differently than written: {problem}")
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
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

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest intact checkpoint, and a sentence for each newer one that is damaged."""
        return self._first(self._folders())

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
                resumable=OPTIMIZER in manifest.files,
                checksum=manifest.checksum,
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
        if WEIGHTS not in manifest.files or not set(manifest.files) <= {WEIGHTS, OPTIMIZER}:
            raise BadFile(path, f"names {', '.join(map(repr, manifest.files)) or 'no file'}, not {WEIGHTS}")
        return manifest

    def _check(self, path: Path, facts: FileFacts) -> None:
        with files.opened(path, root=self.folder) as file:
            found = os.fstat(file.fileno())
        if found.st_size != facts.bytes:
            raise BadFile(path, f"has {found.st_size} bytes, not {facts.bytes}")
        mark = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
        if self._seen.get(path) != mark:
            if different := _different(path, facts.tensors):
                raise BadFile(path, f"does not match its SHA-256 ({different})")
            self._seen[path] = mark

    def _folders(self) -> list[Path]:
        """Committed checkpoints, newest first."""
        if not self.folder.is_dir():
            return []
        named = ((_NAME.fullmatch(path.name), path) for path in self.folder.iterdir())
        return [path for _, path in sorted(((int(name[1]), path) for name, path in named if name), reverse=True)]

    def _write_manifest(
        self, folder: Path, *, step: int, written: Mapping[str, FileFacts], state: Mapping[str, Any]
    ) -> None:
        manifest = Manifest(
            format=FORMAT,
            identity=self.identity,
            step=step,
            state=dict(state),
            world=1,
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


def restore(checkpoint: Checkpoint, *, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Loads a verified checkpoint into the model and, unless None, the optimizer. Nothing changes unless all fits."""
    path, parameters, kept = checkpoint.folder / WEIGHTS, dict(model.named_parameters()), _kept(model)
    weights = _loaded(path)
    for name, tensor in kept.items():
        # A buffer may be newer than the checkpoint: a run that started without 8-bit scales has none.
        if name in weights:
            exact = optimizer is not None and name in parameters
            _require_fit(path, name, weights[name], tensor.shape, dtype=tensor.dtype, exact=exact)
        elif name in parameters:
            raise _unfit(path, f"it has no {name}")
    moments = {} if optimizer is None else _moments_for(parameters, checkpoint.folder / OPTIMIZER)
    with torch.no_grad():
        for name, tensor in kept.items():
            if name in weights:
                tensor.copy_(weights[name])
    for name, found in moments.items():
        assert optimizer is not None
        for moment, value in found.items():
            optimizer.state[parameters[name]][moment] = value.to(parameters[name].device)


def _moments_for(parameters: Mapping[str, nn.Parameter], path: Path) -> dict[str, dict[str, Tensor]]:
    """The optimizer state of each parameter; a parameter that never had a gradient has no state."""
    saved, found = _loaded(path), dict[str, dict[str, Tensor]]()
    for full, value in saved.items():
        moment, _, name = full.partition(".")
        if name not in parameters or moment not in _MOMENTS:
            raise _unfit(path, f"{full} belongs to no parameter in it")
        shape = torch.Size() if moment == "step" else parameters[name].shape
        _require_fit(path, full, value, shape, dtype=torch.float32)
        found.setdefault(name, {})[moment] = value
    for name, moments in found.items():
        if missing := set(_MOMENTS) - set(moments):
            raise _unfit(path, f"it has no {sorted(missing)[0]}.{name}")
    return found


def _loaded(path: Path) -> dict[str, Tensor]:
    try:
        loaded: dict[str, Tensor] = load_file(files.checked(path, root=path.parent.parent))
        return loaded
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise BadFile(path, f"cannot be read: {first_line(error)}") from None


def _require_fit(
    path: Path, name: str, value: Tensor, shape: torch.Size, *, dtype: torch.dtype, exact: bool = False
) -> None:
    """Checks shape and type; a reader may load floating-point numbers in another width."""
    if value.shape != shape:
        raise _unfit(path, f"{name} has shape {list(value.shape)}, not {list(shape)}")
    if value.dtype != dtype and (exact or not (value.is_floating_point() and dtype.is_floating_point)):
        raise _unfit(path, f"{name} is {value.dtype}, not {dtype}")


def _unfit(path: Path, why: str) -> BadFile:
    return BadFile(path, f"does not fit the model of the run: {why}")


def _once(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, under its first name: a tied head is the embedding."""
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,), name)
    return {name: state[name].detach() for name in first.values()}


def _kept(model: nn.Module) -> dict[str, Tensor]:
    """The tensors to save: all but frozen weights, which can be loaded from their source, as adapters cannot."""
    frozen = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)  # a tied weight has two names
        if not parameter.requires_grad and ".adapters." not in name and not name.startswith("router.")
    }
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host. All copies from a device are started before the first one is waited for."""
    copies = {name: tensor.detach().to("cpu", non_blocking=True) for name, tensor in tensors.items()}
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return {name: copy.contiguous() for name, copy in copies.items()}


def _write(folder: Path, groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, FileFacts]:
    """Writes a file for each group and returns its facts for the manifest, hashed from memory and not from disk.

    Files are written while tensors are hashed: both release the GIL.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        written = {name: pool.submit(_write_file, group, folder / name) for name, group in groups.items()}
        facts = {
            name: dict(zip(group, pool.map(_facts, group.values()), strict=True)) for name, group in groups.items()
        }
        return {name: FileFacts(bytes=size.result(), tensors=facts[name]) for name, size in written.items()}


def _write_file(tensors: Mapping[str, Tensor], path: Path) -> int:
    """Writes a file to disk, synced, and returns its size."""
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        raise as_os_error(error, path) from error
    files.sync_folder(path)
    return path.stat().st_size


def as_os_error(error: SafetensorError | OSError, path: Path) -> OSError:
    """Converts safetensors' own error for a full disk, a limit or a missing permission to the system's error."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"os error (\d+)", str(error))
    code = int(number[1]) if number else errno.EIO
    return OSError(code, os.strerror(code) if number else first_line(error), str(path))


def _facts(tensor: Tensor) -> TensorFacts:
    content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return TensorFacts(
        shape=tuple(tensor.shape),
        offset=(0,) * tensor.ndim,
        dtype=str(tensor.dtype),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def _different(path: Path, expected: Mapping[str, TensorFacts]) -> str | None:
    """The first tensor that differs from the manifest; None if all match."""
    with safe_open(path, framework="pt") as file, ThreadPoolExecutor(THREADS) as pool:
        names = list(file.keys())
        if set(names) != set(expected):
            return "other tensors"
        found = pool.map(_facts, (file.get_tensor(name) for name in names))
        return next((name for name, facts in zip(names, found, strict=True) if facts != expected[name]), None)


def _moments(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    return dict(_named_moments(model, optimizer))


def _named_moments(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            yield f"{moment}.{name}", value


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
