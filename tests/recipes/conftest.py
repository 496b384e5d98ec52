"""Runs the real command in real processes, on a corpus small enough for two cores."""

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from tests import warm

CONFIG = {
    "recipe": "pretrain",
    "model": {"layers": 2, "hidden": 32, "heads": 2},
    "data": {"source": "embedded", "embedded_mb": 0.3, "sequence_length": 64, "valid_share": 0.05},
    "train": {"batch_tokens": 512, "steps": 12, "lr": 3e-3, "warmup_steps": 2},
    "eval": {"every": 6, "tokens": 1024},
    "plan": {"precision": "fp32", "threads": 1},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


@pytest.fixture
def flatout(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`flatout ARGUMENTS` in a process of its own, in a folder of its own."""

    return partial(warm.flatout, cwd=tmp_path)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., warm.Started]:
    return partial(warm.Started, cwd=tmp_path)
