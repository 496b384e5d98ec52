"""Runs the doctor as a user does, in a process of its own."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import HANG_S

SCRIPTS = Path(__file__).parent / "scripts"
SHARED = {"gpt.py", "small_llama.py"}  # imported by the others
SRC = Path(__file__).parents[2] / "src"


def command_of(script: str) -> list[str]:
    if script.startswith("ddp"):
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    return [sys.executable, script]


def needs(script: str) -> None:
    """Skips the test where what the script imports is not installed."""
    uses = script.removeprefix("healthy_")
    if uses.startswith(("trainer", "rl")):
        pytest.importorskip("transformers")
    for framework in ("accelerate", "lightning", "trl"):
        if uses.startswith(framework):
            pytest.importorskip(framework)
    if script.startswith("trl_dpo"):
        pytest.importorskip("peft")


def causes_of(found: dict[str, Any]) -> list[str]:
    return [finding["cause"] for finding in found["findings"]]


def steps_of(script: str) -> int:
    """How many to watch. The slow rank is watched until time is up, which both ranks must leave at the same step."""
    return 10_000 if "slow_rank" in script else 11


def environment(**more: str) -> dict[str, str]:
    # What a user has: flatout on the path of the doctor, and nothing of it in the script.
    known = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "FLATOUT_AGENT")}
    return {**known, "PYTHONPATH": str(SRC), "COLUMNS": "200", **more}


def doctor(
    *arguments: str, cwd: Path = SCRIPTS, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "flatout", "doctor", *arguments],
        cwd=cwd,
        env=env or environment(),
        capture_output=True,
        timeout=HANG_S,
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
    tmp_path.mkdir(exist_ok=True)
    found = tmp_path / "diagnosis.json"
    done = doctor(
        *("--steps", str(steps), "--window", str(seconds)),
        *("--run", str(tmp_path / "run"), "--json", str(found), "--", *command),
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return json.loads(found.read_text())
