"""The tensors of a checkpoint in files: each rank writes the pieces it holds, and a reader takes the rows it needs."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy.ctypeslib  # noqa: F401  safetensors needs it; numpy's own import of it on demand fails when two threads ask
import psutil
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from flatout import files
from flatout.engine.ranks import Ranks
from flatout.errors import first_line
from flatout.files import BadFile
from flatout.optim import Optimizer, is_sharded, local, rows_of

# Threads that hash and write a checkpoint: SHA-256 takes most of the time, at about 1 GB/s per thread.
THREADS = min(16, os.cpu_count() or 1)
_NAME = re.compile(r"(weights|optimizer)-rank\d{5}\.safetensors")
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def weights_file(rank: int = 0) -> str:
    return f"weights-rank{rank:05d}.safetensors"


def optimizer_file(rank: int = 0) -> str:
    return f"optimizer-rank{rank:05d}.safetensors"


def is_file_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """The shape of the whole tensor, and where this piece of it begins. A replicated tensor is one piece."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    dtype: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    bytes: int
    tensors: dict[str, TensorFacts]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What this rank holds of a tensor."""

    tensor: Tensor
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def offset(self) -> tuple[int, ...]:
        return (self.begin, *(0 for _ in self.shape[1:])) if self.shape else ()


# -- what is saved


def kept(model: nn.Module) -> dict[str, Tensor]:
    """The tensors to save: all but frozen weights, which can be loaded from their source, as adapters cannot."""
    frozen = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)  # a tied weight has two names
        if not parameter.requires_grad and ".adapters." not in name and not name.startswith("router.")
    }
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def pieces(model: nn.Module, optimizer: Optimizer | None, *, ranks: Ranks) -> dict[str, dict[str, Piece]]:
    """This rank's pieces by file: its rows of sharded tensors and, on the first rank, everything else."""
    found = {weights_file(ranks.rank): _held(_once(kept(model)), ranks=ranks)}
    if optimizer is not None:
        found[optimizer_file(ranks.rank)] = _held(dict(_moments(model, optimizer)), ranks=ranks, like=model)
    return found


def _held(tensors: Mapping[str, Tensor], *, ranks: Ranks, like: nn.Module | None = None) -> dict[str, Piece]:
    parameters = {} if like is None else dict(like.named_parameters())
    found = {}
    for name, tensor in tensors.items():
        whole = parameters.get(name.partition(".")[2], tensor) if like is not None else tensor
        if is_sharded(whole) and tensor.ndim:
            begin, end = rows_of(whole, ranks.rank, ranks.world)
            if begin < end:
                found[name] = Piece(tensor=local(tensor), shape=tuple(whole.shape), begin=begin)
        elif ranks.first:
            found[name] = Piece(tensor=tensor, shape=tuple(tensor.shape))
    return found


