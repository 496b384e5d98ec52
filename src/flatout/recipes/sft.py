"""Supervised fine-tuning: `flatout train` with `recipe: sft`, all weights or adapters (`lora:`).

It trains on whole examples, packed without attention between them, and only on the answers in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flatout import hub
from flatout.config.settings import DataSettings, Settings
from flatout.data.examples import Conversations, open_conversations
from flatout.data.mixture import Mixed
from flatout.data.packed import Packed
from flatout.data.stream import Batch
from flatout.engine.ranks import Ranks
from flatout.recipes.batches import Streamed
from flatout.recipes.loop import train
from flatout.recipes.material import Material
from flatout.recipes.own_objective import objective_of
from flatout.recipes.session import Session
from flatout.recipes.validation import held_out
from flatout.record import Outcome, Run, Sink


def run(
    settings: Settings,
    *,
    folder: Path,
    resume: bool = False,
    sinks: Sequence[Sink] = (),
    session: Session | None = None,
) -> Outcome:
    return train(settings, conversations, folder=folder, resume=resume, sinks=sinks, session=session)


@contextmanager
def conversations(settings: Settings) -> Iterator[Material]:
    """Training and held-out examples, tokenized by the model's own tokenizer unless another is named."""
    data = settings.data
    with open_conversations(data, seed=settings.seed, tokenizer=tokenizer_of(settings)) as examples:
        stream = stream_of(examples, settings)

        def valid(size: int) -> Packed:
            return Packed(
                examples.valid,
                sequence_length=data.sequence_length,
                batch_sequences=size,
                seed=settings.seed,
                shuffle=False,
            )

        def validation(ranks: Ranks, micro_batch: int) -> list[Batch]:
            windows = max(1, min(valid(1).num_sequences, settings.eval.tokens // data.sequence_length))
            return held_out(valid, windows=windows, ranks=ranks, micro_batch=micro_batch)

        yield Material(
            facts=examples,
            source=Streamed(stream),
            held_out=validation,
            objective=objective_of(settings),
            mean_context=stream.mean_context,
            longest=stream.longest,
            trained_share=stream.trained_share,
        )


def stream_of(examples: Conversations, settings: Settings, *, unit: int = 1) -> Packed | Mixed:
    """The training examples in the order of the run, `unit` of them together; weighted sources in their shares."""
    data, batch = settings.data, settings.train.batch_tokens // settings.data.sequence_length
    weights = [source.weight for source in data.sources if source.weight is not None]
    if not weights:
        return Packed(
            examples.train,
            sequence_length=data.sequence_length,
            batch_sequences=batch,
            seed=settings.seed,
            shuffle=data.shuffle,
            unit=unit,
        )
    return Mixed(
        examples.train,
        counts=examples.counts,
        weights=weights,
        sequence_length=data.sequence_length,
        batch_sequences=batch,
        seed=settings.seed,
        shuffle=data.shuffle,
        unit=unit,
    )


def tokenizer_of(settings: Settings) -> str:
    if settings.model.name is not None and settings.data.tokenizer == DataSettings().tokenizer:
        hub.check_name(settings.model.name)
        if Run.is_named_by(settings.model.name):
            return str(Run.open(settings.model.name).tokenizer_dir)
        return settings.model.name
    return settings.data.tokenizer
