"""Files that one stage of a recipe writes for a later one: sealed when written, checked before use.

A seal is a SHA-256 over the data, its place in the run folder and the run's id. So data that was damaged or edited,
moved to another place, or written by another run does not match its seal. It protects against damage and mistakes,
not against somebody who recomputes it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flatout import files
from flatout.errors import EnvironmentLacks
from flatout.files import BadFile, write_atomic

# In a sealed folder, the file with the hashes of all others.
FOLDER_SEAL = "sealed.json"
AGAIN = "remove it, and it is rebuilt"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The seal file of a file of rows."""

    sha256: str


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The SHA-256 of each file of a folder, by its path in the folder."""

    files: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Seals:
    """Writes and checks the sealed files of the run in the folder `root`.

    `run` is its id. Runs of older versions have no id and no seals: their files are used with a notice.
    """

    root: Path
    run: str | None = None
    tell: Callable[[str], None] = lambda text: None

    def write(self, path: Path, content: Mapping[str, Any], *, place: Path | None = None) -> None:
        """Writes a JSON object with its seal in it. `place`: its final path, if not `path`."""
        body = json.loads(json.dumps(content))
        write_whole(path, json.dumps(body | {"seal": self._seal(place or path, body)}))

    def read(self, path: Path, kind: type[T]) -> T:
        """Reads what `write` wrote, as the dataclass `kind`. A missing file raises FileNotFoundError."""
        try:
            body = files.read_json(path, root=self.root)
            seal = body.pop("seal", None)
            if seal is None:
                self._accept_without_seal(path)
            elif seal != self._seal(path, body):
                raise _changed(path)
            return files.typed(kind, body, source=path)
        except BadFile as error:
            raise BadFile(error.path, f"{error.why}: {AGAIN}") from None
        except RecursionError:
            raise BadFile(path, f"is nested too deeply: {AGAIN}") from None

    def write_rows(self, path: Path, text: str) -> None:
        """Writes lines, with their seal in a separate file, because their reader expects only rows.

        Existing rows are replaced if they differ, and refused if they were changed since they were sealed.
        """
        seal, content = path.with_suffix(".seal.json"), text.encode()
        wanted = Rows(sha256=hashlib.sha256(content).hexdigest())
        try:
            found = Rows(sha256=self._hash(path))
        except FileNotFoundError:
            found = None
        if found is not None:
            try:
                if self.read(seal, Rows) != found:
                    raise BadFile(path, f"{_changed(path).why}: {AGAIN}")
            except FileNotFoundError:
                self._accept_without_seal(path, advice=f": {AGAIN}")
            if found == wanted and seal.exists():
                return
            path.unlink()  # a kill between the next two writes leaves a seal and no rows
        self.write(seal, {"sha256": wanted.sha256})
        write_whole(path, text)

    @contextmanager
    def writing_folder(self, folder: Path) -> Iterator[Path]:
        """A folder to write files into. It appears, with its seal, only when the block ends without error."""
        with files.whole_folder(folder) as partial:
            yield partial
            self.write(partial / FOLDER_SEAL, {"files": self._hashes(partial)}, place=folder / FOLDER_SEAL)

    def check_folder(self, folder: Path) -> None:
        """Refuses a folder whose files are not exactly those it was sealed with."""
        again = "remove the folder, and it is rebuilt"
        try:
            sealed = self.read(folder / FOLDER_SEAL, Folder).files
        except FileNotFoundError:
            if not folder.is_dir():
                raise BadFile(folder, f"is not a folder: {AGAIN}") from None
            return self._accept_without_seal(folder, advice=f": {again}")
        except BadFile as error:
            raise BadFile(error.path, error.why.replace(AGAIN, again)) from None
        found = self._hashes(folder)
        for name in sorted({*sealed, *found}):
            if sealed.get(name) != found.get(name):
                what = "is missing" if name not in found else _changed(folder / name).why
                raise BadFile(folder / name, f"{what}: {again}")
        return None

    def _accept_without_seal(self, path: Path, *, advice: str = "") -> None:
        if self.run is not None:
            raise BadFile(path, f"has no seal{advice}")
        self.tell(f"{path} was written by an older version, without a seal: it is used without a check")

    def _seal(self, place: Path, body: Mapping[str, Any]) -> str:
        content = [os.path.relpath(place, self.root), self.run, body]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _hashes(self, folder: Path) -> dict[str, str]:
        return {
            path.relative_to(folder).as_posix(): self._hash(path)
            for path in sorted(folder.rglob("*"))
            if path.name != FOLDER_SEAL and (path.is_symlink() or not path.is_dir())
        }

    def _hash(self, path: Path) -> str:
        digest = hashlib.sha256()
        with files.opened(path, root=self.root) as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()


def seal_of(folder: Path) -> str | None:
    """Identifies the files of a sealed folder; None if it has no seal."""
    try:
        seal = files.read_json(folder / FOLDER_SEAL).get("seal")
    except (FileNotFoundError, BadFile):
        return None
    return seal if isinstance(seal, str) else None


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically. A failure is reported, and the existing file is kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    except OSError as error:
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError) -> EnvironmentLacks:
    first = "Free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Fix that"
    why = error.strerror or error
    return EnvironmentLacks(f"{path} cannot be written: {why}. {first} and continue with --resume; nothing is lost")


def _changed(path: Path) -> BadFile:
    return BadFile(path, "is not what this run wrote there (it was damaged, edited, or comes from elsewhere)")
