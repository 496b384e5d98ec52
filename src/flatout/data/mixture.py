"""Several sources in the shares that their weights ask for.

An epoch has as many examples as all sources together, and each source gives its share of them: a source with more than
that gives other ones in the next epoch, a source with fewer repeats its own. Every epoch is packed anew. The batch of a
step is a pure function of (examples, weights, seed, step), as in `packed`.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flatout.data.examples import Examples
from flatout.data.packed import Packed, pack_units
from flatout.data.stream import Batch, permute
from flatout.errors import UsageError

KEPT_EPOCHS = 2  # a step may take the end of one epoch and the beginning of the next
EPOCH_SEEDS = 1_000_003  # between the seeds of two epochs


class Mixed:
    """Packed sequences of weighted sources, in the order in which a run visits them."""

    def __init__(
        self,
        examples: Examples,
        *,
        counts: Sequence[int],
        weights: Sequence[float],
        sequence_length: int,
        batch_sequences: int,
        seed: int,
        shuffle: bool,
        unit: int = 1,
    ) -> None:
        """`counts` are the examples of each source, which follow one another in `examples`, `unit` of them together."""
        self.examples, self.seed, self.shuffle, self.unit = examples, seed, shuffle, unit
        self.counts = tuple(count // unit for count in counts)
        self.sequence_length, self.batch_sequences = sequence_length, batch_sequences
        if empty := [i for i, count in enumerate(counts) if not count]:
            raise UsageError(f"data.sources: item {empty[0]} has a weight but no examples to train on")
        self.drawn = shares(weights, total=sum(self.counts))
        self.longest = int((examples.lengths - 1).max())
        self._lock = threading.Lock()  # loader workers are threads
        self._packed: dict[int, Packed] = {}
        self._ends: list[int] = []  # where each epoch ends in the endless sequence of them

    @property
    def steps_per_epoch(self) -> float:
        return self.first.num_sequences / self.batch_sequences

    @property
    def first(self) -> Packed:
        with self._lock:
            return self._epoch(0)

    @property
    def fill(self) -> float:
        return self.first.fill

    @property
    def mean_context(self) -> float:
        return self.first.mean_context

    @property
    def trained_share(self) -> float:
        return self.first.trained_share

    def chosen(self, epoch: int) -> NDArray[np.int64]:
        """The examples of an epoch, by their number in `examples`; some may be in it more than once."""
        found, begin = [], 0
        for number, (count, drawn) in enumerate(zip(self.counts, self.drawn, strict=True)):
            indices = np.arange(epoch * drawn, (epoch + 1) * drawn, dtype=np.int64)
            rounds, within = np.divmod(indices, count)
            for turn in np.unique(rounds).tolist():
                part = within[rounds == turn]
                part = permute(part, count, key=(self.seed, turn, number + 1)) if self.shuffle else part
                found.append(begin + part)
            begin += count
        units = np.concatenate(found)
        return (units[:, None] * self.unit + np.arange(self.unit)).reshape(-1)

    def micro_batches(self, step: int, *, rank: int = 0, world: int = 1, micro_batch: int) -> list[Batch]:
        """The rank's share of a step in slices of `micro_batch` sequences, in order."""
        share, left = divmod(self.batch_sequences, world)
        if left:
            raise UsageError(f"a batch of {self.batch_sequences} sequences cannot be split evenly over {world} ranks")
        if share % micro_batch:
            raise UsageError(f"{share} sequences of a rank cannot be split evenly into micro-batches of {micro_batch}")
        first = step * self.batch_sequences + rank * share
        with self._lock:
            places = [self._place(index) for index in range(first, first + share)]
        return [self._batch(places[i : i + micro_batch]) for i in range(0, share, micro_batch)]

    def members(self, index: int) -> list[int]:
        """The examples of the sequence at an index of the endless sequence of epochs."""
        with self._lock:
            packed, number = self._place(index)
            return packed.members(number)

    def _batch(self, places: Sequence[tuple[Packed, int]]) -> Batch:
        first = places[0][0]
        if all(packed is first for packed, _ in places):
            return first.batch([number for _, number in places])
        # The end of one epoch and the beginning of the next.
        bins = [packed.members(number) for packed, number in places]
        return self._of(bins).batch(list(range(len(bins))))

    def _place(self, index: int) -> tuple[Packed, int]:
        """The epoch of an index, and which of its sequences is there."""
        while not self._ends or index >= self._ends[-1]:
            epoch = len(self._ends)
            self._ends.append((self._ends[-1] if epoch else 0) + self._epoch(epoch).num_sequences)
        epoch = bisect.bisect_right(self._ends, index)
        packed, within = self._epoch(epoch), index - (self._ends[epoch - 1] if epoch else 0)
        if not self.shuffle:
            return packed, within
        order = permute(np.array([within], np.int64), packed.num_sequences, key=(self.seed, epoch, 0))
        return packed, int(order[0])

    def _epoch(self, epoch: int) -> Packed:
        if epoch not in self._packed:
            while len(self._packed) >= KEPT_EPOCHS:
                del self._packed[next(iter(self._packed))]
            chosen = self.chosen(epoch)
            lengths = self.examples.lengths[chosen] - 1
            seed = self.seed + EPOCH_SEEDS * epoch
            bins = pack_units(lengths, capacity=self.sequence_length, seed=seed, unit=self.unit)
            self._packed[epoch] = self._of([chosen[members].tolist() for members in bins])
        return self._packed[epoch]

    def _of(self, bins: Sequence[Sequence[int]]) -> Packed:
        return Packed(
            self.examples,
            sequence_length=self.sequence_length,
            batch_sequences=self.batch_sequences,
            seed=self.seed,
            shuffle=False,
            bins=bins,
        )


def shares(weights: Sequence[float], *, total: int) -> tuple[int, ...]:
    """How many of `total` examples each source gives: largest remainders first, at least one each."""
    exact = np.asarray(weights, np.float64) / sum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    for number in np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]:
        counts[number] += 1
    return tuple(max(1, int(count)) for count in counts)
