"""Helpers for tests that watch real processes and read what they leave."""

import hashlib
from pathlib import Path

from tests.waiting import wait_until
from tests.warm import Started

from flatout.record import Run


def wait_for_step(folder: Path, step: int, process: Started) -> None:
    """Returns once the run has recorded this step."""
    steps = folder / "steps.jsonl"

    def is_recorded() -> bool:
        return steps.exists() and any(record.step >= step for record in Run.open(folder).steps())

    wait_until(is_recorded, process=process)


def held_at(step: int) -> str:
    """The command as a script that does not take this step: however late a kill comes, it comes during the run."""
    return f"""
import time
from flatout.cli import main
from flatout.engine.step import Engine
plain = Engine.step
def step(self, step, batches):
    if step == {step}:
        time.sleep(600)
    plain(self, step, batches)
Engine.step = step
main()
"""


def trajectory(folder: Path) -> list[tuple[int, float | None, float, float]]:
    """Step, loss, gradient norm and learning rate, each step once."""
    return [(r.step, r.loss, r.extra.grad_norm, r.extra.lr) for r in Run.open(folder).latest_steps()]


def weights_hash(folder: Path) -> str:
    newest = max((folder / "checkpoints").glob("step-*"))
    return hashlib.sha256((newest / "weights-rank00000.safetensors").read_bytes()).hexdigest()


def events(folder: Path, kind: str) -> list[dict[str, object]]:
    return [dict(event.data) | {"step": event.step} for event in Run.open(folder).events() if event.kind == kind]
