"""Many adapters, one router: `flatout train` with `recipe: router`.

One frozen base has an adapter for each task, and a router that chooses among them by the prompt. Phase 1 trains the
adapters side by side, phase 2 the router on all tasks, phase 3 both. The data is in `mixture`, the choice and its
losses in `routing`, the stages in `phases`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from flatout.config.settings import Settings
from flatout.data.examples import Examples
from flatout.data.packed import Packed
from flatout.data.stream import Batch
from flatout.data.tokenizer import load_tokenizer
from flatout.engine.objective import CrossEntropy
from flatout.engine.ranks import Ranks
from flatout.recipes.batches import Streamed
from flatout.recipes.loop import train
from flatout.recipes.material import Material
from flatout.recipes.mixture import Steps, open_mixture
from flatout.recipes.phases import Phases, equipped, prepared
from flatout.recipes.routing import ByRouter, Oracle, RoutedLoss
from flatout.recipes.sampling import Stopped
from flatout.recipes.setup import steps_of
from flatout.recipes.sft import tokenizer_of
from flatout.recipes.staged import opened
from flatout.recipes.stages import nothing_trained
from flatout.recipes.validation import held_out
from flatout.record import Outcome, Sink


def run(settings: Settings, *, folder: Path, resume: bool = False, sinks: Sequence[Sink] = ()) -> Outcome:
    settings = prepared(settings)
    with opened(settings, folder=folder, resume=resume, sinks=sinks) as staged:
        phases = Phases(settings=settings, staged=staged, train=partial(train, open_material=solutions))
        try:
            # The base: a published model, or a random one that first learns a little of everything.
            base = phases.base()

            # Phase 1: the adapters, each on its own task, all in one pass.
            if "1" in phases.wanted:
                outcome = phases.trained("1", base=base)
                phases.score("1", ("base", "own"))

            # Phase 2: the router on all tasks; the adapters stay as they are.
            if "2" in phases.wanted:
                outcome = phases.trained("2", base=base)
                phases.score("2", ("routed",))

            # Phase 3: both, first mostly on single tasks, then on all of them.
            if "3" in phases.wanted:
                outcome = phases.trained("3", base=base)
                phases.score("3", ("joint", "joint own"))
            return outcome
        except Stopped as stopped:
            return nothing_trained(stopped_by=str(stopped))


@contextmanager
def solutions(settings: Settings) -> Iterator[Material]:
    """The worked solutions of all sources, for one phase."""
    data, router, phase = settings.data, settings.router, settings.router.phase
    mixture = open_mixture(settings, load_tokenizer(tokenizer_of(settings), documents=None, cache=Path()))
    num_adapters, size = len(mixture.names), settings.train.batch_tokens // data.sequence_length

    def packed(examples: Examples, batch_sequences: int, *, shuffle: bool = data.shuffle) -> Packed:
        return Packed(
            examples,
            sequence_length=data.sequence_length,
            batch_sequences=batch_sequences,
            seed=settings.seed,
            shuffle=shuffle,
        )

    everything = packed(mixture.train, size)
    stream = Steps(
        everything,
        router,
        num_adapters=num_adapters,
        seed=settings.seed,
        singles=[packed(examples, size) for examples in mixture.each] if phase == "3" else (),
        total=steps_of(settings, everything.steps_per_epoch),
    )

    def valid(batch_sequences: int) -> Steps:
        examples = packed(mixture.valid, batch_sequences, shuffle=False)
        return Steps(examples, router, num_adapters=num_adapters, seed=settings.seed)

    def validation(ranks: Ranks, micro_batch: int) -> list[Batch]:
        most = packed(mixture.valid, 1).num_sequences
        windows = max(1, min(most, settings.eval.tokens // data.sequence_length))
        return held_out(valid, windows=windows, ranks=ranks, micro_batch=micro_batch)

    yield Material(
        facts=mixture,
        source=Streamed(stream),
        held_out=validation,
        objective=CrossEntropy() if phase == "1" else RoutedLoss(router, mixture.names),
        route=Oracle(num_adapters) if phase == "1" else ByRouter(router),
        equip=partial(equipped, settings=settings, names=mixture.names),
        mean_context=everything.mean_context,
        longest=everything.longest,
        trained_share=everything.trained_share,
    )
