"""Writes below one folder: one process at a time, whole files only, and a clear error if it fails."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flatout.errors import EnvironmentLacks, UsageError
from flatout.files import BadFile, open_for_appending, opened, write_atomic

LOCK = "lock"
LOG = "writer.log"
LOG_TAIL_BYTES = 2000


def write(path: Path, content: bytes, *, root: Path | None = None) -> None:
    """Writes the whole file or nothing. Its folder must not be a link out of `root`."""
    try:
        write_atomic(path, content, root=root)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise EnvironmentLacks(
                f"no space left to write {path} ({len(content)} bytes); free some, or name a folder on another disk "
                "with data.cache"
            ) from error
        raise _unwritable(path, error) from error


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{folder} is, or is below, a file; data.cache needs a folder, or a new name") from error
    except OSError as error:
        raise _unwritable(folder, error) from error


def sweep(folder: Path) -> None:
    """Removes temporary files of killed writers. The caller must hold the lock."""
    for torn in folder.glob(".*.tmp"):
        if not torn.is_dir():
            torn.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError, *, chosen_by: str = "data.cache") -> EnvironmentLacks:
    return EnvironmentLacks(f"{path} cannot be written ({error.strerror}); set {chosen_by} to a writable folder")


@contextmanager
def writer_lock(root: Path, *, wait: bool, chosen_by: str = "data.cache") -> Iterator[bool]:
    """Holds the lock for writing below `root`; without `wait`, yields whether it was free. Ends with the process.

    `chosen_by` is the setting or option that named the folder, for the message.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = open_for_appending(root / LOCK)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{root} is, or is below, a file; {chosen_by} needs a folder, or a new name") from error
    except OSError as error:
        raise _unwritable(root, error, chosen_by=chosen_by) from error
    with os.fdopen(descriptor, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            held = False
        except OSError as error:
            raise EnvironmentLacks(f"{root} cannot be locked ({error}); set {chosen_by} to a local disk") from error
        yield held


def writer_is_alive(root: Path) -> bool:
    try:
        with opened(root / LOCK) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    except FileNotFoundError:
        return False
    return False


def writer_log(root: Path) -> Path:
    return root / LOG


def writer_message(root: Path) -> str:
    try:
        with opened(writer_log(root)) as file:
            file.seek(max(os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES, 0))
            text = file.read(LOG_TAIL_BYTES).decode(errors="replace").strip()
    except (FileNotFoundError, BadFile):
        text = ""
    return text or "it left no message, so it was probably killed"
