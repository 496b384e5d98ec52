"""Token shards: a folder of verified files, from which training runs read all their data.

    tokens-00000.bin     little-endian uint16 or uint32, documents one after the other, each ending with EOS
    documents-00000.bin  little-endian int64, the end of each document within its shard
    manifest.json        their source, their counts, and the sha256 of every file; written last, atomically

A manifest may exist before the data is complete: then a background writer is still adding shards, and readers
wait for the shards they need. Plain `.bin` (uint16) and `.npy` token files are read through the same class.
Used by every recipe; written by `flatout data prepare`.
"""

from __future__ import annotations

import bisect
import hashlib
import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from flatout.data.manifest import MANIFEST, BadRows, Manifest, Role, ShardFacts, TokenizerFacts, read_manifest, way_out
from flatout.data.tokens import SCAN_NUMBERS, Ends, NumberFile, within
from flatout.data.writing import make_folder, sweep, write, writer_is_alive, writer_message
from flatout.errors import RunFailed, UsageError
from flatout.files import opened

# Small enough that a streamed run starts soon, large enough that a thousand shards hold many billions of tokens.
SHARD_TOKENS = 1 << 24
POLL_S = 0.2
OPEN_FILES = 256
MEASURED_WINDOWS = 4096
SAMPLED_BLOCKS = 64
BLOCK_BYTES = 1 << 16


def token_file(index: int) -> str:
    return f"tokens-{index:05d}.bin"


def document_file(index: int) -> str:
    return f"documents-{index:05d}.bin"


# -- writing -----------------------------------------------------------------------------------------------


class ShardWriter:
    """Appends documents to a folder. The same documents always give the same shards, with or without restarts."""

    def __init__(
        self,
        folder: Path,
        *,
        tokenizer: TokenizerFacts,
        source: Mapping[str, str],
        role: Role | None = None,
        streaming: bool = False,
        shard_tokens: int = SHARD_TOKENS,
        keep_shards: int | None = None,
    ) -> None:
        """Continues the incomplete manifest in the folder if `source` is the same; otherwise starts from the beginning.

        `keep_shards` drops later shards: the two splits are written together, and one may be ahead of the other.
        """
        make_folder(folder)
        sweep(folder)
        self.folder = folder
        self._pending: list[NDArray[Any]] = []
        self._pending_ends: list[int] = []
        self.pending_tokens = 0
        self.manifest = Manifest(
            complete=False,
            streaming=streaming,
            dtype="uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
            tokenizer=tokenizer,
            shard_tokens=shard_tokens,
            tokens=0,
            documents=0,
            max_token_id=0,
            shards=(),
            source=source,
            bad_rows=BadRows(),
            consumed=0,
            beside=0,
            role=role,
        )
        existing = read_manifest(folder, role=role)
        if existing is not None and _continues(existing, self.manifest):
            kept = existing.shards[:keep_shards]
            self.manifest = replace(
                existing,
                complete=False,
                shards=kept,
                tokens=sum(shard.tokens for shard in kept),
                documents=sum(shard.documents for shard in kept),
            )
        elif existing is not None:
            (folder / MANIFEST).unlink()  # before the files it describes are overwritten

    @property
    def num_tokens(self) -> int:
        return self.manifest.tokens + self.pending_tokens

    def append(self, tokens: NDArray[Any], *, ends: bool = True) -> None:
        """Adds tokens; `ends` closes the document with EOS."""
        dtype = self.manifest.dtype
        self._pending.append(tokens.astype(f"<{np.dtype(dtype).str[1:]}"))
        self.pending_tokens += len(tokens)
        if ends:
            self._pending.append(np.array([self.manifest.tokenizer.eos_id], self._pending[-1].dtype))
            self.pending_tokens += 1
            self._pending_ends.append(self.pending_tokens)

    def flush(self, *, consumed: int = 0, beside: int = 0, bad_rows: BadRows | None = None) -> None:
        """Writes the pending tokens as one shard, and then the manifest that counts it."""
        bad_rows = bad_rows or self.manifest.bad_rows
        manifest = replace(self.manifest, consumed=consumed, beside=beside, bad_rows=bad_rows)
        if self.pending_tokens:
            index = len(manifest.shards)
            tokens = np.concatenate(self._pending)
            token_bytes, end_bytes = tokens.tobytes(), np.array(self._pending_ends, "<i8").tobytes()
            shard = ShardFacts(
                tokens=len(tokens),
                documents=len(self._pending_ends),
                tokens_bytes=len(token_bytes),
                documents_bytes=len(end_bytes),
                tokens_sha256=hashlib.sha256(token_bytes).hexdigest(),
                documents_sha256=hashlib.sha256(end_bytes).hexdigest(),
                index=index,
            )
            self._write(token_file(index), token_bytes)
            self._write(document_file(index), end_bytes)
            manifest = replace(
                manifest,
                tokens=manifest.tokens + shard.tokens,
                documents=manifest.documents + shard.documents,
                max_token_id=max(manifest.max_token_id, int(tokens.max())),
                shards=(*manifest.shards, shard),
            )
        self._write_manifest(manifest)
        self._pending, self._pending_ends, self.pending_tokens = [], [], 0

    def finish(self, *, consumed: int = 0, beside: int = 0, bad_rows: BadRows | None = None) -> None:
        if self.pending_tokens:
            self.flush(consumed=consumed, beside=beside)
        self._write_manifest(replace(self.manifest, complete=True, bad_rows=bad_rows or BadRows()))

    def _write_manifest(self, manifest: Manifest) -> None:
        self._write(MANIFEST, json.dumps(manifest.to_json(), indent=1).encode())
        self.manifest = manifest

    def _write(self, name: str, content: bytes) -> None:
        write(self.folder / name, content, root=self.folder.parent)


