"""Runs the real command in real processes, on a corpus small enough for two cores."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

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

    def call(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flatout", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, **options)  # type: ignore[call-overload, no-any-return]

    return call


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    def call(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "flatout", *map(str, arguments)]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=dict(os.environ)
        )

    return call
