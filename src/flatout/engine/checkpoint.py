"""Checkpoints that are whole or not there: safetensors and a JSON manifest with hashes, committed by a rename.

Protocol of a save: write into `step-N.tmp-ID/`, fsync every file and the folder, write the manifest with hashes taken
in memory, read the files back against it, rename the folder, fsync its parent, swap the pointer `latest`, and only
then purge old ones, never below two verified. A reader checks every hash before a single parameter changes, and falls
back to the next older checkpoint when one does not hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FORMAT = 1
_NAME = re.compile(r"step-(\d{8})")
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    folder: Path
    step: int
    state: Mapping[str, Any]
    resumable: bool


class Checkpoints:
    """The `checkpoints` folder of a run. `identity` ties a checkpoint to its run; a mere reader passes None."""

    def __init__(self, folder: Path, *, identity: str | None, keep: int) -> None:
        self.folder, self.identity, self.keep = folder, identity, keep
        # What was hashed in this process: (folder, file) to (size, mtime); unchanged files are not hashed again.
        self._seen: dict[Path, tuple[int, int]] = {}

    def save(
        self, step: int, *, model: nn.Module, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]
    ) -> Path:
        """Commits the state after `step` steps. Raises OSError, with nothing left behind, if it cannot."""
        final = self.folder / f"step-{step:08}"
        if final.exists():
            if not self.problem(final):
                return final
            shutil.rmtree(final)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        partial = self.folder / f"{final.name}.tmp-{uuid.uuid4().hex[:8]}"
        try:
            partial.mkdir()
            weights = _once(_kept(model))
            tensors = {"weights-rank00000.safetensors": weights}
            if optimizer is not None:
                tensors["optimizer-rank00000.safetensors"] = _moments(model, optimizer)
            facts = {name: _write_tensors(group, partial / name) for name, group in tensors.items()}
            self._write_manifest(partial, step=step, files=facts, state=state)
            _fsync(partial)
            if problem := self.problem(partial):
                raise OSError(f"read back differently than written: {problem}")
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _fsync(self.folder)
        self._seen = {final / path.name: mark for path, mark in self._seen.items() if path.parent == partial} | {
            path: mark for path, mark in self._seen.items() if path.parent != partial
        }
        self._point(final)
        self._purge()
        return final

    def mark_best(self, step: int) -> None:
        """Keeps the checkpoint of a step, however old it gets, until another one is better."""
        self._point(self.folder / f"step-{step:08}", name="best")
        self._purge()

    def best(self) -> Checkpoint | None:
        """The one with the lowest validation loss, where a run keeps it and it holds."""
        found, _ = self._first([self.folder / name for name in self._best_name()])
        return found

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that holds, and a sentence for each newer one that does not."""
        return self._first(self._folders())

    def _first(self, folders: list[Path]) -> tuple[Checkpoint | None, list[str]]:
        problems: list[str] = []
        for folder in folders:
            if problem := self.problem(folder):
                problems.append(f"{folder.name}: {problem}")
                continue
            manifest = json.loads((folder / "manifest.json").read_text())
            resumable = "optimizer-rank00000.safetensors" in manifest["files"]
            checkpoint = Checkpoint(folder=folder, step=manifest["step"], state=manifest["state"], resumable=resumable)
            return checkpoint, problems
        return None, problems

    def problem(self, folder: Path) -> str | None:
        """Why this checkpoint must not be loaded; None if everything in it holds."""
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
            body = {key: value for key, value in manifest.items() if key != "checksum"}
            if manifest["checksum"] != _digest(body):
                return "manifest.json does not match its own checksum"
            if manifest["format"] != FORMAT:
                return f"format {manifest['format']}, this version reads {FORMAT}"
            if self.identity is not None and manifest["identity"] != self.identity:
                return "manifest.json belongs to another run (other model, data or seed)"
            if not folder.name.startswith(f"step-{manifest['step']:08}"):
                return f"manifest.json is of step {manifest['step']}"
            for name, facts in manifest["files"].items():
                path = folder / name
                stat = path.stat()
                if stat.st_size != facts["bytes"]:
                    return f"{name} has {stat.st_size} bytes, not {facts['bytes']}"
                mark = (stat.st_size, stat.st_mtime_ns)
                if self._seen.get(path) != mark:
                    if different := _different(path, facts["tensors"]):
                        return f"{name} does not match its SHA-256 ({different})"
                    self._seen[path] = mark
        except FileNotFoundError as error:
            return f"{Path(str(error.filename)).name} is missing"
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            return f"unreadable: {type(error).__name__}: {error}"
        return None

    def _folders(self) -> list[Path]:
        """Committed checkpoints, newest first."""
        if not self.folder.is_dir():
            return []
        return sorted((p for p in self.folder.iterdir() if _NAME.fullmatch(p.name)), reverse=True)

    def _write_manifest(
        self, folder: Path, *, step: int, files: Mapping[str, Mapping[str, Any]], state: Mapping[str, Any]
    ) -> None:
        body = {
            "format": FORMAT,
            "identity": self.identity,
            "step": step,
            "state": dict(state),
            "world": 1,
            "torch": str(torch.__version__),
            "files": files,
        }
        path = folder / "manifest.json"
        path.write_text(json.dumps(body | {"checksum": _digest(body)}))
        _fsync(path)

    def _best_name(self) -> list[str]:
        try:
            name = (self.folder / "best").read_text().strip()
        except OSError:
            return []
        return [name] if _NAME.fullmatch(name) else []

    def _point(self, final: Path, *, name: str = "latest") -> None:
        pointer, fresh = self.folder / name, self.folder / f"{name}.tmp-{uuid.uuid4().hex[:8]}"
        fresh.write_text(final.name + "\n")
        _fsync(fresh)
        fresh.replace(pointer)
        _fsync(self.folder)

    def _purge(self) -> None:
        """Removes what is older than the newest `keep` checkpoints that hold, but for the best one."""
        good, best = 0, self._best_name()
        for folder in self._folders():
            if good >= max(2, self.keep):
                if folder.name not in best:
                    shutil.rmtree(folder)
            elif self.problem(folder) is None:
                good += 1

    def _sweep(self) -> None:
        """Removes what a killed save left behind."""
        for path in self.folder.glob("*.tmp-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def restore(checkpoint: Checkpoint, *, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Puts a verified checkpoint into the model and, unless None, the optimizer."""
    weights = load_file(checkpoint.folder / "weights-rank00000.safetensors")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in _kept(model).items():
            # A buffer may be newer than the checkpoint: one begun without 8-bit scales has none.
            if name in weights or name in parameters:
                tensor.copy_(weights[name])
    if optimizer is None:
        return
    moments = load_file(checkpoint.folder / "optimizer-rank00000.safetensors")
    for name, parameter in parameters.items():
        for moment in _MOMENTS:
            if (value := moments.get(f"{moment}.{name}")) is not None:
                optimizer.state[parameter][moment] = value.to(parameter.device)


def _once(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor under its first name: a tied head is the embedding."""
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,), name)
    return {name: state[name].detach() for name in first.values()}


def _kept(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds: everything but frozen weights, which are where they came from."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def _write_tensors(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    """Writes one file and gives what its manifest says of it, hashed from memory and not from the disk."""
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(copies, path)
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error  # how safetensors says that the disk is full
    _fsync(path)
    return {"bytes": path.stat().st_size, "tensors": {name: _facts(tensor) for name, tensor in copies.items()}}


def _facts(tensor: Tensor) -> dict[str, Any]:
    """Global shape and the offset of this part: one rank's replicated tensors are the simplest case."""
    content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return {
        "shape": list(tensor.shape),
        "offset": [0] * tensor.ndim,
        "dtype": str(tensor.dtype),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def _different(path: Path, expected: Mapping[str, Any]) -> str | None:
    """The first tensor that is not what the manifest says; None if all are."""
    with safe_open(path, framework="pt") as file:
        if set(file.keys()) != set(expected):
            return "other tensors"
        return next((name for name in file.keys() if _facts(file.get_tensor(name)) != expected[name]), None)  # noqa: SIM118


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return dict(_named_moments(model, optimizer))


def _named_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            yield f"{moment}.{name}", value


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
