"""All output for people: the terminal, and files that the user asks for.

Text may come from a stranger's file, so control characters are removed where it is printed. A full disk or a closed
output is one clear error, and a reader that has left (`| head -1`) ends the command quietly.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.errors import MarkupError
from rich.segment import Segment
from rich.text import Text

from flatout.errors import EnvironmentLacks, FlatoutError
from flatout.files import write_atomic

# C0 and C1 controls, bidirectional controls and lone surrogates. Newline and tab are kept.
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def clean(value: object) -> str:
    """The text with control characters, which could move the cursor or reverse a line, made visible."""
    return _UNPRINTABLE.sub("\ufffd", str(value))


class ReaderGone(FlatoutError):
    """Nobody reads the output any more, as after `| head -1`. The command ends without a message."""

    exit_code = 128 + 13  # as after SIGPIPE


# -- the terminal


class _Stream(io.TextIOBase):
    """stdout or stderr, as it is now: tests and live displays replace it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._failed: tuple[Any, FlatoutError] | None = None

    def _target(self) -> IO[str] | None:
        target = getattr(sys, self._name)
        target = getattr(target, "rich_proxied_file", target)
        return None if target is None or target.closed else target

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._target(), "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        target = self._target()
        return target is not None and target.isatty()

    def fileno(self) -> int:
        target = self._target()
        if target is None:
            raise io.UnsupportedOperation("fileno")
        return target.fileno()

    def write(self, text: str) -> int:
        target = self._target()
        if self._failed is not None and self._failed[0] is target:
            return self._lose(self._failed[1])
        if target is None:
            return self._lose(EnvironmentLacks(f"{self._name} is closed, so nothing can be printed: open it again"))
        try:
            target.write(text.encode(self.encoding, errors="replace").decode(self.encoding))
            target.flush()
        except OSError as error:
            _silence(target)
            self._failed = target, self._failure(error)
            return self._lose(self._failed[1])
        return len(text)

    def _failure(self, error: OSError) -> FlatoutError:
        if error.errno == errno.EPIPE:
            return ReaderGone(f"{self._name} has no reader any more")
        return EnvironmentLacks(_refused(self._name, error))

    def _lose(self, failure: FlatoutError) -> int:
        if self._name == "stderr":  # there is nowhere left to report it
            return 0
        raise failure


def _silence(target: IO[str]) -> None:
    """Python flushes at exit what could not be written, and would fail again."""
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, target.fileno())
        os.close(nothing)
    except (OSError, ValueError):
        pass


class Terminal(Console):
    """A console on stdout or stderr that shows no control character of the text it is given."""

    def __init__(self, *, stderr: bool = False) -> None:
        self._stream = _Stream("stderr" if stderr else "stdout")
        super().__init__(file=self._stream, stderr=stderr, emoji=False)  # type: ignore[arg-type]

    def write(self, text: str) -> None:
        """Prints text as it is: no colours, no markup, no line breaks of its own."""
        self._stream.write(clean(text))

    def render_str(self, text: str, **options: Any) -> Text:
        text = clean(text)
        try:
            return super().render_str(text, **options)
        except MarkupError:  # brackets that are not ours
            return super().render_str(text, **options | {"markup": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        return _cleaned(super().render(renderable, options))


def _cleaned(segments: Iterable[Segment]) -> Iterator[Segment]:
    for segment in segments:
        harmless = segment.control or not _UNPRINTABLE.search(segment.text)
        yield segment if harmless else segment._replace(text=clean(segment.text))


out = Terminal()
err = Terminal(stderr=True)


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        err.write(f"{self.format(record)}\n")


def prepare() -> None:
    """Call once, before anything is opened: warnings of the log are printed here, and a closed stream stays closed."""
    logging.lastResort = _Warnings(logging.WARNING)
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the next file would get this number, and what others print would land in it
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


# -- files


def write_file(path: Path | str, text: str, *, option: str) -> None:
    """Writes a file that the user named with an option: whole or not at all. Devices and pipes are written through."""
    path = Path(path)
    data = text.encode(errors="replace")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            write_atomic(Path(os.path.realpath(path)), data)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise EnvironmentLacks(_refused(f"{option} {path}", error)) from None


def unwritable(error: OSError) -> str | None:
    """The message for a disk that is full or read-only, whichever file is concerned; None for other errors."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
    return _refused(str(error.filename or "a file or the output"), error) if error.errno in full else None


def _refused(what: str, error: OSError | ValueError) -> str:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    way = ": free some space, or choose another place" if getattr(error, "errno", None) == errno.ENOSPC else ""
    return f"{what} cannot be written: {reason}{way}"
