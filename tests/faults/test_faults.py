"""Killed at any call that writes, a job goes on by the same command; what was damaged is never used in silence.

`make test` runs a few of the kills, `make test-faults` every one, 300 kinds of damage, and the faults of several ranks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.kills import JOBS
from tests.faults.ranks import TRIALS

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc for the library that kills")


def passes(module: str, *arguments: str) -> None:
    command = [sys.executable, "-m", f"tests.faults.{module}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_compiler
def test_a_kill() -> None:
    passes("kills", "prepare", "--from", "40", "--every", "100")


@needs_compiler
@pytest.mark.faults
@pytest.mark.parametrize("job", JOBS)
def test_every_kill(job: str) -> None:
    passes("kills", job)


@pytest.mark.faults
def test_three_hundred_kinds_of_damage() -> None:
    passes("corruption", "--count", "300")


@pytest.mark.faults
@pytest.mark.parametrize("fault", TRIALS)
def test_every_fault_of_a_job(fault: str) -> None:
    if fault == "dead-actor":
        pytest.importorskip("ray", reason="Ray is not installed")
    if fault == "full" and os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    passes("ranks", fault)
