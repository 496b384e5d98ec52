"""JSON files that flatout writes for itself: each contains a checksum of its name and data.

It detects edits, and files that were swapped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.files import BadFile, read_bytes
from flatout.record.lines import decode, encode

_SEAL = "checksum"


def seal(value: Mapping[str, Any], *, name: str) -> bytes:
    """The bytes to write into the file of this name."""
    content = json.loads(encode(value))
    return encode({**content, _SEAL: _checksum(content, name=name)}, indent=2)


def is_sealed(path: Path) -> bool:
    """Whether there is a whole sealed file at `path`."""
    try:
        return _SEAL in _read(path, root=path.parent, way_out="")
    except (FileNotFoundError, BadFile):
        return False


def unseal(path: Path, *, root: Path, required: bool, way_out: str) -> dict[str, Any]:
    """The data of a file as it was written. A file without a checksum is accepted unless one is `required`."""
    value = _read(path, root=root, way_out=way_out)
    if value.pop(_SEAL, None) is None and required:
        raise BadFile(path, f"has lost the checksum that flatout wrote into it: {way_out}")
    return value


def _read(path: Path, *, root: Path, way_out: str) -> dict[str, Any]:
    text = read_bytes(path, root=root)
    value = decode(text, source=str(path))
    found = value.get(_SEAL)
    content = {key: one for key, one in json.loads(text).items() if key != _SEAL}
    if found is not None and found != _checksum(content, name=path.name):
        raise BadFile(path, f"was changed after flatout wrote it: {way_out}")
    return value


def _checksum(content: Mapping[str, Any], *, name: str) -> str:
    text = json.dumps([name, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
