"""Supervised fine-tuning: `flatout train` with `recipe: sft`, all weights or adapters (`lora:`).

The loop is pretraining's. What differs is what it learns from: whole examples, packed side by side without seeing
each other, of which only the answers are learnt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flatout.config.settings import DataSettings, Settings
from flatout.data.examples import open_conversations
from flatout.data.packed import Packed
from flatout.data.stream import Batch
from flatout.engine.ranks import Ranks
from flatout.recipes import pretrain
from flatout.recipes.material import Material
from flatout.recipes.validation import held_out
from flatout.record import Outcome


def run(settings: Settings, **how: Any) -> Outcome:
    return pretrain.run(settings, open_data=conversations, **how)


@contextmanager
def conversations(settings: Settings) -> Iterator[Material]:
    """Training and held-out examples, tokenized by the model's own tokenizer unless another is named."""
    data = settings.data
    with open_conversations(data, seed=settings.seed, tokenizer=tokenizer_of(settings)) as talks:
        stream = Packed(
            talks.train,
            sequence_length=data.sequence_length,
            batch_sequences=settings.train.batch_tokens // data.sequence_length,
            seed=settings.seed,
            shuffle=data.shuffle,
        )

        def valid(size: int) -> Packed:
            return Packed(
                talks.valid,
                sequence_length=data.sequence_length,
                batch_sequences=size,
                seed=settings.seed,
                shuffle=False,
            )

        def validation(ranks: Ranks, micro_batch: int) -> list[Batch]:
            windows = max(1, min(valid(1).num_sequences, settings.eval.tokens // data.sequence_length))
            return held_out(valid, windows=windows, ranks=ranks, micro_batch=micro_batch)

        yield Material(
            facts=talks,
            stream=stream,
            held_out=validation,
            mean_context=stream.mean_context,
            longest=stream.longest,
            trained_share=stream.trained_share,
        )


def tokenizer_of(settings: Settings) -> str:
    if settings.model.name is not None and settings.data.tokenizer == DataSettings().tokenizer:
        return settings.model.name
    return settings.data.tokenizer
