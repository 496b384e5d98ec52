"""Preference optimisation on pairs of answers: `flatout train` with `recipe: dpo`, all weights or adapters.

The log-probabilities of the initial model are computed once, before the first step, so that no second model is kept.
Under adapters the initial model is the frozen base itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from flatout.config.settings import Settings
from flatout.data.examples import Conversations, open_conversations
from flatout.data.packed import Packed
from flatout.data.stream import Batch
from flatout.engine.ranks import Ranks
from flatout.engine.step import Engine
from flatout.plan import Plan
from flatout.recipes import preference
from flatout.recipes.batches import StreamBatches, Streamed
from flatout.recipes.loop import train
from flatout.recipes.material import Material
from flatout.recipes.session import Session
from flatout.recipes.sft import stream_of, tokenizer_of
from flatout.recipes.validation import held_out
from flatout.record import Outcome, Sink


def run(
    settings: Settings,
    *,
    folder: Path,
    resume: bool = False,
    sinks: Sequence[Sink] = (),
    session: Session | None = None,
) -> Outcome:
    return train(settings, comparisons, folder=folder, resume=resume, sinks=sinks, session=session)


@contextmanager
def comparisons(settings: Settings) -> Iterator[Material]:
    """Training and held-out pairs, each pair in one sequence."""
    data, tokenizer = settings.data, tokenizer_of(settings)
    with open_conversations(data, seed=settings.seed, tokenizer=tokenizer, pairs=True) as found:
        source = Compared(found, settings)
        stream = stream_of(source.examples, settings, unit=2)

        def valid(size: int) -> preference.Pairs:
            packed = Packed(
                source.examples.valid,
                sequence_length=data.sequence_length,
                batch_sequences=size,
                seed=settings.seed,
                shuffle=False,
                unit=2,
            )
            return preference.Pairs(packed)

        def validation(ranks: Ranks, micro_batch: int) -> list[Batch]:
            windows = max(1, min(int(valid(1).steps_per_epoch), settings.eval.tokens // data.sequence_length))
            return held_out(valid, windows=windows, ranks=ranks, micro_batch=micro_batch)

        yield Material(
            facts=found,
            source=source,
            held_out=validation,
            objective=preference.Preference(settings.dpo),
            mean_context=stream.mean_context,
            longest=stream.longest,
            trained_share=stream.trained_share,
        )


class Compared:
    """The source of a run that learns from pairs."""

    def __init__(self, found: Conversations, settings: Settings) -> None:
        self.settings = settings
        columns = preference.with_columns
        self.examples = replace(found, train=columns(found.train), valid=columns(found.valid))

    @property
    def _stream(self) -> Streamed:
        return Streamed(preference.Pairs(stream_of(self.examples, self.settings, unit=2)))

    @property
    def steps_per_epoch(self) -> float | None:
        return self._stream.steps_per_epoch

    def trial_batch(self, ranks: Ranks, *, micro_batch: int) -> Batch:
        return self._stream.trial_batch(ranks, micro_batch=micro_batch)

    @contextmanager
    def batches(
        self, engine: Engine, plan: Plan, session: Session, ranks: Ranks, *, start: int, stop: int
    ) -> Iterator[StreamBatches]:
        if self.settings.dpo.loss != "simpo":
            filled = preference.with_reference(
                self.settings, plan, engine, ranks, train=self.examples.train, valid=self.examples.valid
            )
            self.examples = replace(self.examples, train=filled["train"], valid=filled["valid"])
        with self._stream.batches(engine, plan, session, ranks, start=start, stop=stop) as batches:
            yield batches
