"""Helpers for tests that watch real processes and read what they leave."""

import hashlib
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


def trajectory(folder: Path) -> list[tuple[int, float | None, float, float]]:
    """Step, loss, gradient norm and learning rate, each step once."""
    return [(r.step, r.loss, r.extra["grad_norm"], r.extra["lr"]) for r in Run.open(folder).latest_steps()]


def weights_hash(folder: Path) -> str:
    newest = max((folder / "checkpoints").glob("step-*"))
    return hashlib.sha256((newest / "weights-rank00000.safetensors").read_bytes()).hexdigest()


def events(folder: Path, kind: str) -> list[dict[str, object]]:
    return [dict(event.data) | {"step": event.step} for event in Run.open(folder).events() if event.kind == kind]
