"""Files that survive a kill: JSON written whole or not at all, and JSON lines that a torn last line cannot corrupt.

JSON has no NaN, but a NaN loss must be recorded: non-finite numbers are stored as the strings
"NaN", "Infinity" and "-Infinity" (JavaScript's `Number` reads them too) and come back as floats.
These three spellings are therefore reserved: as text values they would come back as numbers.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from flatout.files import BadFile, open_for_appending, opened, parse_json

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_CHUNK_BYTES = 1 << 16
_DEEPEST = 50
# An evaluation of a hundred thousand questions in one event has about a tenth of this.
LINE_BYTES = 64 << 20


@dataclass(frozen=True)
class Line:
    """One line of a file and the bytes it takes there."""

    path: Path
    value: Mapping[str, Any]
    start_byte: int
    end_byte: int

    @property
    def place(self) -> str:
        """How messages name the line."""
        return _place(self.path, self.start_byte)


def encode(value: Any, *, indent: int | None = None) -> bytes:
    """Strict JSON with a newline at the end."""
    separators = (",", ":") if indent is None else None
    try:
        text = json.dumps(value, allow_nan=False, indent=indent, separators=separators)
    except ValueError:  # a non-finite number: rare, so only then is the value walked
        text = json.dumps(_spelled(value), allow_nan=False, indent=indent, separators=separators)
    return text.encode() + b"\n"


def decode(text: bytes, *, source: str) -> dict[str, Any]:
    value = parse_json(text, source=source)
    # Only a line with many brackets can be nested too deeply.
    if text.count(b"[") + text.count(b"{") > _DEEPEST and _depth(value) > _DEEPEST:
        raise BadFile(source, f"is nested more than {_DEEPEST} levels deep, which flatout never writes")
    # A check of the bytes avoids walking nearly every value.
    return _revived(value) if b'"NaN"' in text or b'Infinity"' in text else value


def read_lines(path: Path, *, start_byte: int = 0, end_byte: int | None = None) -> Iterator[Line]:
    """Whole lines from `start_byte` on; a last one without its newline is still being written, or torn."""
    if not path.exists():
        return
    with _opened(path) as file:
        file.seek(start_byte)
        while text := _next(file, path):
            if not text.endswith(b"\n") or (end_byte is not None and start_byte >= end_byte):
                return
            value = decode(text, source=_place(path, start_byte))
            yield Line(path, value, start_byte, start_byte + len(text))
            start_byte += len(text)


def spread_lines(path: Path, *, count: int) -> Iterator[Line]:
    """At most `count` lines, evenly spread over the file, however long it is; the first is among them."""
    if not path.exists():
        return
    size, after = path.stat().st_size, 0
    with _opened(path) as file:
        for at in range(count):
            start = max(after, size * at // count)
            if start > after:
                file.seek(start - 1)
                start += len(_next(file, path)) - 1  # to the start of the next line
            else:
                file.seek(start)
            text = _next(file, path)
            if not text.endswith(b"\n"):
                return
            after = start + len(text)
            yield Line(path, decode(text, source=_place(path, start)), start, after)


def last_line(path: Path) -> Line | None:
    """The last whole line, found from the end."""
    if not path.exists():
        return None
    with _opened(path) as file:
        end = _line_start(file.fileno(), before=os.fstat(file.fileno()).st_size)
        start = _line_start(file.fileno(), before=end - 1) if end else 0
    return next(read_lines(path, start_byte=start, end_byte=end), None)


def _opened(path: Path) -> AbstractContextManager[BinaryIO]:
    # The line files of a run are directly in its folder.
    return opened(path, root=path.parent)


def _next(file: BinaryIO, path: Path) -> bytes:
    text = file.readline(LINE_BYTES + 1)
    if len(text) > LINE_BYTES:
        raise BadFile(path, f"has a line of more than {LINE_BYTES:,} bytes, which flatout never writes")
    return text


def _place(path: Path, byte: int) -> str:
    return f"{path}, the line at byte {byte},"


class LineWriter:
    """Appends JSON lines to one file; the only writer of it, though threads may share the writer.

    Each line is one write(), so a kill leaves whole lines and at most one torn end, which opening cuts off.
    Nothing is synced to disk: a killed process loses nothing, a power cut the last seconds.
    """

    def __init__(self, path: Path) -> None:
        self._fd = open_for_appending(path, root=path.parent)
        self.end_byte = _line_start(self._fd, before=os.fstat(self._fd).st_size)
        os.ftruncate(self._fd, self.end_byte)
        self._lock = threading.Lock()

    def append(self, value: Mapping[str, Any]) -> bool:
        """Whether the line was written; a full disk leaves the file as it was."""
        line = encode(value)
        with self._lock:
            try:
                written = os.write(self._fd, line)
                if written < len(line):
                    os.ftruncate(self._fd, self.end_byte)
                    return False
            except OSError:
                return False
            self.end_byte += written
            return True

    def close(self) -> None:
        os.close(self._fd)


def _line_start(fd: int, *, before: int) -> int:
    """The byte after the last newline in front of `before`."""
    while before > 0:
        start = max(0, before - _CHUNK_BYTES)
        newline = os.pread(fd, before - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        before = start
    return 0


def _depth(value: Any) -> int:
    """Levels of lists and objects, counted without recursion."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    return value


def _revived(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _revived(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_revived(item) for item in value]
    return value
