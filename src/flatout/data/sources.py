"""Reads documents from any source: generated, text, JSON lines, Parquet, or a Hugging Face dataset.

Everything is streamed in a fixed order, so that an interrupted preparation can continue where it stopped. A row
that cannot be used is counted by reason, with the first places, and too many of them stop the preparation. A file
that changes while it is read stops it too. No row and no compressed file takes more memory than a few times
`ROW_BYTES`. Used by `flatout data prepare` and every recipe that prepares its own data.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from flatout.config.settings import DataSettings
from flatout.data import embedded
from flatout.data.manifest import BadRows
from flatout.errors import EnvironmentLacks, UsageError, first_line
from flatout.files import BadFile, checked, opened

Which = Literal["train", "valid"]
Stamp = tuple[str, int, int]  # a file's real path, its bytes, and the time of its last change
ByteStream = IO[bytes] | gzip.GzipFile | io.BufferedReader
SUFFIXES = {
    "text": (".txt", ".txt.gz", ".txt.xz"),
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.xz"),
    "parquet": (".parquet",),
    "tokens": (".bin", ".npy"),
}
CHUNK_BYTES = 1 << 20
# The longest line of JSON and the longest text of one row; documents of text files may have any length.
ROW_BYTES = 64 << 20
XZ_MEMORY_BYTES = 256 << 20  # `xz -9` needs 65 MiB
PARQUET_ROWS, PARQUET_BYTES = 64, 1 << 30  # the most that is read at once
# A text without separators is passed on in pieces, so that no file has to fit into memory.
PIECE_BYTES = 4 << 20
ROWS_BEFORE_EARLY_STOP = 1000
EXAMPLES_PER_REASON = 3
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    text: str
    ends: bool = True  # False: the next one continues this document


@dataclass(kw_only=True)
class Tally:
    """Counts rows, keeps the first bad ones of each reason, and stops the preparation as configured."""

    on_bad_row: Literal["skip", "stop"]
    max_bad_share: float
    rows: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: DataSettings) -> Tally:
        return cls(on_bad_row=settings.on_bad_row, max_bad_share=settings.max_bad_share)

    @property
    def num_bad(self) -> int:
        return sum(self.reasons.values())

    def good(self) -> None:
        self.rows += 1

    def bad(self, reason: str, *, where: str) -> None:
        self.rows += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES_PER_REASON:
            examples.append(where)
        if self.on_bad_row == "stop":
            raise UsageError(f"{where}: {reason}; repair the row, or skip such rows with data.on_bad_row: skip")
        if self.rows > ROWS_BEFORE_EARLY_STOP:
            self.check()

    def check(self) -> None:
        """Raise when the share of bad rows is over the limit."""
        if self.num_bad > self.max_bad_share * self.rows:
            raise UsageError(
                f"{self.num_bad} of {self.rows} rows cannot be used, more than data.max_bad_share "
                f"({self.max_bad_share:g}): {self.summary()}; repair them, or raise the limit"
            )

    def summary(self) -> str:
        return "; ".join(
            f"{count} {reason} (first: {', '.join(self.examples[reason])})" for reason, count in self.reasons.items()
        )

    def facts(self) -> BadRows:
        places = {reason: tuple(found) for reason, found in self.examples.items()}
        return BadRows(rows=self.rows, bad=self.num_bad, reasons=dict(self.reasons), examples=places)


class SourceChanged(UsageError):
    """A file was changed after the preparation started."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(
            f"{path} was changed while the data was prepared from it, so it is not used. Wait until it is no longer "
            "written to, and run the same command again"
        )


def read_documents(
    settings: DataSettings, *, which: Which, seed: int, tally: Tally, since: Sequence[Stamp] | None = None
) -> Iterator[Document]:
    """The documents of the training data, or of the validation data if the settings name separate files.

    The files must match the stamps in `since` and stay unchanged.
    """
    rows: Iterator[Document]
    if settings.source == "embedded":
        rows = (Document(text=text) for text in embedded.documents(seed, settings.embedded_mb))
    elif settings.source == "hf":
        rows = _hf(settings, tally=tally)
    else:
        files = _files(settings, which=which, since=since)
        rows = (row for path, stamp in files for row in _file(path, settings, stamp=stamp, tally=tally))
    empty = True
    for row in rows:
        if row.ends:
            tally.good()
        empty = False
        yield row
    tally.check()
    if empty:
        raise UsageError(f"no documents in {describe_source(settings, which=which)}{_bad_note(tally)}; name other data")


