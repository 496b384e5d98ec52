"""Real weights, where they are named: `FLATOUT_SMOLLM2=FOLDER`; `benchmarks/smollm2.py` makes such a folder."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder() -> Path:
    name = os.environ.get("FLATOUT_SMOLLM2")
    if not name or not (Path(name) / "model.safetensors").is_file():
        pytest.skip("FLATOUT_SMOLLM2 names no folder with the weights of SmolLM2-135M-Instruct")
    return Path(name)
