"""Turns documents into token shards once: tokenized, split into training and validation, and cached.

    prepare           prepares all of it, then returns: `flatout data prepare`, and every recipe by default
    start_background  in a separate process, for a streamed dataset: training starts with the first shard

Both write the same layout, `train/`, `valid/` and `tokenizer/` below one folder, and both continue where an
interrupted preparation stopped. `python -m flatout.data.prepare` is that process; it reads its task as JSON on stdin.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout import files
from flatout.config.settings import DataSettings
from flatout.data import embedded
from flatout.data.manifest import FORMAT, MANIFEST, Manifest, Role, TokenizerFacts, read_manifest
from flatout.data.shards import POLL_S, SHARD_TOKENS, Shards, ShardWriter
from flatout.data.sources import (
    SUFFIXES,
    Document,
    SourceChanged,
    Stamp,
    Tally,
    Which,
    describe_source,
    find_files,
    read_documents,
    require_unchanged,
    source_files,
    stamps,
)
from flatout.data.tokenizer import KEPT_FILES, Tokenizer, encode_arrays, kept_tokenizer, load_tokenizer
from flatout.data.writing import (
    LOCK,
    LOG,
    make_folder,
    sweep,
    writer_is_alive,
    writer_lock,
    writer_log,
    writer_message,
)
from flatout.errors import EnvironmentLacks, FlatoutError, RunFailed, UsageError
from flatout.files import inside, open_for_appending, own_python, own_python_path

ENCODE_CHARACTERS = 8 << 20
ENCODE_DOCUMENTS = 4096
LOCK_ATTEMPTS = 20
LOCK_RETRY_S = 0.05
NICENESS = 10
STARTS = 3  # of the writer by one run, without a new shard in between
DEFAULT_TOKENIZER = DataSettings().tokenizer
PARTS: tuple[Role, ...] = ("train", "valid")
WRITER = tuple(own_python("flatout.data.prepare"))

Progress = Callable[[int, int], None]  # bytes of text read, tokens written


@dataclass(frozen=True, kw_only=True)
class Split:
    train: Shards
    valid: Shards


@dataclass(frozen=True, kw_only=True)
class Prepared:
    train: Path
    valid: Path
    tokenizer: Tokenizer
    reused: bool
    of_one: bool = True  # whether both are parts of one prepared folder, each in its place
    hold_out: float = 0.0  # `source: tokens` without validation data: this share of the tokens, from the end
    restart: Callable[[], bool] | None = None  # restarts the writer of a stream, see `Shards.open`

    def open(self, *, verify: bool = True) -> Split:
        train = self._open(self.train, role="train", verify=verify)
        if not self.hold_out:
            return Split(train=train, valid=self._open(self.valid, role="valid", verify=verify))
        cut = train.num_tokens - round(train.num_tokens * self.hold_out)
        return Split(train=train.part(0, cut), valid=train.part(cut, train.num_tokens))

    def _open(self, path: Path, *, role: Role, verify: bool) -> Shards:
        if os.path.lexists(path / MANIFEST):
            # A folder that the user names may be of either part; a folder found by its name must be that part.
            found = role if path.name == role and self.of_one else None
            return Shards.open(path, verify=verify, role=found, restart=self.restart)
        return Shards.raw(find_files(str(path), key="path", suffixes=SUFFIXES["tokens"]), eos_id=self.tokenizer.eos_id)


@dataclass(frozen=True, kw_only=True)
class Background:
    """Data that may still be growing, and the writer that adds to it (`None`: the data is complete)."""

    prepared: Prepared
    writer: Writer | None

    def close(self) -> None:
        """Stops this run's writer. Another run that reads the data, or a later one, continues its work."""
        if self.writer is not None:
            self.writer.close()


def prepare(settings: DataSettings, *, seed: int, to: Path | None = None, progress: Progress | None = None) -> Prepared:
    """Prepares the data of a run in `to` or in the cache, unless it is complete there. Returns its location."""
    if settings.source == "tokens":
        if to is not None:
            raise UsageError(f"`source: tokens` is already prepared, nothing is written to {to}; name text to prepare")
        return _given_tokens(settings)
    if to is not None:
        _require_ours(to)
    task = _task(settings, seed=seed, to=to, streaming=False, shard_tokens=SHARD_TOKENS)
    if task.root.is_dir() and _is_complete(task):  # works in a read-only folder too
        return _prepared(task, reused=True)
    chosen_by = "data.cache" if to is None else "--to"
    # Another process may be preparing the same data: then wait for it and reuse its work.
    with writer_lock(task.root, wait=True, chosen_by=chosen_by):
        reused = _is_complete(task)
        if not reused:
            try:
                _write(task, progress=progress)
            except SourceChanged:  # the shards may mix both versions of the file
                for name in PARTS:
                    (task.root / name / MANIFEST).unlink(missing_ok=True)
                raise
    return _prepared(task, reused=reused)