def _bad_note(tally: Tally) -> str:
    return f" ({tally.summary()})" if tally.num_bad else ""


def describe_source(settings: DataSettings, *, which: Which) -> str:
    if settings.source == "embedded":
        return f"the embedded corpus ({settings.embedded_mb:g} MB)"
    if settings.source == "hf":
        return "/".join(filter(None, (settings.name, settings.subset, settings.split)))
    return str(settings.path if which == "train" else settings.valid_path)


def source_files(settings: DataSettings, *, which: Which) -> list[Path]:
    """The files of `path` or `valid_path`, in the order in which they are read; empty for other sources."""
    if settings.source in ("embedded", "hf"):
        return []
    key, given = ("path", settings.path) if which == "train" else ("valid_path", settings.valid_path)
    if not given:
        raise UsageError(f"data.{key} is not set: `source: {settings.source}` needs a file, a folder or a glob")
    return find_files(given, key=key, suffixes=SUFFIXES[settings.source])


def find_files(given: str, *, key: str, suffixes: tuple[str, ...]) -> list[Path]:
    """A file itself, the files of a folder with one of the suffixes, or the matches of a glob."""
    path = Path(given).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.name.endswith(suffixes) and not file.is_dir())
        if not files:
            raise UsageError(f"data.{key}: the folder {given} has no {', '.join(suffixes)} file; name another one")
    elif path.exists():
        files = [path]
    else:
        files = sorted(Path(found) for found in glob.glob(str(path), recursive=True) if not Path(found).is_dir())
        if not files:
            raise UsageError(f"data.{key}: {given} does not exist, and as a glob it matches no file; correct the path")
    for file in files:
        try:
            checked(file)
        except FileNotFoundError:
            raise UsageError(f"data.{key}: {file} does not exist, or is a broken link; correct the path") from None
        except BadFile as error:
            raise UsageError(f"data.{key}: {error}; name a regular file") from None
    return files


# -- unchanged files ---------------------------------------------------------------------------------------


def stamps(files: Sequence[Path]) -> list[Stamp]:
    """Stamps of files, to detect changes."""
    return [_stamp(file, os.stat(file)) for file in files]


def require_unchanged(since: Sequence[Stamp]) -> None:
    """Raises if one of these files was changed or removed since."""
    for name, size, changed in since:
        try:
            found = os.stat(name)
        except FileNotFoundError:
            raise SourceChanged(name) from None
        if (found.st_size, found.st_mtime_ns) != (size, changed):
            raise SourceChanged(name)


def _stamp(path: Path, found: os.stat_result) -> Stamp:
    return str(path.resolve()), found.st_size, found.st_mtime_ns


def _files(settings: DataSettings, *, which: Which, since: Sequence[Stamp] | None) -> list[tuple[Path, Stamp]]:
    return stamped(source_files(settings, which=which), since=since)


def stamped(files: Sequence[Path], *, since: Sequence[Stamp] | None) -> list[tuple[Path, Stamp]]:
    """Files with their stamps, which must be those of before."""
    now = stamps(files)
    if since is not None and now != [tuple(stamp) for stamp in since]:
        before = {stamp[0]: tuple(stamp) for stamp in since}
        other = [name for name, *rest in now if before.get(name) != (name, *rest)]
        raise SourceChanged((other or [name for name in before if name not in {stamp[0] for stamp in now}])[0])
    return list(zip(files, now, strict=True))


def _file(path: Path, settings: DataSettings, *, stamp: Stamp, tally: Tally) -> Iterator[Document]:
    with reading(path, stamp=stamp) as stream:
        if settings.source == "parquet":
            yield from _parquet(path, field=settings.field, tally=tally)
        elif settings.source == "text":
            yield from _text(stream, path, settings, tally=tally)
        else:
            yield from _jsonl(stream, path, settings, tally=tally)


