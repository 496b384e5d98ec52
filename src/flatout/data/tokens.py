"""Reads numbers from files on demand, without memory mapping: reading past the end of a truncated file is an error
that names the file, while accessing a mapping of it would kill the process.

`.npy` files, and plain arrays in which every number has the same size. Reads release the GIL.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from flatout.errors import RunFailed, UsageError
from flatout.files import BadFile, opened

SCAN_NUMBERS = 1 << 22
ENDS_PER_MARK = 128


class NumberFile:
    """A flat array of numbers on disk, open for reading."""

    def __init__(self, path: Path, dtype: str, *, root: Path | None = None) -> None:
        """`dtype` is for plain arrays; a `.npy` file names its own. Links out of `root` are refused."""
        self.path = path
        try:
            with opened(path, root=root) as file:
                size = os.fstat(file.fileno()).st_size
                self.dtype, self.count, self._offset = np.dtype(dtype), size // np.dtype(dtype).itemsize, 0
                if path.suffix == ".npy":
                    self.dtype, self.count = npy_header(file, path=path)
                    self._offset = file.tell()
                elif size % self.dtype.itemsize:
                    raise UsageError(f"{path} has {size} bytes, which is not a whole number of {self.dtype.name}")
                if size < self._offset + self.count * self.dtype.itemsize:
                    raise UsageError(f"{path} has {size} bytes, fewer than its header says: it was truncated")
                self._descriptor = os.dup(file.fileno())
                self._width = self.dtype.itemsize
        except FileNotFoundError:
            raise UsageError(f"{path} does not exist") from None

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """The numbers from `begin` to `end`."""
        size, at = (end - begin) * self._width, self._offset + begin * self._width
        try:
            found = os.pread(self._descriptor, size, at)
            if len(found) < size:
                found = self._rest(found, size, at)
        except OSError as error:
            raise RunFailed(f"reading {self.path} failed: {error.strerror}") from error
        return np.frombuffer(found, self.dtype)

    def _rest(self, found: bytes, size: int, at: int) -> bytes:
        """Reads the rest where one read does not return all; raises if the file was truncated."""
        while len(found) < size:
            more = os.pread(self._descriptor, size - len(found), at + len(found))
            if not more:
                raise RunFailed(
                    f"{self.path} was truncated while it was in use: it ends before byte {at + size:,}. Restore the "
                    "whole file, and resume the run"
                )
            found += more
        return found


class Ends:
    """The ends of the documents in one token file, in order, on disk, with a sparse index of them in memory."""

    def __init__(self, file: NumberFile, *, tokens: int) -> None:
        marks, last = [np.empty(0, np.int64)], 0
        for begin in range(0, file.count, SCAN_NUMBERS):
            ends = file.read(begin, min(begin + SCAN_NUMBERS, file.count))
            if ends[0] <= last or (np.diff(ends) <= 0).any() or ends[-1] > tokens:
                raise UsageError(f"{file.path} does not hold the ends of documents among {tokens} tokens, in order")
            last = int(ends[-1])
            marks.append(ends[::ENDS_PER_MARK])  # SCAN_NUMBERS is a multiple
        self._marks = np.concatenate(marks)

    def between(self, file: NumberFile, low: int, high: int) -> NDArray[np.int64]:
        """The ends from `low` up to, not including, `high`."""
        first, last = np.searchsorted(self._marks, (low, high), side="left").tolist()
        begin = max(first - 1, 0) * ENDS_PER_MARK
        return within(file.read(begin, min(last * ENDS_PER_MARK, file.count)), low, high)


def within(ends: NDArray[np.int64], low: int, high: int) -> NDArray[np.int64]:
    begin, end = np.searchsorted(ends, (low, high), side="left")
    return ends[begin:end]


def npy_header(file: IO[bytes], *, path: Path | str) -> tuple[np.dtype[Any], int]:
    """The type and count of the numbers in a `.npy` file, which must be a flat array of whole numbers."""
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, _, dtype = read(file)
    except (ValueError, KeyError, EOFError, TypeError, RecursionError, MemoryError) as error:
        raise BadFile(path, f"cannot be read: {error}") from None
    if len(shape) != 1 or shape[0] < 0 or dtype.kind not in "iub":
        raise BadFile(path, "does not hold a flat array of whole numbers; save the token ids as one")
    return dtype, shape[0]
