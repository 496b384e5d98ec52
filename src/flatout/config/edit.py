"""Sets keys in a user's YAML file and keeps everything else of it: comments, order, anchors, indentation.

The text is edited at the places that the YAML parser reports, and parsed again: if anything but these keys has changed,
the edit is refused. Every edit keeps the bytes that were there before in a history folder beside the file, so that it
can be undone exactly.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from flatout.errors import UsageError
from flatout.files import read_bytes, read_json, write_atomic


def edited(text: str, values: Mapping[str, Any]) -> str:
    """The text with `section.key` set to plain values."""
    wanted = copy.deepcopy(yaml.safe_load(text)) or {}
    if not isinstance(wanted, dict):
        raise UsageError("the file is not a mapping of settings")
    for dotted, value in values.items():
        section, _, key = dotted.partition(".")
        inner = wanted.get(section)
        wanted[section] = {**(inner if isinstance(inner, dict) else {}), key: value}
    try:
        for dotted, value in values.items():
            section, _, key = dotted.partition(".")
            text = _set(text, section, key, _scalar(value))
        same = yaml.safe_load(text) == wanted
    except yaml.YAMLError:
        same = False
    if not same:
        told = "\n".join(f"  {dotted}: {_scalar(value)}" for dotted, value in values.items())
        raise UsageError(f"the file is written in a way that cannot be edited safely; set these keys by hand:\n{told}")
    return text


def _scalar(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w-]*", value) and yaml.safe_load(value) == value:
        return value
    text = "null" if value is None else json.dumps(value)
    # YAML 1.1 reads 4e-05 as text.
    return re.sub(r"^(-?\d+)e", r"\1.0e", text) if isinstance(value, float) else text


def _set(text: str, section: str, key: str, value: str) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    end = "\r\n" if "\r\n" in text else "\n"
    if not isinstance(root, yaml.MappingNode) or not root.value:
        whole = text if not text or text.endswith("\n") else text + end
        return f"{whole}{section}:{end}  {key}: {value}{end}"
    found = _pair(root, section)
    if found is None:
        indent = " " * root.value[0][0].start_mark.column
        if root.flow_style:
            return _in_braces(text, root, f"{section}: {{{key}: {value}}}")
        whole = text if text.endswith("\n") else text + end
        return f"{whole}{indent}{section}:{end}{indent}  {key}: {value}{end}"
    if isinstance(found, yaml.ScalarNode) and found.start_mark.index == found.end_mark.index:
        indent, at = " " * root.value[0][0].start_mark.column, _line_end(text, found.start_mark.index)
        return f"{text[:at]}{end}{indent}  {key}: {value}{text[at:]}"
    if not isinstance(found, yaml.MappingNode):
        return text  # the check of the whole says so
    old = _pair(found, key)
    if old is not None:
        was = text[old.start_mark.index : old.end_mark.index]
        after = was[len(was.rstrip()) :]  # a block of text ends at the next line
        value = value if was else f" {value}"
        return text[: old.start_mark.index] + value + after + text[old.end_mark.index :]
    if found.flow_style:
        return _in_braces(text, found, f"{key}: {value}")
    if not found.value:
        return text
    first, last = found.value[0][0].start_mark, found.value[-1][1]
    if isinstance(last, yaml.ScalarNode) and last.style not in ("|", ">"):
        at = _line_end(text, last.end_mark.index)
        return f"{text[:at]}{end}{' ' * first.column}{key}: {value}{text[at:]}"
    return text[: first.index] + f"{key}: {value}{end}{' ' * first.column}" + text[first.index :]


def _line_end(text: str, index: int) -> int:
    """Where the line ends, its line break apart."""
    at = text.find("\n", index)
    at = len(text) if at < 0 else at
    return at - 1 if at > index and text[at - 1] == "\r" else at


def _pair(node: yaml.MappingNode, key: str) -> yaml.Node | None:
    return next((value for name, value in node.value if name.value == key), None)


def _in_braces(text: str, node: yaml.MappingNode, pair: str) -> str:
    at = text.index("{", node.start_mark.index) + 1
    return text[:at] + pair + (", " if node.value else "") + text[at:]


def history(path: Path) -> Path:
    """The folder that keeps the earlier contents of a file."""
    return path.with_name(f"{path.name}.history")


def apply(path: Path, values: Mapping[str, Any], *, note: Mapping[str, Any]) -> Path:
    """Sets the keys in the file. Returns where its earlier contents are kept."""
    before = read_bytes(path)
    after = edited(before.decode(), values).encode()
    folder, mode = history(path), path.stat().st_mode & 0o777
    folder.mkdir(exist_ok=True)
    number = 1 + max((int(one.stem) for one in folder.glob("*.yaml") if one.stem.isdigit()), default=0)
    kept = folder / f"{number:04d}.yaml"
    told = {"after": _digest(after), "values": dict(values), **note}
    write_atomic(kept.with_suffix(".json"), json.dumps(told, indent=1).encode())
    _write(kept, before, mode=mode)
    _write(path, after, mode=mode)
    return kept


def _write(path: Path, data: bytes, *, mode: int) -> None:
    """Replaces the contents; a link stays a link, and the permissions stay."""
    real = path.resolve()
    write_atomic(real, data)
    real.chmod(mode)


def revert(path: Path) -> Path:
    """Restores the contents before the last edit, byte for byte, and removes it from the history."""
    folder = history(path)
    numbers = sorted(one.stem for one in folder.glob("*.yaml") if one.stem.isdigit())
    if not numbers:
        raise UsageError(f"{path} has no history: nothing was applied to it, or everything was reverted")
    kept = folder / f"{numbers[-1]}.yaml"
    if not path.exists():
        raise UsageError(f"{path} does not exist; its earlier contents are in {kept}")
    try:
        told = read_json(kept.with_suffix(".json"))
    except FileNotFoundError as error:
        raise UsageError(
            f"{error.filename} is missing, so nothing is reverted; earlier contents are in {kept}"
        ) from None
    if _digest(read_bytes(path)) != told.get("after"):
        raise UsageError(
            f"{path} was changed after the edit, and reverting would lose that; its earlier contents are in {kept}"
        )
    _write(path, read_bytes(kept), mode=path.stat().st_mode & 0o777)
    kept.unlink()
    kept.with_suffix(".json").unlink()
    with suppress(OSError):  # earlier edits are still there
        folder.rmdir()
    return path


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
