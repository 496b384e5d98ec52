"""All access to files on disk: bounded reads of regular files, JSON checked against a schema, atomic writes.

A file may be damaged or malicious. So every read has a size limit, never
waits on a pipe or device, and follows no link out of its folder (`root`). Every problem is a `BadFile`
that names the file. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import sys
import sysconfig
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

from flatout.errors import UsageError

# Size limit of a manifest, a configuration or a tokenizer; the largest published tokenizers have about 35 MB.
TEXT_BYTES = 256 << 20
_PART_BYTES = 1 << 20
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_TEMPORARY = re.compile(r"\..+\.(\d+)\.tmp")

T = TypeVar("T")

# The longest name of a file and the longest path that Linux takes.
NAME_BYTES, PATH_BYTES = 255, 4095

# `Annotated[type, rule, words]` also checks the rule. These ranges are safe for sums, charts and clocks.
Finite = Annotated[float, lambda value: abs(value) <= 1e30, "a usual number"]
Count = Annotated[int, lambda value: 0 <= value < 10**15, "a count"]


class BadFile(UsageError):
    """A file that must not be used: its path and the reason."""

    def __init__(self, path: Path | str, why: str) -> None:
        super().__init__(f"{path} {why}")
        self.path, self.why = Path(path), why


# -- paths -------------------------------------------------------------------------------------------------


def path_problem(text: str) -> str | None:
    """Why no file can have this path, wherever it leads; None if one can."""
    if "\0" in text:
        return "holds a zero byte, which no path can have"
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        return "is not text that a path can have"
    longest = max(map(len, encoded.split(b"/")))
    if longest > NAME_BYTES:
        return f"has a name of {longest:,} bytes, and the longest that a file can have is {NAME_BYTES}"
    if len(encoded) > PATH_BYTES:
        return f"has {len(encoded):,} bytes, and the longest path has {PATH_BYTES:,}"
    return None


def shown_path(text: str) -> str:
    """A path for a message: its beginning, without bytes that cannot be printed."""
    return _short(text.replace("\0", "\\0").encode(errors="replace").decode(), most=60)


# -- reading -----------------------------------------------------------------------------------------------


def inside(path: Path, root: Path) -> Path:
    """`path` itself; refused if a symbolic link on the way leads out of `root`."""
    real, home = os.path.realpath(path), os.path.realpath(root)
    if real != home and not real.startswith(home.rstrip(os.sep) + os.sep):
        raise BadFile(path, f"is a symbolic link that leaves {root}: put the file itself there")
    return path


@contextlib.contextmanager
def opened(path: Path, *, root: Path | None = None, limit: int | None = None) -> Iterator[BinaryIO]:
    """A regular file to read bytes from, of at most `limit` bytes. A missing one raises FileNotFoundError."""
    if root is not None:
        inside(path, root)
    try:
        # A pipe or device would wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise BadFile(path, f"cannot be read: {_reason(error)}") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise BadFile(path, f"is {_KINDS.get(stat.S_IFMT(found.st_mode), 'no regular file')}, not a file")
    with os.fdopen(descriptor, "rb") as file:
        if limit is not None and found.st_size > limit:
            raise BadFile(path, f"has {found.st_size:,} bytes; at most {limit:,} are expected there")
        try:
            yield file
        except OSError as error:
            if error.filename is not None:  # of another file
                raise
            raise BadFile(path, f"cannot be read: {_reason(error)}") from error


def checked(path: Path, *, root: Path | None = None) -> Path:
    """`path`, of a regular file that a library is to open by its name. A missing one raises FileNotFoundError."""
    with opened(path, root=root):
        return path


def read_bytes(path: Path, *, root: Path | None = None, limit: int = TEXT_BYTES) -> bytes:
    content = bytearray()
    with opened(path, root=root, limit=limit) as file:
        while len(content) <= limit and (part := file.read(_PART_BYTES)):  # read(n) allocates n bytes first
            content += part
    if len(content) > limit:  # it has grown since
        raise BadFile(path, f"has more than {limit:,} bytes, the most that is expected there")
    return bytes(content)


def read_text(path: Path, *, root: Path | None = None, limit: int = TEXT_BYTES) -> str:
    try:
        return read_bytes(path, root=root, limit=limit).decode()
    except UnicodeDecodeError as error:
        raise BadFile(path, f"is not UTF-8 text: {error.reason} at byte {error.start}") from None


def read_json(path: Path, *, root: Path | None = None, limit: int = TEXT_BYTES) -> dict[str, Any]:
    """A JSON object. A missing file raises FileNotFoundError, anything else that is wrong with it BadFile."""
    return parse_json(read_bytes(path, root=root, limit=limit), source=path)


def parse_json(text: bytes | str, *, source: Path | str) -> dict[str, Any]:
    """The JSON object in `text`; messages name it `source`."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise BadFile(source, "is not usable JSON: nested too deeply") from None
    except ValueError as error:  # also of numbers with thousands of digits, and of text that is not UTF-8
        raise BadFile(source, f"is not valid JSON: {_short(str(error))}") from None
    if not isinstance(value, dict):
        raise BadFile(source, f"holds {_named(value)} where a JSON object is expected")
    return value


