"""Batches of a stream: any step is a pure function of the data and the seed, and is prepared ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from flatout.data.feed import Feed
from flatout.data.packed import Packed
from flatout.data.stream import Batch, Steps
from flatout.engine.faults import OutOfMemory, largest, smaller
from flatout.engine.ranks import Ranks
from flatout.engine.step import Engine
from flatout.errors import RunFailed
from flatout.plan import Plan
from flatout.recipes.session import Session


@dataclass(frozen=True)
class Streamed:
    """The source of a run that trains on prepared data."""

    stream: Steps

    @property
    def steps_per_epoch(self) -> float | None:
        return self.stream.steps_per_epoch

    @property
    def packing(self) -> dict[str, float]:
        """How whole examples fill their sequences; empty for running text, which fills them all."""
        stream = getattr(self.stream, "first", self.stream)
        if not isinstance(stream, Packed):
            return {}
        facts = {"sequences": stream.num_sequences, "sequence_length": stream.sequence_length}
        return {**facts, "fill": stream.fill}

    def trial_batch(self, ranks: Ranks, *, micro_batch: int) -> Batch:
        return self.stream.micro_batches(0, rank=ranks.rank, world=ranks.world, micro_batch=micro_batch)[0]

    @contextmanager
    def batches(
        self, engine: Engine, plan: Plan, session: Session, ranks: Ranks, *, start: int, stop: int
    ) -> Iterator[StreamBatches]:
        batches = StreamBatches(self.stream, plan, ranks, start=start, stop=stop)
        try:
            yield batches
        finally:
            batches.feed.close()


class StreamBatches:
    """After an out-of-memory error the micro-batches are smaller; the batch of a step stays the same."""

    def __init__(self, stream: Steps, plan: Plan, ranks: Ranks, *, start: int, stop: int) -> None:
        self.stream, self.plan, self.ranks, self.stop = stream, plan, ranks, stop
        self.micro_batch = plan.decisions.micro_batch
        self.feed = self._open(start)

    def next(self, step: int) -> list[Batch]:
        return next(self.feed)

    def again(self, step: int) -> None:
        self.feed.close()
        self.feed = self._open(step)

    def shrink(self, step: int, *, cause: OutOfMemory) -> tuple[int, int]:
        before, self.micro_batch = self.micro_batch, shrunk(self.micro_batch, self.plan, step=step, cause=cause)
        self.again(step)
        return before, self.micro_batch

    def resumable(self, step: int) -> bool:
        return True

    def feed_more(self, *, limit: int) -> int | None:
        if not 0 < self.feed.num_workers < limit:
            return None
        self.feed.add_worker()
        return self.feed.num_workers

    def _open(self, start: int) -> Feed:
        ranks, decisions = self.ranks, self.plan.decisions
        return Feed(
            partial(self.stream.micro_batches, rank=ranks.rank, world=ranks.world, micro_batch=self.micro_batch),
            start=start,
            stop=self.stop,
            workers=decisions.workers,
            prefetch=decisions.prefetch,
            pin=decisions.pin_memory,
        )


def shrunk(micro_batch: int, plan: Plan, *, step: int, cause: OutOfMemory) -> int:
    """The next smaller micro-batch after a step ran out of memory."""
    if micro_batch == 1:
        largest_parts = largest(plan.predicted.memory_gib)
        raise RunFailed(f"step {step} ran out of memory even with micro-batch 1 ({cause}). {largest_parts}")
    return smaller(micro_batch)
