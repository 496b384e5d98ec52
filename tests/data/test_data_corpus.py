from __future__ import annotations

from pathlib import Path

import numpy as np

from flatout.config.settings import DataSettings
from flatout.data.corpus import Corpus, open_corpus
from flatout.data.shards import Shards, ShardWriter, TokenizerFacts
from flatout.data.tokenizer import ByteTokenizer


def test_a_streamed_run_knows_its_data_again_when_it_is_complete(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    facts = TokenizerFacts(name="byte", fingerprint=tokenizer.fingerprint, vocab_size=257, eos_id=256)
    writer = ShardWriter(tmp_path / "train", tokenizer=facts, source={"key": "k"}, streaming=True)
    writer.append(np.arange(9))
    writer.flush()

    def corpus() -> Corpus:
        shards = Shards.open(tmp_path / "train")
        return Corpus(train=shards, valid=shards, tokenizer=tokenizer, source="somebody/data")

    begun = corpus()
    first = begun.describe()
    writer.append(np.arange(9))
    writer.finish()
    resumed = corpus().describe()
    assert (first["complete"], resumed["complete"]) == (False, True)
    assert first["fingerprint"] == resumed["fingerprint"] == begun.fingerprint


def test_raw_tokens_may_move_but_not_change(tmp_path: Path) -> None:
    def fingerprint(folder: Path, **fields: float) -> str:
        with open_corpus(DataSettings(source="tokens", path=str(folder), **fields), seed=0) as corpus:
            return corpus.fingerprint

    here = tmp_path / "here"
    here.mkdir()
    tokens = np.arange(1000) % 256
    tokens.astype("<u2").tofile(here / "a.bin")
    first = fingerprint(here)
    there = here.rename(tmp_path / "there")
    assert fingerprint(there) == first
    assert fingerprint(there, valid_share=0.3) != first
    tokens[500] += 1
    tokens.astype("<u2").tofile(there / "a.bin")
    assert fingerprint(there) != first