def start_background(settings: DataSettings, *, seed: int, shard_tokens: int = SHARD_TOKENS) -> Background:
    """Returns as soon as the first shards are written. A separate process writes the rest into the cache."""
    if settings.source == "tokens":
        return Background(prepared=_given_tokens(settings), writer=None)
    task = _task(settings, seed=seed, to=None, streaming=True, shard_tokens=shard_tokens)
    if _is_complete(task):
        return Background(prepared=_prepared(task, reused=True), writer=None)
    writer = Writer(task)
    while True:
        running = writer.is_running
        alive = writer_is_alive(task.root)  # shards of an interrupted run exist before the new writer starts
        if _is_complete(task) or (alive and _has_begun(task)):
            break
        if not (running or alive):
            # The process ends early and without error if another run's writer was running; that may be gone by now.
            code = writer.process.returncode if writer.process is not None else 0
            if code or not writer.restart():
                kind = {2: UsageError, 3: EnvironmentLacks}.get(code, RunFailed)
                raise kind(f"the data could not be prepared: {writer_message(task.root)}")
        time.sleep(POLL_S)
    return Background(prepared=_prepared(task, reused=False, restart=writer.restart), writer=writer)


def describe(folder: Path) -> dict[str, Any]:
    """Describes a prepared folder for printing: counts, tokenizer, and rows left out."""
    found = {name: _manifest_of(folder, name) for name in PARTS} | {"tokens": read_manifest(folder)}
    if not any(found.values()):
        raise UsageError(f"{folder} has no prepared data; write it with `flatout data prepare`")
    return {name: _counts(manifest) for name, manifest in found.items() if manifest is not None}


def left_out(folder: Path) -> str:
    """Describes the rows left out of a prepared folder; empty if there are none."""
    return left_out_words(found for name in PARTS if (found := _manifest_of(folder, name)) is not None)


def left_out_words(manifests: Iterable[Manifest]) -> str:
    summaries = [(manifest.complete, manifest.bad_rows.summary()) for manifest in manifests]
    return "; ".join(said if complete else f"so far {said}" for complete, said in summaries if said)


def cache_folder(settings: DataSettings) -> Path:
    return Path(settings.cache).expanduser() if settings.cache else files.cache_folder()


# -- the task ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Task:
    settings: DataSettings
    seed: int
    root: Path
    key: str  # of everything that determines the data
    streaming: bool
    shard_tokens: int
    since: Mapping[str, list[Stamp]] = field(default_factory=dict)  # the files of each part at the start


def _task(settings: DataSettings, *, seed: int, to: Path | None, streaming: bool, shard_tokens: int) -> Task:
    if settings.valid_path and settings.source in ("embedded", "hf"):
        raise UsageError(f"data.valid_path is for files, not for `source: {settings.source}`; use data.valid_share")
    trained = settings.tokenizer.startswith("bpe:")  # determined by the data and the size, both in the key
    since: dict[str, list[Stamp]] = {"train": stamps(source_files(settings, which="train"))}
    if settings.valid_path:
        since["valid"] = stamps(source_files(settings, which="valid"))
    content: dict[str, Any] = {
        "format": FORMAT,
        "source": settings.source,
        "seed": seed,
        "streaming": streaming,
        "shard_tokens": shard_tokens,
        "tokenizer": settings.tokenizer if trained else _finished_tokenizer(settings.tokenizer).fingerprint,
        "bad_rows": [settings.on_bad_row, settings.max_bad_share],
        "train": since["train"],
        "valid": since.get("valid", settings.valid_share),
    }
    if settings.source == "embedded":
        content |= {"megabytes": settings.embedded_mb, "generator": _sha256(Path(embedded.__file__).read_bytes())}
    elif settings.source == "text":
        content |= {"separator": settings.separator}
    else:
        content |= {"name": [settings.name, settings.subset, settings.split], "field": settings.field}
    key = _sha256(json.dumps(content, sort_keys=True).encode())[:24]
    root = to if to is not None else cache_folder(settings) / "data" / key
    return Task(
        settings=settings,
        seed=seed,
        root=root,
        key=key,
        streaming=streaming,
        shard_tokens=shard_tokens,
        since=since,
    )