def _continues(existing: Manifest, fresh: Manifest) -> bool:
    same = ("dtype", "streaming", "tokenizer", "shard_tokens", "source", "role")
    return all(getattr(existing, name) == getattr(fresh, name) for name in same)


# -- reading -----------------------------------------------------------------------------------------------


class Shards:
    """All tokens of a folder as one long sequence, read where they are needed."""

    def __init__(self, pieces: Sequence[Piece], *, name: str, manifest: Manifest | None, eos_id: int | None) -> None:
        self.name = name
        self.manifest = manifest
        self.eos_id = eos_id
        self._verify = False
        self._restart: Callable[[], bool] | None = None
        self._begin = 0  # of the part that this object shows, see `part`
        self._end: int | None = None
        self._found_ends: dict[Path, NDArray[np.int64]] = {}
        self._kept_ends: dict[Path, Ends] = {}
        # The number of open files is limited; reopening one is cheap.
        self._file = lru_cache(maxsize=OPEN_FILES)(NumberFile)
        self._refreshing = threading.Lock()
        self._set(pieces)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        verify: bool = True,
        role: Role | None = None,
        restart: Callable[[], bool] | None = None,
    ) -> Shards:
        """Opens a prepared folder, which must be of this `role`. Sizes are always checked; `verify` also checks every
        file's sha256.

        For an incomplete folder, `restart` restarts its writer, or returns False.
        """
        manifest = read_manifest(folder, role=role)
        if manifest is None:
            raise UsageError(f"{folder} has no {MANIFEST}; write one with `flatout data prepare`")
        if not manifest.complete and not manifest.streaming:
            raise UsageError(f"{folder} is incomplete: its preparation was stopped; run the same preparation again")
        shards = cls([], name=str(folder), manifest=manifest, eos_id=manifest.tokenizer.eos_id)
        shards._verify, shards._restart = verify, restart
        shards._take(manifest, folder=folder)
        return shards

    @classmethod
    def raw(cls, files: Sequence[Path], *, eos_id: int | None) -> Shards:
        """Opens token files of other programs: `.npy`, or `.bin` as plain uint16. They do not name their tokenizer."""
        pieces: list[Piece] = []
        for path in files:
            file = NumberFile(path, "<u2")
            if file.dtype.kind not in "iu":
                raise UsageError(f"{path} does not hold a flat array of whole numbers; save the token ids as one")
            pieces.append(Piece(path=path, dtype="<u2", begin=_end_of(pieces), tokens=file.count, ends_path=None))
        return cls(pieces, name=", ".join(map(str, files)), manifest=None, eos_id=eos_id)

    def part(self, begin: int, end: int) -> Shards:
        """The tokens from `begin` to `end` as a separate sequence, to hold out the end of a complete folder."""
        if not self.complete:
            raise UsageError(f"{self.name} is still being written, so its end is unknown; wait, or set data.valid_path")
        if not 0 <= begin <= end <= self.num_tokens:
            raise IndexError(f"tokens {begin} to {end} of {self.num_tokens} in {self.name}")
        part = Shards(self._pieces, name=self.name, manifest=self.manifest, eos_id=self.eos_id)
        part._begin, part._end = self._begin + begin, self._begin + end
        return part

    @property
    def num_tokens(self) -> int:
        """The tokens written so far; more may follow while not `complete`."""
        return (_end_of(self._pieces) if self._end is None else self._end) - self._begin

    @property
    def fingerprint(self) -> str:
        """One hash of the data, independent of its location and of how much of a stream is already written.

        A stream is identified by its source and tokenizer, raw files by their sizes and samples of their bytes: a
        change outside the samples is not noticed, but hundreds of gigabytes take only a moment.
        """
        content: list[Any]
        if self.manifest is None:
            content = [self.eos_id, *(_sampled_sha256(piece.path) for piece in self._pieces)]
        elif self.manifest.streaming:
            content = [self.manifest.source["key"], self.manifest.tokenizer.fingerprint]
        else:
            content = [shard.tokens_sha256 for shard in self.manifest.shards]
        return hashlib.sha256(json.dumps([content, self._begin, self._end]).encode()).hexdigest()

    @property
    def complete(self) -> bool:
        return self.manifest is None or self.manifest.complete

    @property
    def streaming(self) -> bool:
        return self.manifest is not None and self.manifest.streaming

    @property
    def tokenizer(self) -> TokenizerFacts | None:
        return self.manifest.tokenizer if self.manifest else None

    def window(self, start: int, length: int) -> NDArray[Any]:
        """`length` tokens from `start`, across files if necessary."""
        if not 0 <= start <= start + length <= self.num_tokens:
            raise IndexError(f"tokens {start} to {start + length} of {self.num_tokens} in {self.name}")
        begin = start + self._begin
        first = self._pieces[bisect.bisect_right(self._begins, begin) - 1] if length else None
        if first is not None and begin + length <= first.begin + first.tokens:  # nearly always
            return self._file(first.path, first.dtype).read(begin - first.begin, begin + length - first.begin)
        found = [
            self._file(piece.path, piece.dtype).read(
                max(begin - piece.begin, 0), min(begin + length - piece.begin, piece.tokens)
            )
            for piece in self._between(begin, begin + length)
        ]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def document_starts(self, start: int, length: int) -> NDArray[np.int64]:
        """Where documents begin inside a window, counted from its start; the window's first token is left out."""
        begin = start + self._begin
        found = []
        # A document begins where the previous one ends, which may be the last token of the previous file.
        for piece in self._between(begin, begin + length):
            ends = self._ends(piece, begin - piece.begin, begin + length - piece.begin)
            starts = ends + (piece.begin - begin)
            found.append(starts[starts > 0])
        return np.concatenate(found, dtype=np.int64) if found else np.empty(0, np.int64)

    def max_segments(self, length: int) -> int:
        """The largest number of documents, whole or cut, in any of the consecutive windows of `length`."""
        most, last, carried = 0, -1, 0
        for piece in self._pieces:
            starts = self._ends(piece, 0, piece.tokens + 1) + (piece.begin - self._begin)
            starts = starts[(starts > 0) & (starts < self.num_tokens) & (starts % length != 0)]
            if not len(starts):
                continue
            windows, counts = np.unique(starts // length, return_counts=True)
            if windows[0] == last:  # the window began in the previous file
                counts[0] += carried
            most, last, carried = max(most, int(counts.max())), int(windows[-1]), int(counts[-1])
        return most + 1

    def mean_context(self, length: int) -> float:
        """How many positions a token attends to on average, including its own, in windows of `length` without
        attention across documents. Estimated from the first windows, which is quick and accurate enough."""
        num_windows = min((self.num_tokens - 1) // length, MEASURED_WINDOWS)
        if num_windows < 1:
            raise UsageError(f"{self.name} has {self.num_tokens} tokens, but one sequence needs {length + 1}")
        end = num_windows * length
        begins = np.union1d(np.arange(0, end, length), self.document_starts(0, end))
        sizes = np.diff(begins, append=end)
        # Token i of a segment, counted from 1, sees i positions.
        return float((sizes * (sizes + 1) // 2).sum() / end)

    def check_vocab(self, vocab: int) -> None:
        """Refuses tokens outside a vocabulary of `vocab` ids before they reach the model."""
        facts = self.tokenizer
        if facts is not None and facts.vocab_size <= vocab:
            return
        if facts is not None and not self.complete:
            raise UsageError(
                f"the model has {vocab} ids, but {self.name} is being written by {facts.name} with {facts.vocab_size}; "
                f"set model.vocab to at least {facts.vocab_size}"
            )
        for piece in self._pieces:
            for begin, chunk in self._scan(piece):
                over = np.flatnonzero(chunk.astype(np.uint64) >= vocab)  # a negative id becomes a huge one
                if len(over):
                    position = begin + int(over[0])
                    raise UsageError(
                        f"{piece.path}: token {int(chunk[over[0]])} at position {position}, but there are "
                        f"only {vocab} ids; raise model.vocab, or name the data.tokenizer that made these tokens"
                    )

    def check_tokenizer(self, fingerprint: str, *, files: str | None = None) -> Literal["same", "unknown"]:
        """Refuses any tokenizer but the one that made the tokens; raw files do not name theirs."""
        if self.manifest is None:
            return "unknown"
        self.manifest.check_tokenizer(self.name, fingerprint, files=files)
        return "same"

    def refresh(self) -> None:
        """Adds the shards that were written since."""
        if self.complete:
            return
        with self._refreshing:
            folder = Path(self.name)
            manifest = read_manifest(folder)
            if manifest is None:
                raise RunFailed(f"{folder / MANIFEST} was removed while it was in use; {way_out(folder)}")
            self._take(manifest, folder=folder)

    def wait_for(self, num_tokens: int) -> None:
        """Returns when this many tokens are written, or when no more will follow.

        The writer may have belonged to another run and ended with it: then it is restarted if possible.
        """
        while self.num_tokens < num_tokens and not self.complete:
            alive = writer_is_alive(Path(self.name).parent)
            self.refresh()  # after the check for the writer, which may have finished in between
            if self.num_tokens >= num_tokens or self.complete:
                return
            if not alive and (self._restart is None or not self._restart()):
                raise RunFailed(
                    f"the writer of {self.name} stopped at {self.num_tokens} tokens, but {num_tokens} are needed next: "
                    f"{writer_message(Path(self.name).parent)}\nRun again: it continues where it stopped."
                )
            time.sleep(POLL_S)

    def _set(self, pieces: Sequence[Piece]) -> None:
        # In this order, another thread that still has the old pieces finds them at the same indices.
        self._begins = [piece.begin for piece in pieces]
        self._pieces = tuple(pieces)

    def _take(self, manifest: Manifest, *, folder: Path) -> None:
        pieces = list(self._pieces)
        fresh = range(len(pieces), len(manifest.shards))
        _check_files(folder, manifest, fresh, verify=self._verify)
        for index in fresh:
            shard = manifest.shards[index]
            path, ends_path = folder / token_file(index), folder / document_file(index)
            dtype = "<u2" if manifest.dtype == "uint16" else "<u4"
            pieces.append(
                Piece(path=path, dtype=dtype, begin=_end_of(pieces), tokens=shard.tokens, ends_path=ends_path)
            )
        self._set(pieces)
        self.manifest = manifest

    def _between(self, begin: int, end: int) -> Sequence[Piece]:
        first = bisect.bisect_right(self._begins, begin) - 1
        last = bisect.bisect_left(self._begins, end, lo=max(first, 0))
        return self._pieces[max(first, 0) : last]

    def _scan(self, piece: Piece) -> Iterator[tuple[int, NDArray[Any]]]:
        tokens = self._file(piece.path, piece.dtype)
        for begin in range(0, piece.tokens, SCAN_NUMBERS):
            yield begin, tokens.read(begin, min(begin + SCAN_NUMBERS, piece.tokens))

    def _ends(self, piece: Piece, low: int, high: int) -> NDArray[np.int64]:
        """Where documents of a piece end, from its token `low` up to, not including, `high`."""
        if piece.ends_path is not None:
            file = self._file(piece.ends_path, "<i8")
            if piece.ends_path not in self._kept_ends:
                self._kept_ends[piece.ends_path] = Ends(file, tokens=piece.tokens)
            return self._kept_ends[piece.ends_path].between(file, low, high)
        if self.eos_id is None:
            raise UsageError(f"{self.name} does not record where documents end; use data.packing: concat")
        if piece.path not in self._found_ends:
            found = [np.flatnonzero(chunk == self.eos_id) + (begin + 1) for begin, chunk in self._scan(piece)]
            self._found_ends[piece.path] = np.concatenate([np.empty(0, np.int64), *found])
        return within(self._found_ends[piece.path], low, high)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One token file, its first token's index in the whole, and the file of document ends (`None`: search for EOS)."""

    path: Path
    ends_path: Path | None
    dtype: str
    begin: int
    tokens: int


def _end_of(pieces: Sequence[Piece]) -> int:
    return pieces[-1].begin + pieces[-1].tokens if pieces else 0


def _check_files(folder: Path, manifest: Manifest, indices: Sequence[int], *, verify: bool) -> None:
    expected = []
    for index in indices:
        shard = manifest.shards[index]
        expected.append((folder / token_file(index), shard.tokens_bytes, shard.tokens_sha256))
        expected.append((folder / document_file(index), shard.documents_bytes, shard.documents_sha256))
    for path, size, _ in expected:
        try:
            with opened(path, root=folder) as file:
                found = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            raise UsageError(f"{path} is missing, though {MANIFEST} counts it; {way_out(folder)}") from None
        if found != size:
            raise UsageError(
                f"{path} has {found} bytes, {MANIFEST} says {size}: it was cut or changed; {way_out(folder)}"
            )
    if not verify:
        return
    # Hashing releases the GIL, so threads are enough.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for (path, _, wanted), got in zip(expected, pool.map(_sha256, [row[0] for row in expected]), strict=True):
            if got != wanted:
                raise UsageError(
                    f"{path} has changed since it was written: sha256 {got[:12]}…, {MANIFEST} says {wanted[:12]}…; "
                    f"{way_out(folder)}"
                )


def _sha256(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(cast(io.BufferedReader, file), "sha256").hexdigest()


def _sampled_sha256(path: Path) -> str:
    """A hash of the size and of blocks spread evenly over the file, first and last included; a small file whole."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        last = max(size - BLOCK_BYTES, 0)
        for begin in sorted({last * i // (SAMPLED_BLOCKS - 1) for i in range(SAMPLED_BLOCKS)}):
            file.seek(begin)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
