"""Rows of the files that hold tables: JSON arrays, CSV and TSV, Parquet and Arrow.

Each reader yields the place and value of a row, and holds a few times `ROW_BYTES` at most. A row that cannot be read is
counted; a file whose remaining rows cannot be found stops with its name and place.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatout.data import sources
from flatout.data.sources import CHUNK_BYTES, PARQUET_ROWS, TOO_LONG, ByteStream, Tally, json_rows, parquet_file
from flatout.errors import EnvironmentLacks, UsageError, first_line

Rows = Iterator[tuple[str, Any]]


def json_file(stream: ByteStream, path: Path, *, tally: Tally) -> Rows:
    """Rows of a `.json` file: one array of them, or one row in each line."""
    head = stream.read(CHUNK_BYTES).removeprefix(sources.BYTE_ORDER_MARK)
    if head.lstrip()[:1] == b"[":
        yield from _array(head, stream, path, tally=tally)
        return
    first, _, _ = head.partition(b"\n")
    if first.strip() and not _is_json(first) and len(head) < CHUNK_BYTES:
        found = json.loads(head) if _is_json(head) else None
        lists = [key for key, value in found.items() if isinstance(value, list)] if isinstance(found, dict) else []
        words = f"one object with the lists {', '.join(lists)}" if lists else "neither an array nor one row a line"
        raise UsageError(f"{path} holds {words}; write its rows as a JSON array, or one in each line (JSONL)")
    yield from json_rows(_Rejoined(head, stream), path, tally=tally)  # type: ignore[arg-type]


def csv_file(stream: ByteStream, path: Path, *, tally: Tally, delimiter: str) -> Rows:
    """Rows by the names in the first line. All values are texts."""
    csv.field_size_limit(max(csv.field_size_limit(), sources.ROW_BYTES))
    too_long: list[int] = []

    def lines() -> Iterator[str]:
        for number, line in enumerate(sources.bounded_lines(stream), start=1):
            if line is None:
                too_long.append(number)
                continue
            text = line.removeprefix(sources.BYTE_ORDER_MARK) if number == 1 else line
            yield text.decode(errors="surrogateescape")  # a text with such characters is refused later, as one row

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    try:
        names = next(reader, None)
        if names is None or not any(name.strip() for name in names):
            tally.bad("empty file", where=f"{path}:1")
            return
        if repeated := {name for name in names if names.count(name) > 1}:
            raise UsageError(f"{path} has two columns called {sorted(repeated)[0]!r}; rename one")
        for values in reader:
            where = f"{path}:{reader.line_num + len(too_long)}"
            for number in too_long:
                tally.bad(TOO_LONG, where=f"{path}:{number}")
            too_long.clear()
            if len(values) == len(names):
                yield where, dict(zip(names, values, strict=True))
            elif values:
                tally.bad("columns that do not match the first line", where=where)
        for number in too_long:
            tally.bad(TOO_LONG, where=f"{path}:{number}")
    except csv.Error as error:
        raise UsageError(f"{path}:{reader.line_num}: not valid CSV ({error}); repair the line") from None


def parquet(path: Path, *, tally: Tally) -> Rows:
    with parquet_file(path) as file:
        yield from _batches(file.iter_batches(batch_size=sources.batch_rows(file)), path, tally=tally)


def arrow(path: Path, *, tally: Tally) -> Rows:
    """An Arrow file, or a stream as `datasets` saves it."""
    with _arrow_file(path) as batches:
        parts = (batch.slice(at, PARQUET_ROWS) for batch in batches for at in range(0, batch.num_rows, PARQUET_ROWS))
        yield from _batches(parts, path, tally=tally)


def _batches(batches: Iterable[Any], path: Path, *, tally: Tally) -> Rows:
    number = 0
    for batch in batches:
        large = batch.nbytes > sources.ROW_BYTES
        for index in range(batch.num_rows) if large else ():
            number += 1
            row = batch.slice(index, 1)
            if row.nbytes > sources.ROW_BYTES:
                tally.bad(TOO_LONG, where=f"{path}:{number}")
            else:
                yield f"{path}:{number}", row.to_pylist()[0]
        for value in () if large else batch.to_pylist():
            number += 1
            yield f"{path}:{number}", value


@contextmanager
def _arrow_file(path: Path) -> Iterator[Iterator[Any]]:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise EnvironmentLacks("arrow files need pyarrow: pip install 'flatout[hf]'") from error
    try:
        with pyarrow.OSFile(str(path)) as file:
            if file.read(6) == b"ARROW1":
                file.seek(0)
                reader = pyarrow.ipc.open_file(file)
                yield (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                file.seek(0)
                yield iter(pyarrow.ipc.open_stream(file))
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise UsageError(f"{path} is damaged ({first_line(error)}); replace it, or leave it out") from error


def _array(head: bytes, stream: ByteStream, path: Path, *, tally: Tally) -> Rows:
    """The items of an array, one at a time: the whole of it may be larger than the memory."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    scan = json.JSONDecoder().raw_decode
    number, ended, wanted = 0, False, CHUNK_BYTES

    def failed(why: str) -> UsageError:
        return UsageError(f"{path}:{number + 1}: {why}, and where the next row begins cannot be known; repair it")

    try:
        text = decode(head).lstrip()[1:]
        while True:
            text = text.lstrip()
            if number and text[:1] == ",":
                text = text[1:].lstrip()
            if text[:1] == "]":
                return
            try:
                row, end = scan(text)
                # A number at the end of what was read may go on.
                complete = ended or end < len(text)
            except ValueError:
                complete = False
            except RecursionError:
                raise failed("nested too deeply") from None
            if complete:
                number, wanted = number + 1, CHUNK_BYTES
                text = text[end:]
                rest = text.lstrip()[:1]
                if rest and rest not in ",]":
                    raise failed("invalid JSON")
                yield f"{path}:{number}", row
                continue
            if ended:
                raise failed("invalid JSON" if text else "the array has no end")
            if len(text) > sources.ROW_BYTES:
                raise failed(TOO_LONG)
            more = stream.read(wanted)
            wanted = min(2 * wanted, sources.ROW_BYTES)  # what was read is scanned again, so it doubles each time
            ended = not more
            text += decode(more, final=ended)
    except UnicodeDecodeError:
        raise failed("invalid UTF-8") from None


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class _Rejoined:
    """A stream whose first bytes were already read."""

    def __init__(self, head: bytes, rest: ByteStream) -> None:
        self._head, self._rest = head, rest

    def readline(self, limit: int) -> bytes:
        if not self._head:
            return self._rest.readline(limit)
        end = self._head.find(b"\n", 0, limit)
        cut = min(end + 1 if end >= 0 else limit, len(self._head))
        line, self._head = self._head[:cut], self._head[cut:]
        if not line.endswith(b"\n") and len(line) < limit:
            line += self._rest.readline(limit - len(line))
        return line
