"""Prepares the batches of the coming steps ahead of time, in order, in pinned memory.

The workers are threads, not processes: reading a file and copying arrays release the GIL, threads need no pickling,
and a thread cannot be killed without the trainer. Used by every recipe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import torch
from torch import Tensor

from flatout.data.stream import Batch
from flatout.errors import EnvironmentLacks

JOIN_S = 2.0


class Feed(Iterator[list[Batch]]):
    """Iterates over the batches of steps `start` to `stop` (`None`: endless).

    `make(step)` is called by `workers` threads (0: in the caller) in any order, at most `prefetch` steps ahead, or
    one step per worker if there are more workers. `next` raises its exceptions at that step. With `pin`, batches are
    in staging buffers that are reused: the buffers of a step stay untouched until `prefetch + 2` further steps were
    taken, so its copies to the device must be finished by then.
    """

    def __init__(
        self,
        make: Callable[[int], list[Batch]],
        *,
        start: int,
        stop: int | None,
        workers: int,
        prefetch: int,
        pin: bool,
    ) -> None:
        if pin and not torch.cuda.is_available():
            raise EnvironmentLacks("pinned memory needs a CUDA device; set plan.pin_memory: false")
        self._make = make
        self._stop = stop
        self._ahead = prefetch
        # Workers fill up to `_ahead` slots ahead of the consumer, and do not touch the `prefetch + 2` behind it.
        self._staging = Staging(2 * prefetch + 2, pin=True) if pin else None
        self._taken = start  # the next step to hand out
        self._claimed = start  # the next step to compute
        self._ready: dict[int, list[Batch] | BaseException] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        for _ in range(workers):
            self.add_worker()

    @property
    def num_workers(self) -> int:
        return len(self._threads)

    def add_worker(self) -> None:
        """Adds a thread, for when the consumer had to wait. It has a step to work on whatever the prefetch is."""
        name = f"flatout-feed-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        with self._changed:
            self._threads.append(thread)
            if len(self._threads) > self._ahead:
                self._ahead += 1
                if self._staging is not None:
                    self._staging.num_slots += 1
                self._changed.notify_all()
        thread.start()

    def __next__(self) -> list[Batch]:
        if self._closed:
            raise ValueError("the feed is closed")
        if self._stop is not None and self._taken >= self._stop:
            raise StopIteration
        result = self._await() if self._threads else self._stage(self._taken)
        self._hand_over()
        if isinstance(result, BaseException):
            self.close()
            raise result
        return result

    def close(self) -> None:
        """Stops the workers; one that is inside `make` ends after it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(JOIN_S)

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _await(self) -> list[Batch] | BaseException:
        with self._changed:
            self._changed.wait_for(lambda: self._taken in self._ready)
            return self._ready.pop(self._taken)

    def _hand_over(self) -> None:
        with self._changed:
            self._taken += 1
            self._claimed = max(self._claimed, self._taken)  # without workers the caller made the step
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._claimed < self._taken + self._ahead)
                step = self._claimed
                if self._closed or (self._stop is not None and step >= self._stop):
                    return
                self._claimed += 1
            result: list[Batch] | BaseException
            try:
                result = self._stage(step)
            except BaseException as error:  # passed on to the consumer
                result = error
            with self._changed:
                self._ready[step] = result
                self._changed.notify_all()

    def _stage(self, step: int) -> list[Batch]:
        batches = self._make(step)
        return self._staging.stage(step, batches) if self._staging else batches


class Staging:
    """Slots with the tensors of one step each, allocated by the first steps and then reused.

    A slot is refilled `num_slots` steps later; that number may grow at any time.
    """

    def __init__(self, num_slots: int, *, pin: bool) -> None:
        self.num_slots = num_slots
        self._pin = pin
        self._slots: dict[int, list[Batch]] = {}  # by the step they hold
        self._lock = threading.Lock()

    def stage(self, step: int, batches: Sequence[Batch]) -> list[Batch]:
        """Copies the batches of a step into a slot that is free by then."""
        with self._lock:
            oldest = min(self._slots, default=step)
            held = self._slots.pop(oldest) if oldest <= step - self.num_slots else []
        if [_shapes(batch) for batch in held] != [_shapes(batch) for batch in batches]:
            held = [self._like(batch) for batch in batches]
        staged = [self._fill(buffer, batch) for buffer, batch in zip(held, batches, strict=True)]
        with self._lock:
            self._slots[step] = staged
        return list(staged)

    def _like(self, batch: Batch) -> Batch:
        def empty(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pin)

        return batch.with_tensors({name: empty(tensor) for name, tensor in batch.tensors.items()})

    def _fill(self, buffer: Batch, batch: Batch) -> Batch:
        """`batch` with its numbers in the memory of `buffer`."""
        held = buffer.tensors
        return batch.with_tensors({name: held[name].copy_(tensor) for name, tensor in batch.tensors.items()})


def _shapes(batch: Batch) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in batch.tensors.items()}
