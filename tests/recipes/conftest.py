"""Runs the real command in real processes, on a corpus small enough for two cores."""

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from tests import warm
from tests.data.talks import tokenizer_folder, write_rows

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


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template, small enough to fine-tune."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tokenizer_folder(tmp_path_factory.mktemp("sft") / "base")
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


@pytest.fixture
def sft(base: Path, tmp_path: Path) -> Path:
    settings = {
        "recipe": "sft",
        "model": str(base),
        "data": {
            "source": "jsonl", "path": str(write_rows(tmp_path / "rows.jsonl", count=200)), "sequence_length": 128,
            "valid_share": 0.1,
        },
        "train": {"batch_tokens": 512, "steps": 16, "lr": 2e-2, "weight_decay": 0.0, "warmup_steps": 2},
        "lora": {"rank": 8, "alpha": 16},
        "eval": {"every": 8},
        "plan": {"precision": "fp32", "threads": 1},
    }  # fmt: skip
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path