def _once(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, under its first name: a tied head is the embedding."""
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        part = local(tensor)
        first.setdefault((part.data_ptr(), part.shape, part.stride()) if part.numel() else (name,), name)
    return {name: state[name].detach() for name in first.values()}


def _moments(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            yield f"{moment}.{name}", value


@dataclass
class Staging:
    """Copies on the host. Those of a device are page-locked and used again, and filled while the device works on."""

    _kept: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    _stream: Any = None
    cancelled: bool = False

    def reserve(self, groups: Mapping[str, Mapping[str, Piece]]) -> None:
        """Page-locks the buffers before they are needed: the system takes about a second for a GiB."""
        wanted = [(file, name, piece.tensor) for file, group in groups.items() for name, piece in group.items()]
        wanted = [(file, name, tensor) for file, name, tensor in wanted if tensor.is_cuda]
        _check_free(sum(tensor.numel() * tensor.element_size() for _, _, tensor in wanted))
        for file, name, tensor in wanted:
            if self.cancelled:
                return
            with torch.cuda.device(tensor.device):  # this thread's own is the first GPU
                self._buffer(file, name, tensor)

    def take(self, groups: Mapping[str, Mapping[str, Piece]]) -> tuple[dict[str, dict[str, Piece]], Any]:
        """Starts the copies. Returns them, and an event after which they are filled; None: they are already."""
        device = next((p.tensor.device for group in groups.values() for p in group.values() if p.tensor.is_cuda), None)
        if device is None:
            return _mapped(groups, lambda _file, _name, tensor: tensor.detach().clone()), None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            copies = _mapped(groups, self._copied)
            done = torch.cuda.Event()
            done.record()
        return copies, done

    def _copied(self, file: str, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor.detach().clone()
        return self._buffer(file, name, tensor).copy_(tensor.detach(), non_blocking=True)

    def _buffer(self, file: str, name: str, tensor: Tensor) -> Tensor:
        if (file, name) not in self._kept:
            buffer, address = _page_locked(tensor)
            if address is not None:
                weakref.finalize(self, _release, address).atexit = False
            self._kept[file, name] = buffer
        return self._kept[file, name]


def _page_locked(tensor: Tensor) -> tuple[Tensor, int | None]:
    """A page-locked host tensor like this one, and its address, which is released at the end.

    Pages are touched first, without a lock on the driver: registered pages that exist already delay no kernel launch
    for long, while `pin_memory` would, and it rounds sizes up to a power of two.
    """
    size = tensor.numel() * tensor.element_size()
    if not size:
        return torch.empty(tensor.shape, dtype=tensor.dtype), None
    _check_free(2 * size)
    try:
        memory = mmap.mmap(-1, size)
    except OSError as failed:
        raise RuntimeError(f"{size} bytes: {failed.strerror}") from None
    touched = torch.frombuffer(memory, dtype=torch.uint8).zero_()
    if error := int(torch.cuda.cudart().cudaHostRegister(touched.data_ptr(), size, 0)):
        raise RuntimeError(f"{size} bytes could not be page-locked: CUDA error {error}")
    return touched.view(tensor.dtype).view(tensor.shape), touched.data_ptr()


def _check_free(size: int) -> None:
    if size > (free := psutil.virtual_memory().available):
        raise RuntimeError(f"{size / 2**30:.1f} GiB are needed, and {free / 2**30:.1f} GiB are free")


def _release(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def _mapped(groups: Mapping[str, Mapping[str, Piece]], copy: Any) -> dict[str, dict[str, Piece]]:
    return {
        file: {
            name: Piece(tensor=copy(file, name, piece.tensor), shape=piece.shape, begin=piece.begin)
            for name, piece in group.items()
        }
        for file, group in groups.items()
    }


def on_host(groups: Mapping[str, Mapping[str, Piece]]) -> dict[str, dict[str, Piece]]:
    """Copies that are filled now. All copies from a device are started before the first one is waited for."""
    copies = _mapped(groups, lambda _file, _name, tensor: tensor.detach().to("cpu", non_blocking=True))
    if any(piece.tensor.is_cuda for group in groups.values() for piece in group.values()):
        torch.cuda.synchronize()
    return copies


# -- writing


def write(folder: Path, groups: Mapping[str, Mapping[str, Piece]]) -> dict[str, FileFacts]:
    """Writes a file for each group and returns its facts for the manifest, hashed from memory and not from disk.

    Files are written while tensors are hashed: both release the GIL.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        written = {name: pool.submit(_write_file, group, folder / name) for name, group in groups.items()}
        facts = {
            name: dict(zip(group, pool.map(_facts, group.values()), strict=True)) for name, group in groups.items()
        }
        return {name: FileFacts(bytes=size.result(), tensors=facts[name]) for name, size in written.items()}


def _write_file(group: Mapping[str, Piece], path: Path) -> int:
    """Writes a file to disk, synced, and returns its size."""
    try:
        save_file({name: piece.tensor.contiguous() for name, piece in group.items()}, path)
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


def _facts(piece: Piece) -> TensorFacts:
    content: Any = piece.tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return TensorFacts(
        shape=piece.shape,
        offset=piece.offset,
        dtype=str(piece.tensor.dtype),
        sha256=hashlib.sha256(content).hexdigest(),
    )


# -- reading


def different(path: Path, expected: Mapping[str, TensorFacts]) -> str | None:
    """The first tensor that differs from the manifest; None if all match."""
    with safe_open(path, framework="pt") as file, ThreadPoolExecutor(THREADS) as pool:
        names = list(file.keys())
        if set(names) != set(expected):
            return "other tensors"

        def matches(name: str, tensor: Tensor) -> bool:
            facts = expected[name]
            begin = facts.offset[0] if facts.offset else 0
            inside = tensor.ndim == len(facts.shape) and tuple(tensor.shape[1:]) == facts.shape[1:]
            inside = inside and (not tensor.ndim or 0 <= begin <= begin + len(tensor) <= facts.shape[0])
            return inside and _facts(Piece(tensor=tensor, shape=facts.shape, begin=begin)) == facts

        found = pool.map(matches, names, (file.get_tensor(name) for name in names))
        return next((name for name, same in zip(names, found, strict=True) if not same), None)


class Saved:
    """The tensors of the same kind in all files of a verified checkpoint, read row by row."""

    def __init__(self, folder: Path, facts: Mapping[str, FileFacts]) -> None:
        self.folder = folder
        self._pieces: dict[str, list[tuple[int, Path, TensorFacts]]] = {}
        self._open: dict[Path, Any] = {}
        for name, file in sorted(facts.items()):
            for tensor, known in file.tensors.items():
                begin = known.offset[0] if known.offset else 0
                self._pieces.setdefault(tensor, []).append((begin, folder / name, known))
        for found in self._pieces.values():
            found.sort(key=lambda piece: piece[0])

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def names(self) -> Sequence[str]:
        return list(self._pieces)

    def path(self, name: str) -> Path:
        return self._pieces[name][0][1]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._pieces[name][0][2].shape

    def dtype(self, name: str) -> str:
        return self._pieces[name][0][2].dtype

    def read(self, name: str, begin: int = 0, end: int | None = None) -> Tensor:
        """Rows `begin` to `end` of the whole tensor, put together from the pieces that hold them."""
        shape = self.shape(name)
        if not shape:
            return self._file(self.path(name)).get_tensor(name)  # type: ignore[no-any-return]
        end, parts, at = shape[0] if end is None else end, [], begin
        for start, path, _ in self._pieces[name]:
            rows = self._file(path).get_slice(name)
            length = rows.get_shape()[0]
            if start <= at < start + length and at < end:
                stop = min(end, start + length)
                parts.append(rows[at - start : stop - start])
                at = stop
        if at < end:
            raise BadFile(self.path(name), f"and the other files lack rows {at} to {end} of {name}")
        if not parts:
            return self._file(self.path(name)).get_slice(name)[0:0]  # type: ignore[no-any-return]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(files.checked(path, root=path.parent.parent), framework="pt")
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                raise BadFile(path, f"cannot be read: {first_line(error)}") from None
        return self._open[path]