def _require_ours(root: Path) -> None:
    """Refuses a folder that holds anything but a complete or interrupted preparation."""
    try:
        names = {entry.name for entry in root.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return
    marks = LOCK in names or os.path.lexists(root / "train" / MANIFEST)
    if names and not (marks and all(name in (*PARTS, "tokenizer", LOCK, LOG) for name in names)):
        raise UsageError(f"{root} holds other files, and nothing is overwritten: choose another folder with --to")


def _manifest_of(root: Path, name: Role) -> Manifest | None:
    """The manifest of one part of a prepared folder. It must be that part, and must not be a link to elsewhere."""
    return read_manifest(inside(root / name, root), role=name)


def _finished_tokenizer(spec: str) -> Tokenizer:
    return load_tokenizer(spec, documents=None, cache=Path())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _is_complete(task: Task) -> bool:
    manifests = [_manifest_of(task.root, name) for name in PARTS]
    if any(m is not None and m.complete and m.source["key"] != task.key for m in manifests):
        raise UsageError(f"{task.root} holds data prepared with other settings; remove it or name another folder")
    return all(m is not None and m.complete for m in manifests)


def _has_begun(task: Task) -> bool:
    manifests = (_manifest_of(task.root, name) for name in PARTS)
    return all(m is not None and m.source["key"] == task.key and m.shards for m in manifests)


def _prepared(task: Task, *, reused: bool, restart: Callable[[], bool] | None = None) -> Prepared:
    tokenizer = load_tokenizer(task.settings.tokenizer, documents=None, cache=task.root / "tokenizer")
    for name in PARTS:
        if (manifest := _manifest_of(task.root, name)) is not None:
            _check_tokenizer(task, manifest, name, tokenizer)
    return Prepared(
        train=task.root / "train", valid=task.root / "valid", tokenizer=tokenizer, reused=reused, restart=restart
    )


def _check_tokenizer(task: Task, manifest: Manifest, name: Role, tokenizer: Tokenizer) -> None:
    kept = tokenizer.files_fingerprint if task.settings.tokenizer.startswith("bpe:") else None
    manifest.check_tokenizer(task.root / name, tokenizer.fingerprint, files=kept)


def _counts(manifest: Manifest) -> dict[str, Any]:
    return {
        "tokens": manifest.tokens,
        "documents": manifest.documents,
        "shards": len(manifest.shards),
        "bytes": sum(shard.tokens_bytes + shard.documents_bytes for shard in manifest.shards),
        "complete": manifest.complete,
        "tokenizer": manifest.tokenizer.name,
        "vocab_size": manifest.tokenizer.vocab_size,
        "source": manifest.source.get("from"),
        "bad_rows": asdict(manifest.bad_rows),
    }


# -- writing -----------------------------------------------------------------------------------------------


def _write(task: Task, *, progress: Progress | None) -> None:
    """Tokenizes everything into `train` and `valid`, continuing after the last shard of an interrupted attempt.

    A document is held out by a hash of its number, so a stream needs no second pass. The first one always is and
    the second never, so that both parts have one. If there is only one document, its last tokens are held out. If the
    first document is larger than a shard, the last tokens of every stretch of that size are, so that the document
    need not fit into memory.
    """
    settings, seed = task.settings, task.seed
    sweep(task.root)
    tokenizer = _tokenizer_of(task)
    train = _writer(task, "train", tokenizer=tokenizer)
    if settings.valid_path:
        _write_own_valid(task, tokenizer=tokenizer)
        valid = None
    else:
        valid = _writer(task, "valid", tokenizer=tokenizer, keep_shards=train.manifest.beside)

    tally = Tally.of(settings)
    documents = read_documents(settings, which="train", seed=seed, tally=tally, since=task.since["train"])
    consumed = train.manifest.consumed
    number = sum(piece.ends for piece in islice(documents, consumed))
    first: list[NDArray[Any]] = []  # the first document, until it is known to be large or not the only one
    for piece, tokens in _encode(documents, tokenizer=tokenizer, progress=progress):
        consumed += 1
        if valid is None:
            train.append(tokens, ends=piece.ends)
        elif number == 0:
            first.append(tokens)
            if sum(map(len, first)) >= task.shard_tokens:
                _cut(first, train=train, valid=valid, share=settings.valid_share)
                first = []
        else:
            if first and train.num_tokens:  # the rest of a large one
                _cut(first, train=train, valid=valid, share=settings.valid_share)
            elif first:
                valid.append(np.concatenate(first))
            first = []
            side = valid if _held_out(number, seed=seed, share=settings.valid_share) else train
            side.append(tokens, ends=piece.ends)
        number += piece.ends
        if train.pending_tokens >= task.shard_tokens:
            # A shard that was read from a changed file is not counted.
            require_unchanged(task.since["train"])
            # The training manifest is written last: it says how many validation shards belong to it.
            if valid is not None and valid.pending_tokens:
                valid.flush()
            train.flush(consumed=consumed, beside=len(valid.manifest.shards) if valid else 0, bad_rows=tally.facts())
    require_unchanged(task.since["train"])
    if valid is not None:
        if first:
            _cut(first, train=train, valid=valid, share=settings.valid_share)
        valid.finish()
    train.finish(consumed=consumed, beside=len(valid.manifest.shards) if valid else 0, bad_rows=tally.facts())


def _cut(stretch: list[NDArray[Any]], *, train: ShardWriter, valid: ShardWriter, share: float) -> None:
    """Holds out the last tokens of one stretch of text. Both parts end with EOS, since they are no longer adjacent."""
    tokens = np.concatenate(stretch)
    begin = max(len(tokens) - max(1, round(len(tokens) * share)), 0)
    for side, part in ((train, tokens[:begin]), (valid, tokens[begin:])):
        if len(part):
            side.append(part)


def _tokenizer_of(task: Task) -> Tokenizer:
    kept = inside(task.root / "tokenizer", task.root)
    sweep(kept)
    existing = _manifest_of(task.root, "train")
    if existing is None or existing.source.get("key") != task.key:
        for name in KEPT_FILES:  # they may belong to other data
            (kept / name).unlink(missing_ok=True)
        existing = None

    def texts() -> Iterator[str]:
        tally = Tally.of(task.settings)
        documents = read_documents(task.settings, which="train", seed=task.seed, tally=tally, since=task.since["train"])
        return (document.text for document in documents)

    tokenizer = load_tokenizer(task.settings.tokenizer, documents=texts, cache=kept)
    if existing is not None:
        _check_tokenizer(task, existing, "train", tokenizer)
    require_unchanged(task.since["train"])
    tokenizer.save(kept)
    return tokenizer


def _writer(task: Task, name: Which, *, tokenizer: Tokenizer, keep_shards: int | None = None) -> ShardWriter:
    facts = TokenizerFacts(
        name=tokenizer.name,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        files=tokenizer.files_fingerprint,
    )
    which: Which = name if task.settings.valid_path else "train"
    return ShardWriter(
        task.root / name,
        tokenizer=facts,
        source={"key": task.key, "kind": task.settings.source, "from": describe_source(task.settings, which=which)},
        role=name,
        streaming=task.streaming,
        shard_tokens=task.shard_tokens,
        keep_shards=keep_shards,
    )


def _write_own_valid(task: Task, *, tokenizer: Tokenizer) -> None:
    """Writes validation data from its own files. It is small and needed from the start, so it is written first."""
    existing = _manifest_of(task.root, "valid")
    if existing is not None and existing.complete and existing.source.get("key") == task.key:
        return
    writer = _writer(task, "valid", tokenizer=tokenizer, keep_shards=0)
    tally = Tally.of(task.settings)
    documents = read_documents(task.settings, which="valid", seed=task.seed, tally=tally, since=task.since["valid"])
    for piece, tokens in _encode(documents, tokenizer=tokenizer, progress=None):
        writer.append(tokens, ends=piece.ends)
        if writer.pending_tokens >= task.shard_tokens:
            writer.flush()
    require_unchanged(task.since["valid"])
    writer.finish(bad_rows=tally.facts())


def _encode(
    documents: Iterator[Document], *, tokenizer: Tokenizer, progress: Progress | None
) -> Iterator[tuple[Document, NDArray[Any]]]:
    num_bytes = num_tokens = 0
    for batch in _batches(documents):
        texts = [document.text for document in batch]
        encoded = encode_arrays(tokenizer, texts)
        yield from zip(batch, encoded, strict=True)
        if progress is not None:
            num_bytes += sum(len(text.encode()) for text in texts)
            num_tokens += sum(map(len, encoded))
            progress(num_bytes, num_tokens)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= ENCODE_CHARACTERS or len(batch) >= ENCODE_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _held_out(number: int, *, seed: int, share: float) -> bool:
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return number != 1 and int.from_bytes(digest, "little") < share * 2**64


# -- existing tokens ---------------------------------------------------------------------------------------


def _given_tokens(settings: DataSettings) -> Prepared:
    if not settings.path:
        raise UsageError("data.path is not set: `source: tokens` needs a prepared folder, or .bin or .npy files")
    given = Path(settings.path).expanduser()
    train = _part(given, "train")
    if settings.valid_path:
        valid = _part(Path(settings.valid_path).expanduser(), "valid")
    else:
        valid = inside(given / "valid", given) if train != given else train
    kept = train.parent / "tokenizer"
    own = os.path.lexists(kept / "tokenizer.json") and os.path.lexists(train / MANIFEST)
    own = own and settings.tokenizer == DEFAULT_TOKENIZER
    if own:
        tokenizer = kept_tokenizer(inside(kept, train.parent), name=str(kept))
    else:
        tokenizer = load_tokenizer(settings.tokenizer, documents=None, cache=kept)
    prepared = Prepared(
        train=train,
        valid=valid,
        tokenizer=tokenizer,
        reused=True,
        of_one=train != given,
        hold_out=settings.valid_share if valid == train else 0.0,
    )
    split = prepared.open(verify=False)
    split.train.check_tokenizer(tokenizer.fingerprint, files=tokenizer.files_fingerprint if own else None)
    for shards in (split.train, split.valid):
        if shards.check_tokenizer(tokenizer.fingerprint) == "unknown":
            shards.check_vocab(tokenizer.vocab_size)  # all that can be checked for raw files
    return prepared


def _part(given: Path, name: Role) -> Path:
    """The part of a prepared folder, or the given path itself."""
    return inside(given / name, given) if os.path.lexists(given / name / MANIFEST) else given


# -- the background process --------------------------------------------------------------------------------


class Writer:
    """The process that writes a stream. It is started if none is running, and ends with the run that started it.

    Every rank of every run that reads the same data has one of these objects. The first process takes the lock and a
    second one exits; when the running one ends with its run, the others start the next.
    """

    def __init__(self, task: Task) -> None:
        self.process: subprocess.Popen[str] | None = None
        self._task = task
        self._starts_left = STARTS
        self._num_tokens = 0  # written at the last start
        self._closed = False
        self._lock = threading.Lock()  # the threads of a feed wait for the same shards

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def restart(self) -> bool:
        """Makes sure that a writer is running. False if too many starts failed, or the data itself was refused."""
        with self._lock:
            if self.is_running or writer_is_alive(self._task.root):
                return True
            refused = self.process is not None and self.process.returncode == UsageError.exit_code
            existing = read_manifest(self._task.root / "train")
            if existing is not None and existing.tokens > self._num_tokens:
                self._num_tokens, self._starts_left = existing.tokens, STARTS
            if self._closed or refused or not self._starts_left:
                return False
            self._starts_left -= 1
            self.process = _spawn(self._task)
            return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self.process is not None:
                self.process.terminate()
                self.process.wait()


def _spawn(task: Task) -> subprocess.Popen[str]:
    spec = asdict(task) | {"root": str(task.root), "parent": os.getpid()}
    make_folder(task.root)
    writer_log(task.root).unlink(missing_ok=True)  # left by an earlier writer
    with os.fdopen(open_for_appending(writer_log(task.root)), "w") as log:
        # A folder named `datasets` in the current directory must not be imported as the package.
        env = os.environ | {"PYTHONPATH": own_python_path()}
        process = subprocess.Popen(WRITER, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, env=env)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:  # a process that is already dead is noticed below
        json.dump(spec, stdin)
    return process


def main() -> int:
    spec = json.load(sys.stdin)
    parent = spec.pop("parent")
    task = Task(**spec | {"settings": DataSettings(**spec["settings"]), "root": Path(spec["root"])})
    os.nice(NICENESS)  # the trainer's own threads come first

    def stop_when_orphaned(num_bytes: int, num_tokens: int) -> None:
        if os.getppid() != parent:
            raise RunFailed("the run that needed this data has ended")

    try:
        for _ in range(LOCK_ATTEMPTS):  # a reader that checks for a live writer holds the lock for a moment
            with writer_lock(task.root, wait=False) as held:
                if held:
                    return _write_or_report(task, stop_when_orphaned)
            time.sleep(LOCK_RETRY_S)
    except FlatoutError as error:
        return _report(error)
    return 0  # another writer is running


def _write_or_report(task: Task, progress: Progress) -> int:
    """Writes under the lock, and reports under it too: a reader who finds the lock free reads the whole message."""
    try:
        if not _is_complete(task):
            _write(task, progress=progress)
    except FlatoutError as error:
        return _report(error)
    writer_log(task.root).unlink(missing_ok=True)  # only failures are reported
    return 0


def _report(error: FlatoutError) -> int:
    print(error, file=sys.stderr, flush=True)
    return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
