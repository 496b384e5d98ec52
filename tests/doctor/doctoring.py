"""Runs the doctor as a user does, in a process of its own."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
SRC = Path(__file__).parents[2] / "src"


def environment(**more: str) -> dict[str, str]:
    # What a user has: flatout on the path of the doctor, and nothing of it in the script.
    known = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "FLATOUT_AGENT")}
    return {**known, "PYTHONPATH": str(SRC), "COLUMNS": "200", **more}


def doctor(
    *arguments: str, cwd: Path = SCRIPTS, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "flatout", "doctor", *arguments],
        cwd=cwd,
        env=env or environment(),
        capture_output=True,
        timeout=timeout,
        check=False,
    )


@contextlib.contextmanager
def every_core() -> Iterator[None]:
    """For a script whose fault shows only where there are cores to use; a test worker keeps to its own."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def diagnosis_of(tmp_path: Path, *command: str, steps: int = 11, seconds: float = 5.0) -> dict[str, Any]:
    found = tmp_path / "diagnosis.json"
    done = doctor(
        *("--steps", str(steps), "--window", str(seconds)),
        *("--run", str(tmp_path / "run"), "--json", str(found), "--", *command),
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return json.loads(found.read_text())