# -- a schema: the annotations of a dataclass ---------------------------------------------------------------


def typed(kind: type[T], value: Any, *, source: Path | str) -> T:
    """`value`, read from JSON, as the dataclass `kind`. Missing, unknown and mistyped fields are refused.

    A dataclass with `ignores_unknown = True` is read without the fields it does not know, those of another version.
    A TypedDict is a view: the value itself comes back, its named fields checked, others left alone.
    """
    try:
        built: T = _builder(typing.cast(Any, kind))(value)
        return built
    except (_Mismatch, RecursionError, OverflowError) as error:
        raise BadFile(source, f"is not what flatout writes there: {_short(str(error))}") from None


class _Mismatch(ValueError):
    """A value that does not fit; the path to it is prepended on the way up."""


@cache
def _builder(kind: Any) -> Callable[[Any], Any]:
    """A function that converts JSON to a `kind`, built once for each type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is object:
        return _Exactly(lambda value: True, "anything")
    if origin is Annotated:
        return _narrowed(_builder(arguments[0]), *kind.__metadata__)
    if typing.is_typeddict(kind):
        return _view_builder(kind)
    if is_dataclass(kind):
        return _dataclass_builder(kind)
    if kind is types.NoneType:
        return _Exactly(lambda value: value is None, "null")
    if kind is bool:
        return _Exactly(lambda value: isinstance(value, bool), "true or false")
    if kind is int:
        return _Exactly(_is_int, "a whole number")
    if kind is float:
        return _Exactly(lambda value: isinstance(value, float) or _is_int(value), "a number")
    if kind is str:
        return _Exactly(lambda value: isinstance(value, str), "text")
    if origin is Literal:
        return _Exactly(lambda value: value in arguments, f"one of {', '.join(map(repr, arguments))}")
    if origin in (typing.Union, types.UnionType):
        return _union_builder([_builder(part) for part in arguments])
    if origin in (tuple, list, Sequence) or kind in (tuple, list):
        return _sequence_builder(list if origin is list or kind is list else tuple, arguments)
    if origin in (dict, Mapping) or kind in (dict, Mapping):
        return _mapping_builder(_builder(arguments[1]) if arguments else None)
    raise TypeError(f"files.typed knows nothing of {kind}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


class _Exactly:
    """Accepts a value unchanged if it fits."""

    def __init__(self, fits: Callable[[Any], bool], expected: str) -> None:
        self.fits, self.expected = fits, expected

    def __call__(self, value: Any) -> Any:
        if not self.fits(value):
            raise _Mismatch(f"{_named(value)} where {self.expected} is expected")
        return value


def _narrowed(base: Callable[[Any], Any], rule: Callable[[Any], bool], words: str) -> Callable[[Any], Any]:
    if not isinstance(base, _Exactly):
        raise TypeError("files.typed holds only plain values to a rule")
    fits = base.fits
    return _Exactly(lambda value: fits(value) and rule(value), words)


def _union_builder(parts: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    # `X | None` complains of X.
    none = _builder(typing.cast(Any, types.NoneType))
    parts.sort(key=lambda part: part is not none)
    plain = [part for part in parts if isinstance(part, _Exactly)]
    others = [part for part in parts if not isinstance(part, _Exactly)]

    def build(value: Any) -> Any:
        for part in plain:
            if part.fits(value):
                return value
        for other in others[:-1]:
            with contextlib.suppress(_Mismatch):
                return other(value)
        return (others or plain)[-1](value)

    return build


def _sequence_builder(made: Callable[[Any], Any], arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    item = _builder(arguments[0]) if arguments else _builder(Any)
    length = None if not arguments or made is list or Ellipsis in arguments else len(arguments)

    def build(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _Mismatch(f"{_named(value)} where a list is expected")
        if length is not None and len(value) != length:
            raise _Mismatch(f"{len(value)} entries where {length} are expected")
        try:
            return made(map(item, value))
        except _Mismatch:  # again, to say where
            return made(_placed(f"[{i}]", item, one) for i, one in enumerate(value))

    return build


def _mapping_builder(item: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    def build(value: Any) -> Any:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise _Mismatch(f"{_named(value)} where an object is expected")
        if item is None or (isinstance(item, _Exactly) and all(map(item.fits, value.values()))):
            return value
        return {key: _placed(key, item, one) for key, one in value.items()}

    return build


def _dataclass_builder(kind: Any) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    known = {field.name: _builder(hints[field.name]) for field in fields(kind) if field.init}
    needed = [
        field.name
        for field in fields(kind)
        if field.init and field.default is MISSING and field.default_factory is MISSING
    ]
    lenient = getattr(kind, "ignores_unknown", False)

    def build(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Mismatch(f"{_named(value)} where an object is expected")
        for name in needed:
            if name not in value:
                raise _Mismatch(f"{name} is missing")
        if lenient:
            value = {name: one for name, one in value.items() if name in known}
        try:
            return kind(**{name: known[name](one) for name, one in value.items()})
        except (_Mismatch, KeyError):  # again, to say where
            for name, one in value.items():
                if name not in known:
                    raise _Mismatch(f"{_short(str(name))} is unknown") from None
                _placed(name, known[name], one)
            raise

    return build


def _view_builder(kind: Any) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    optional = {name for name, hint in hints.items() if typing.get_origin(hint) is typing.NotRequired}
    if not kind.__total__:
        optional = set(hints)
    known = {
        name: _builder(typing.get_args(hint)[0] if typing.get_origin(hint) is typing.NotRequired else hint)
        for name, hint in hints.items()
    }

    def build(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Mismatch(f"{_named(value)} where an object is expected")
        for name, one in known.items():
            if name in value:
                _placed(name, one, value[name])
            elif name not in optional:
                raise _Mismatch(f"{name} is missing")
        return value

    return build


def _placed(name: str, build: Callable[[Any], Any], value: Any) -> Any:
    try:
        return build(value)
    except _Mismatch as error:
        text = str(error)
        raise _Mismatch(f"{name}{'' if text.startswith('[') else ': '}{text}") from None


# -- writing -----------------------------------------------------------------------------------------------


def write_atomic(path: Path, data: bytes, *, root: Path | None = None) -> None:
    """After a kill at any moment `path` holds the old bytes or the new, never a part. A link there is replaced."""
    if root is not None:
        inside(path.parent, root)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with os.fdopen(_created(temporary), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write files into, which takes the place of `folder` when the block ends well.

    After a kill at any moment no part of it is found under that name. For folders with a single writer: what a killed
    one left behind is removed by the next.
    """
    partial = folder.with_name(f".{folder.name}.tmp")
    remove(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in partial.rglob("*"):
            sync_folder(path)
        sync_folder(partial)
        remove(folder)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(folder.parent)


def remove(path: Path) -> None:
    """A file, a link or a whole folder; nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def open_for_appending(path: Path, *, root: Path | None = None) -> int:
    """A descriptor at the end of a regular file, which is made if need be; a link is not followed."""
    if root is not None:
        inside(path.parent, root)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BadFile(path, "is a symbolic link, which is not written through: remove it") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadFile(path, "is not a regular file and cannot be written")
    return descriptor


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder, or writes to a file, survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_temporary(name: str) -> bool:
    """Whether this is a name of a file that `write_atomic` has not finished."""
    return _TEMPORARY.fullmatch(name) is not None


def sweep(folder: Path) -> None:
    """Removes the temporary files of killed writers; those of living processes stay."""
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            found = _TEMPORARY.fullmatch(path.name)
            if found and not path.is_dir() and not _alive(int(found[1])):
                path.unlink(missing_ok=True)


def _created(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def _alive(process: int) -> bool:
    if process == os.getpid():
        return False  # an earlier process of this number: nobody sweeps while writing
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def cache_folder() -> Path:
    """The folder for files that flatout can rebuild."""
    chosen = os.environ.get("FLATOUT_CACHE")
    return Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "flatout").expanduser()


# -- Python processes of our own ---------------------------------------------------------------------------


def own_python(module: str) -> list[str]:
    """The command that runs a module of ours in a process of its own; its environment needs `own_python_path`."""
    return [sys.executable, "-P", "-m", module]  # -P: nothing is imported from the current folder


def own_environment(variables: Sequence[str] = ()) -> dict[str, str]:
    """The variables that Python needs to find this package, and those named; no other secrets."""
    names = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", *variables)
    return {name: os.environ[name] for name in names if name in os.environ} | {"PYTHONPATH": own_python_path()}


def own_python_path() -> str:
    """PYTHONPATH for such a process: what this one imports from, less the current folder.

    The standard library comes first, so that no file elsewhere passes for a part of it. The folder or archive that
    this package itself lies in comes next: a checkout may be the current folder, and both must run the same code.
    """
    library = sysconfig.get_path("stdlib")
    first = [library, os.path.join(library, "lib-dynload"), str(Path(__file__).parents[1])]
    try:
        here = os.path.realpath(os.curdir)
    except FileNotFoundError:  # somebody has removed it
        here = ""
    others = [
        path
        for path in sys.path
        if os.path.isabs(path) and os.path.exists(path) and os.pathsep not in path and os.path.realpath(path) != here
    ]
    return os.pathsep.join(dict.fromkeys([*first, *others]))


# -- words -------------------------------------------------------------------------------------------------


def _named(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    try:
        return _short(repr(value))
    except ValueError:  # more digits than Python prints
        return "a number of thousands of digits"


def _short(text: str, *, most: int = 120) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
