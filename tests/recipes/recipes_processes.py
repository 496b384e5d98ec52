"""Helpers for tests that watch real processes."""

import time
from pathlib import Path

from tests.warm import Started

from flatout.record import Run


def wait_for_step(folder: Path, step: int, process: Started) -> None:
    """Returns once the run has recorded this step."""
    steps = folder / "steps.jsonl"
    while process.poll() is None:
        if steps.exists() and sum(1 for _ in steps.open()) > 0:
            newest = max((record.step for record in Run.open(folder).steps()), default=-1)
            if newest >= step:
                return
        time.sleep(0.01)
    raise AssertionError(f"ended before step {step}: {process.communicate()}")
