"""Documents from wherever they lie: generated, text, JSON lines, Parquet, or a Hugging Face dataset.

Everything is streamed in a fixed order, so that an interrupted preparation can continue where it was. A row
that cannot be used is counted by reason, with the first places, and never passes for nothing: too many of
them stop the preparation. Used by `flatout data prepare` and every recipe that prepares its own data.
"""

from __future__ import annotations

import glob
import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from flatout.config.settings import DataSettings
from flatout.data import embedded
from flatout.errors import EnvironmentLacks, UsageError

Which = Literal["train", "valid"]
ByteStream = IO[bytes] | gzip.GzipFile | lzma.LZMAFile
SUFFIXES = {
    "text": (".txt", ".txt.gz", ".txt.xz"),
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.xz"),
    "parquet": (".parquet",),
    "tokens": (".bin", ".npy"),
}
CHUNK_BYTES = 1 << 20
# A text without separators is handed on in pieces, so that no file has to fit into memory.
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
    """Counts rows, keeps the first offenders by reason, and stops when the settings say so."""

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


def read_documents(settings: DataSettings, *, which: Which, seed: int, tally: Tally) -> Iterator[Document]:
    """The documents of the training data, or of the validation data where the settings name its own."""
    rows: Iterator[Document]
    if settings.source == "embedded":
        rows = (Document(text=text) for text in embedded.documents(seed, settings.embedded_mb))
    elif settings.source == "hf":
        rows = _hf(settings, tally=tally)
    else:
        rows = (row for path in source_files(settings, which=which) for row in _file(path, settings, tally=tally))
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
    """The files behind `path` or `valid_path`, in the order in which they are read; none for other sources."""
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
        files = sorted(file for file in path.rglob("*") if file.name.endswith(suffixes) and file.is_file())
        if not files:
            raise UsageError(f"data.{key}: the folder {given} holds no {', '.join(suffixes)} file; name another one")
    elif path.exists():
        files = [path]
    else:
        files = sorted(Path(found) for found in glob.glob(str(path), recursive=True) if Path(found).is_file())
        if not files:
            raise UsageError(f"data.{key}: {given} does not exist, and as a glob it matches no file; correct the path")
    return files


def _file(path: Path, settings: DataSettings, *, tally: Tally) -> Iterator[Document]:
    if settings.source == "parquet":
        yield from _parquet(path, field=settings.field, tally=tally)
        return
    read = _text if settings.source == "text" else _jsonl
    with _reading(path), _open(path) as stream:
        yield from read(stream, path, settings, tally=tally)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Says which file it was that could not be read."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        # How many rows are lost cannot be known, so no policy may skip them.
        raise UsageError(f"{path} is damaged ({error}); replace it, or leave it out") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _open(path: Path) -> ByteStream:
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".xz":
        return lzma.open(path)
    return path.open("rb")


# -- text --------------------------------------------------------------------------------------------------


def _text(stream: ByteStream, path: Path, settings: DataSettings, *, tally: Tally) -> Iterator[Document]:
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
    """Pieces between separators, each with whether its document ends there."""
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
    while limit > 0 and buffer[limit] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        limit -= 1
    return limit


# -- rows --------------------------------------------------------------------------------------------------


def _jsonl(stream: ByteStream, path: Path, settings: DataSettings, *, tally: Tally) -> Iterator[Document]:
    for where, row in _json_rows(stream, path, tally=tally):
        yield from _row(row, field=settings.field, where=where, tally=tally)


def _json_rows(stream: ByteStream, path: Path, *, tally: Tally) -> Iterator[tuple[str, Any]]:
    """Each line's place and value."""
    for number, line in enumerate(stream, start=1):
        where = f"{path}:{number}"
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


def read_rows(settings: DataSettings, *, which: Which, tally: Tally) -> Iterator[tuple[str, Any]]:
    """Whole rows with their places, for recipes that want more than one field. Who reads them says which are good."""
    if settings.source == "hf":
        yield from _hf_rows(settings)
        return
    for path in source_files(settings, which=which):
        if settings.source == "parquet":
            yield from _parquet_rows(path)
            continue
        with _reading(path), _open(path) as stream:
            yield from _json_rows(stream, path, tally=tally)


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
    elif not value.strip():
        tally.bad("empty", where=where)
    elif not encodable(value):
        tally.bad("invalid Unicode", where=where)
    else:
        yield Document(text=value)


def encodable(text: str) -> bool:
    """JSON can spell half of a surrogate pair, which no UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parquet(path: Path, *, field: str, tally: Tally) -> Iterator[Document]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise EnvironmentLacks("`source: parquet` needs pyarrow: pip install 'flatout[hf]'") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise UsageError(
                    f"{path} has no column {field!r}, only {', '.join(file.schema_arrow.names)}; set data.field"
                )
            for batch in file.iter_batches(columns=[field]):
                for scalar in batch.column(0):
                    number += 1
                    where = f"{path}:{number}"
                    try:
                        value = scalar.as_py()
                    except UnicodeDecodeError:
                        tally.bad("invalid UTF-8", where=where)
                        continue
                    yield from _value(value, where=where, tally=tally)
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"{path} is damaged after row {number} ({error}); replace it, or leave it out") from error
    if number == 0:
        tally.bad("empty file", where=f"{path}:1")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise EnvironmentLacks("`source: parquet` needs pyarrow: pip install 'flatout[hf]'") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise UsageError(f"{path} is damaged after row {number} ({error}); replace it, or leave it out") from error


def _hf(settings: DataSettings, *, tally: Tally) -> Iterator[Document]:
    for where, row in _hf_rows(settings):
        yield from _row(row, field=settings.field, where=where, tally=tally)


def _hf_rows(settings: DataSettings) -> Iterator[tuple[str, Any]]:
    if not settings.name:
        raise UsageError("data.name is not set: `source: hf` needs the name of a dataset")
    try:
        import datasets
    except ImportError as error:
        raise EnvironmentLacks("`source: hf` needs the datasets package: pip install 'flatout[hf]'") from error
    name = describe_source(settings, which="train")
    try:
        rows = datasets.load_dataset(settings.name, settings.subset, split=settings.split, streaming=True)
    except (datasets.exceptions.DatasetNotFoundError, ValueError) as error:
        raise UsageError(f"data.name: {name}: {error}") from error
    except OSError as error:
        raise EnvironmentLacks(
            f"{name} cannot be downloaded ({error}); connect to huggingface.co, or use local files with "
            "`source: parquet` or `source: jsonl`"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield f"{name}:{number}", row
