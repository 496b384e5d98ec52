"""Small corpora and shards for the data tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_facts import FACTS
from tests.command import flatout

from flatout.data.shards import Shards, ShardWriter

__all__ = ["flatout"]


@pytest.fixture
def real_data() -> Path:
    folder = os.environ.get("FLATOUT_TEST_DATA")
    if not folder:
        pytest.skip("FLATOUT_TEST_DATA does not name a folder of real data")
    return Path(folder)


@pytest.fixture
def make_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Shards]:
    """Shards of documents with given lengths; token i of the corpus is i modulo 251, ends aside."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # thousands of small files that need not last

    def make(lengths: list[int], *, shard_tokens: int = 1 << 24, name: str = "shards") -> Shards:
        writer = ShardWriter(tmp_path / name, tokenizer=FACTS, source={"key": "k"}, shard_tokens=shard_tokens)
        at = 0
        for length in lengths:
            writer.append(np.arange(at, at + length - 1) % 251)
            at += length
            if writer.pending_tokens >= shard_tokens:
                writer.flush()
        writer.finish()
        return Shards.open(tmp_path / name)

    return make
