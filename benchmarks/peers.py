"""A peer's script: it takes a variant's name and prints one JSON line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def measured(script: Path, variant: str, *, figure: str, seconds: float) -> dict[str, Any] | None:
    """The line that has this figure; None, with the last output printed, if there is no such line in time."""
    try:
        done = subprocess.run([sys.executable, str(script), variant], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"{variant}: not finished in {seconds:.0f} s", flush=True)
        return None
    for found in map(_object, done.stdout.splitlines()):
        if figure in found:
            return found
    print(f"{variant}: {(done.stdout + done.stderr)[-300:]}", flush=True)
    return None


def _object(line: str) -> dict[str, Any]:
    """A line that is one JSON object; anything else that a script prints is ignored, Python dictionaries too."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
