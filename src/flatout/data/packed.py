"""Whole examples side by side in sequences of one length, none of them seeing another: what recipe sft trains on.

Packed once, best fit first, so hardly a token is padding; then the order of the sequences is a seeded bijection per
epoch, as in `stream`: the batch of a step is a pure function of (examples, seed, step).

Shape legend: S sequences, T sequence_length, N = S * T tokens.
"""

from __future__ import annotations

import bisect

import numpy as np
import torch
from numpy.typing import NDArray

from flatout.data.examples import Examples
from flatout.data.stream import NOT_TRAINED, SEGMENTS_MULTIPLE, Batch, permute
from flatout.errors import UsageError

# The loss looks at trained tokens only, rounded up to a multiple of this share of a micro-batch: few shapes.
ROW_PARTS = 16


class Packed:
    """Sequences of whole examples, in the order in which a run visits them.

    Step s takes the indices [s B, (s + 1) B) of an endless row of epochs; rank r of W takes the r-th block of them.
    """

    def __init__(
        self, examples: Examples, *, sequence_length: int, batch_sequences: int, seed: int, shuffle: bool
    ) -> None:
        self.examples, self.seed, self.shuffle = examples, seed, shuffle
        self.sequence_length, self.batch_sequences = sequence_length, batch_sequences
        # The last token of an example is only a target, and takes no place.
        self._places = examples.lengths - 1
        self._bins = pack(self._places, capacity=sequence_length, seed=seed)
        self.longest = int(self._places.max())
        # What is left empty is cut into segments too, none longer than the longest example.
        used = [int(self._places[members].sum()) for members in self._bins]
        self.max_documents = max(
            len(members) + -(-(sequence_length - full) // self.longest)
            for members, full in zip(self._bins, used, strict=True)
        )

    @property
    def num_sequences(self) -> int:
        return len(self._bins)

    @property
    def steps_per_epoch(self) -> float:
        return self.num_sequences / self.batch_sequences

    @property
    def fill(self) -> float:
        """Share of the places that hold a token."""
        return float(self._places.sum()) / (self.num_sequences * self.sequence_length)

    @property
    def mean_context(self) -> float:
        """Positions a token attends to on average, itself included."""
        return float((self._places * (self._places + 1) / 2).sum() / self._places.sum())

    def micro_batches(self, step: int, *, rank: int = 0, world: int = 1, micro_batch: int) -> list[Batch]:
        """The rank's share of a step in slices of `micro_batch` sequences, in order."""
        share, left = divmod(self.batch_sequences, world)
        if left:
            raise UsageError(f"a batch of {self.batch_sequences} sequences cannot be split over {world} ranks evenly")
        if share % micro_batch:
            raise UsageError(f"{share} sequences of a rank cannot be cut into micro-batches of {micro_batch} evenly")
        first = step * self.batch_sequences + rank * share
        chosen = self.sequences(np.arange(first, first + share, dtype=np.int64)).tolist()
        return [self._batch(chosen[i : i + micro_batch]) for i in range(0, share, micro_batch)]

    def sequences(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which sequence stands at each index of the endless row of epochs."""
        epochs, within = np.divmod(indices, self.num_sequences)
        if not self.shuffle:
            return within
        found = np.empty_like(within)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            found[chosen] = permute(within[chosen], self.num_sequences, key=(self.seed, epoch, 0))
        return found

    def members(self, sequence: int) -> list[int]:
        """The examples of one sequence."""
        return self._bins[sequence]

    def _batch(self, sequences: list[int]) -> Batch:
        count, length = len(sequences), self.sequence_length
        tokens = np.zeros(count * length, np.int64)
        targets = np.full(count * length, NOT_TRAINED, np.int64)
        positions = np.zeros(count * length, np.int64)
        begins: list[int] = []
        used = 0
        for row, sequence in enumerate(sequences):
            at = row * length
            for example in self._bins[sequence]:
                end = int(self.examples.ends[example])
                places = int(self._places[example])
                begin = end - places - 1
                here = slice(at, at + places)
                tokens[here] = self.examples.tokens[begin : end - 1]
                learnt = self.examples.trained[begin + 1 : end]
                targets[here] = np.where(learnt, self.examples.tokens[begin + 1 : end], NOT_TRAINED)
                positions[here] = np.arange(places)
                begins.append(at)
                at += places
            used += at - row * length
            end = (row + 1) * length
            positions[at:end] = np.arange(end - at) % self.longest
            begins += range(at, end, self.longest)
        most = -(-self.max_documents * count // SEGMENTS_MULTIPLE) * SEGMENTS_MULTIPLE
        segments = np.full(most + 1, count * length, np.int32)
        segments[: len(begins)] = begins
        trained = np.flatnonzero(targets != NOT_TRAINED)
        rows, row_targets = _rows(trained, targets)
        return Batch(
            tokens=torch.from_numpy(tokens),
            targets=torch.from_numpy(targets),
            positions=torch.from_numpy(positions),
            cu_seqlens=torch.from_numpy(segments),
            num_sequences=count,
            sequence_length=length,
            num_target_tokens=len(trained),
            num_padding=count * length - used,
            longest=self.longest,
            rows=rows,
            row_targets=row_targets,
        )


def _rows(
    trained: NDArray[np.int64], targets: NDArray[np.int64]
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Where the trained tokens are and what follows them, padded by rows that count for nothing; None if all are."""
    part = -(-len(targets) // ROW_PARTS)
    size = max(1, -(-len(trained) // part)) * part
    if size >= len(targets):
        return None, None
    rows, row_targets = np.zeros(size, np.int64), np.full(size, NOT_TRAINED, np.int64)
    rows[: len(trained)] = trained
    row_targets[: len(trained)] = targets[trained]
    return torch.from_numpy(rows), torch.from_numpy(row_targets)


def pack(lengths: NDArray[np.int64], *, capacity: int, seed: int) -> list[list[int]]:
    """Which items share a bin: the longest first, each into the fullest bin that still has room."""
    if len(lengths) and int(lengths.max()) > capacity:
        raise UsageError(f"an example of {int(lengths.max())} tokens does not fit a sequence of {capacity}")
    # Equal lengths in a seeded order, so that neighbours in the file are not neighbours here.
    shuffled = permute(np.arange(len(lengths), dtype=np.int64), len(lengths), key=(seed, -1, 0))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms: list[int] = []  # those of `by_room` that are not empty, sorted
    for item in order.tolist():
        need = int(lengths[item])
        at = bisect.bisect_left(rooms, need)
        if at == len(rooms):
            chosen, room = len(bins), capacity
            bins.append([])
        else:
            room = rooms[at]
            chosen = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(at)
        bins[chosen].append(item)
        if left := room - need:
            if not by_room[left]:
                bisect.insort(rooms, left)
            by_room[left].append(chosen)
    return bins
