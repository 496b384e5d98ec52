"""The micro-batches of one step after the other, ready before they are asked for."""

from __future__ import annotations

from functools import partial

from flatout.data.feed import Feed
from flatout.data.stream import Batch, Steps
from flatout.engine.faults import OutOfMemory, largest, smaller
from flatout.engine.ranks import Ranks
from flatout.errors import RunFailed
from flatout.plan import Plan


class Batches:
    """Gives smaller micro-batches from where the device ran out of memory on; the batch of a step stays the same."""

    def __init__(self, stream: Steps, plan: Plan, ranks: Ranks, *, start: int, stop: int) -> None:
        self.stream, self.plan, self.ranks, self.stop = stream, plan, ranks, stop
        self.micro_batch = plan.decisions.micro_batch
        self.feed = self._open(start)

    def __next__(self) -> list[Batch]:
        return next(self.feed)

    def shrink(self, step: int, *, cause: OutOfMemory) -> tuple[int, int]:
        """Gives `step` again, and all after it, in smaller micro-batches. Says the size before and after."""
        before = self.micro_batch
        if before == 1:
            raise RunFailed(
                f"step {step} found too little memory even with micro-batch 1 ({cause}). "
                + largest(self.plan.predicted.memory_gib)
            )
        self.micro_batch = smaller(before)
        self.again(step)
        return before, self.micro_batch

    def again(self, step: int) -> None:
        """Gives `step` again."""
        self.feed.close()
        self.feed = self._open(step)

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.feed.close()

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