@contextmanager
def reading(path: Path, *, stamp: Stamp) -> Iterator[ByteStream]:
    """Opens a file, which must not change until all of it was read."""

    def check(file: IO[bytes]) -> None:
        here = os.fstat(file.fileno())
        try:
            there = os.stat(path)  # another file may have been put in its place
        except FileNotFoundError:
            raise SourceChanged(path) from None
        same_file = (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
        if not same_file or (here.st_size, here.st_mtime_ns) != tuple(stamp[1:]):
            raise SourceChanged(path)

    try:
        with opened(path) as file:
            check(file)
            try:
                with _decompressed(file, path) as stream:
                    yield stream
            except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
                check(file)
                # How many rows are lost cannot be known, so no policy may skip them.
                raise UsageError(f"{path} is damaged ({error}); replace it, or leave it out") from error
            check(file)
    except FileNotFoundError:
        raise SourceChanged(path) from None


@contextmanager
def _decompressed(file: IO[bytes], path: Path) -> Iterator[ByteStream]:
    if path.suffix == ".gz":
        with gzip.GzipFile(fileobj=file) as stream:
            yield stream
    elif path.suffix == ".xz":
        yield io.BufferedReader(_Xz(file), CHUNK_BYTES)
    else:
        yield file


class _Xz(io.RawIOBase):
    """Like `lzma.LZMAFile`, with a limit on the memory that a file can request."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = self._new()

    def _new(self) -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(memlimit=XZ_MEMORY_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            given = b""
            if self._decoder.eof or self._decoder.needs_input:
                rest = self._decoder.unused_data if self._decoder.eof else b""
                given = rest or self._file.read(CHUNK_BYTES)
                if self._decoder.eof:
                    given = given.lstrip(b"\0")  # streams may be padded
                    if not given and self._file.peek(1) == b"":  # type: ignore[attr-defined]
                        return 0
                    self._decoder = self._new()
                elif not given:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            found = self._decoder.decompress(given, len(buffer))
            if found:
                buffer[: len(found)] = found
                return len(found)


# -- text --------------------------------------------------------------------------------------------------


def _text(stream: ByteStream, path: Path, settings: DataSettings, *, tally: Tally) -> Iterator[Document]:
    if not settings.separator:
        raise UsageError("data.separator is empty; give the line or mark between documents")
    row, begun, anything = 1, False, False
    for piece, ends in _split(stream, separator=settings.separator.encode()):
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            tally.bad("invalid UTF-8", where=f"{path}:{row}")
            text, anything = "", True
        # Line ends next to a separator belong to the separator.
        text = text if begun else text.lstrip("\r\n")
        text = text.rstrip("\r\n") if ends else text
        if text.strip() or (ends and begun):
            yield Document(text=text, ends=ends)
            begun, anything = not ends, True
        row += ends
    if not anything:
        tally.bad("empty file", where=f"{path}:1")


def _split(stream: ByteStream, *, separator: bytes) -> Iterator[tuple[bytes, bool]]:
    """Pieces between separators, each with a flag for the end of its document."""
    buffer = stream.read(CHUNK_BYTES).removeprefix(BYTE_ORDER_MARK)
    chunk = buffer
    while chunk:
        if separator in buffer:
            *whole, buffer = buffer.split(separator)
            yield from ((piece, True) for piece in whole)
        if len(buffer) > PIECE_BYTES:
            cut = _piece_end(buffer, limit=len(buffer) - len(separator))
            yield buffer[:cut], False
            buffer = buffer[cut:]
        chunk = stream.read(CHUNK_BYTES)
        buffer += chunk
    yield buffer, True


def _piece_end(buffer: bytes, *, limit: int) -> int:
    """Where to cut before `limit`: after a line, else between words, else at least between characters."""
    for mark in (b"\n", b" "):
        cut = buffer.rfind(mark, 0, limit)
        if cut > 0:
            return cut + (mark == b"\n")  # a word keeps the space before it
    for cut in range(limit, max(limit - 4, 0), -1):
        if buffer[cut] & 0xC0 != 0x80:  # not a continuation byte of UTF-8
            return cut
    return limit  # not UTF-8, which decoding will report


# -- rows --------------------------------------------------------------------------------------------------


def _jsonl(stream: ByteStream, path: Path, settings: DataSettings, *, tally: Tally) -> Iterator[Document]:
    for where, row in json_rows(stream, path, tally=tally):
        yield from _row(row, field=settings.field, where=where, tally=tally)


def json_rows(stream: ByteStream, path: Path, *, tally: Tally) -> Iterator[tuple[str, Any]]:
    """The place and value of each line."""
    for number, line in enumerate(bounded_lines(stream), start=1):
        where = f"{path}:{number}"
        if line is None:
            tally.bad(TOO_LONG, where=where)
            continue
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError:
            tally.bad("invalid UTF-8", where=where)
        except (ValueError, RecursionError):
            tally.bad("invalid JSON", where=where)
        else:
            yield where, row


TOO_LONG = f"longer than {ROW_BYTES >> 20} MiB"


def bounded_lines(stream: ByteStream) -> Iterator[bytes | None]:
    """Lines; None for a line that is too long, which is never kept in memory."""
    while line := stream.readline(ROW_BYTES + 1):
        if len(line) <= ROW_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(CHUNK_BYTES)
        yield None


def _row(row: Any, *, field: str, where: str, tally: Tally) -> Iterator[Document]:
    if not isinstance(row, dict):
        tally.bad("not an object", where=where)
    elif field not in row:
        tally.bad(f"missing field {field!r}", where=where)
    else:
        yield from _value(row[field], where=where, tally=tally)


def _value(value: Any, *, where: str, tally: Tally) -> Iterator[Document]:
    if value is None:
        tally.bad("null", where=where)
    elif not isinstance(value, str):
        tally.bad("not a string", where=where)
    elif len(value) > ROW_BYTES:
        tally.bad(TOO_LONG, where=where)
    elif not value.strip():
        tally.bad("empty", where=where)
    elif not encodable(value):
        tally.bad("invalid Unicode", where=where)
    else:
        yield Document(text=value)


def encodable(text: str) -> bool:
    """JSON can contain a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parquet(path: Path, *, field: str, tally: Tally) -> Iterator[Document]:
    number = 0
    with parquet_file(path) as file:
        if field not in file.schema_arrow.names:
            raise UsageError(
                f"{path} has no column {field!r}, only {', '.join(file.schema_arrow.names)}; set data.field"
            )
        for batch in file.iter_batches(batch_size=batch_rows(file), columns=[field]):
            for scalar in batch.column(0):
                number += 1
                where = f"{path}:{number}"
                try:
                    value = scalar.as_py()
                except UnicodeDecodeError:
                    tally.bad("invalid UTF-8", where=where)
                    continue
                yield from _value(value, where=where, tally=tally)
    if number == 0:
        tally.bad("empty file", where=f"{path}:1")


@contextmanager
def parquet_file(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise EnvironmentLacks("`source: parquet` needs pyarrow: pip install 'flatout[hf]'") from error
    try:
        # With a buffer the file is read page by page: a whole column may be larger than the memory.
        with pyarrow.parquet.ParquetFile(path, buffer_size=CHUNK_BYTES) as file:
            yield file
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise UsageError(f"{path} is damaged ({first_line(error)}); replace it, or leave it out") from error


def batch_rows(file: Any) -> int:
    """How many rows fit into memory at once. All rows may share one text that is stored once."""
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    largest = max((g.column(c).total_uncompressed_size for g in groups for c in range(g.num_columns)), default=1)
    return max(1, min(PARQUET_ROWS, PARQUET_BYTES // max(largest, 1)))


def _hf(settings: DataSettings, *, tally: Tally) -> Iterator[Document]:
    if not settings.name:
        raise UsageError("data.name is not set: `source: hf` needs the name of a dataset")
    for where, row in hf_rows(open_hf(settings.name, settings.subset, split=settings.split)):
        yield from _row(row, field=settings.field, where=where, tally=tally)


@dataclass(frozen=True, kw_only=True)
class HfSplit:
    """An opened split of a Hugging Face dataset."""

    rows: Any
    name: str  # in messages

    @property
    def num_rows(self) -> int | None:
        """How many rows it has, if the dataset says so."""
        info = getattr(self.rows, "info", None)
        split = (getattr(info, "splits", None) or {}).get(str(self.rows.split))
        return getattr(split, "num_examples", None) or None


def open_hf(dataset: str, subset: str | None, *, split: str) -> HfSplit:
    try:
        import datasets
    except ImportError as error:
        raise EnvironmentLacks("Hugging Face datasets need the datasets package: pip install 'flatout[hf]'") from error
    name = "/".join(filter(None, (dataset, subset, split)))
    try:
        rows = datasets.load_dataset(dataset, subset, split=split, streaming=True)
    except (datasets.exceptions.DatasetNotFoundError, ValueError) as error:
        raise UsageError(f"data.name: {name}: {error}") from error
    except OSError as error:
        raise EnvironmentLacks(
            f"{name} cannot be downloaded ({error}); connect to huggingface.co, or use local files with data.path"
        ) from error
    return HfSplit(rows=rows, name=name)


def hf_rows(split: HfSplit) -> Iterator[tuple[str, Any]]:
    try:
        for number, row in enumerate(split.rows, start=1):
            yield f"{split.name}:{number}", row
    except OSError as error:
        words = first_line(error)
        raise EnvironmentLacks(f"reading {split.name} failed ({words}); run the same command again") from error
