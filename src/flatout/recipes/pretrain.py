"""Pretraining on running text: `flatout train` with `recipe: pretrain`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flatout.config.settings import Settings
from flatout.data.corpus import Corpus, open_corpus
from flatout.data.stream import Batch, Stream
from flatout.engine.ranks import Ranks
from flatout.recipes.batches import Streamed
from flatout.recipes.loop import train
from flatout.recipes.material import Material
from flatout.recipes.own_objective import objective_of
from flatout.recipes.validation import validation_batches
from flatout.record import Outcome, Sink


def run(settings: Settings, *, folder: Path, resume: bool = False, sinks: Sequence[Sink] = ()) -> Outcome:
    return train(settings, running_text, folder=folder, resume=resume, sinks=sinks)


@contextmanager
def running_text(settings: Settings) -> Iterator[Material]:
    """Windows over documents laid end to end."""
    with open_corpus(settings.data, seed=settings.seed) as corpus:

        def validation(ranks: Ranks, micro_batch: int) -> list[Batch]:
            return validation_batches(settings, corpus, ranks, micro_batch=micro_batch)

        yield Material(
            facts=corpus,
            source=Streamed(training_stream(settings, corpus)),
            held_out=validation,
            objective=objective_of(settings),
        )


def training_stream(settings: Settings, corpus: Corpus) -> Stream:
    data = settings.data
    return Stream(
        corpus.train,
        sequence_length=data.sequence_length,
        batch_sequences=settings.train.batch_tokens // data.sequence_length,
        seed=settings.seed,
        packing=data.packing,
        shuffle=data.shuffle,
    )
