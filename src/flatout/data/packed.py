"""Whole examples packed into sequences of one length, without attention between them, for recipe sft.

They are packed once, best fit first, so there is little padding. The order of the sequences is a seeded bijection per
epoch, as in `stream`: the batch of a step is a pure function of (examples, seed, step).

Shape legend: S sequences, T sequence_length, N = S * T tokens.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from flatout.data.examples import Examples
from flatout.data.stream import NOT_TRAINED, SEGMENTS_MULTIPLE, Batch, permute
from flatout.errors import UsageError

# The loss covers trained tokens only, rounded up to a multiple of this share of a micro-batch: few shapes.
ROW_PARTS = 16
# Fewer of those parts, and the shortest length of a longest example, for data that is packed anew at every step.
FEW_PARTS, SHORTEST = (1, 2, 3, 4, 6, 8, 12, 16), 64


class Packed:
    """Sequences of whole examples, in the order in which a run visits them.

    Step s takes the indices [s B, (s + 1) B) of an endless sequence of epochs; rank r of W takes their r-th block.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        sequence_length: int,
        batch_sequences: int,
        seed: int,
        shuffle: bool,
        few_shapes: bool = False,
        bins: Sequence[Sequence[int]] | None = None,
        unit: int = 1,
    ) -> None:
        """`few_shapes`: for data that is packed anew at every step; lengths and counts are rounded up further.

        `unit`: this many consecutive examples stay together in one sequence, such as the two answers of a pair.
        `bins`: the examples of each sequence, if they are already packed. Some may be in none, and some in several.
        """
        self.examples, self.seed, self.shuffle = examples, seed, shuffle
        self.sequence_length, self.batch_sequences = sequence_length, batch_sequences
        # The last token of an example is only a target and takes no position.
        self._places = examples.lengths - 1
        longest = int(self._places.max())
        self._few_shapes = few_shapes
        self.longest = min(sequence_length, power_of_two(max(SHORTEST, longest))) if few_shapes else longest
        bins = pack_units(self._places, capacity=sequence_length, seed=seed, unit=unit) if bins is None else bins
        # Examples in the order of their sequences, where each sequence ends among them, and where each example begins.
        self._order = np.concatenate([np.asarray(members, np.int64) for members in bins])
        self._ends = np.cumsum([len(members) for members in bins], dtype=np.int64)
        self._offsets = np.concatenate([np.cumsum(self._places[list(m)]) - self._places[list(m)] for m in bins])
        self._trained = self.examples.trained_counts
        # Padding is cut into segments too, none longer than the longest example.
        self.max_documents = max(
            len(members) + -(-(sequence_length - int(self._places[list(members)].sum())) // self.longest)
            for members in bins
        )

    @property
    def num_sequences(self) -> int:
        return len(self._ends)

    @property
    def steps_per_epoch(self) -> float:
        return self.num_sequences / self.batch_sequences

    @property
    def fill(self) -> float:
        """Share of the positions that hold a token."""
        return float(self._places[self._order].sum()) / (self.num_sequences * self.sequence_length)

    @property
    def mean_context(self) -> float:
        """Positions a token attends to on average, including its own."""
        places = self._places[self._order]
        return float((places * (places + 1) / 2).sum() / places.sum())

    @property
    def trained_share(self) -> float:
        """Share of all positions, including padding, that are trained on."""
        return float(self.examples.trained_counts[self._order].sum()) / (self.num_sequences * self.sequence_length)

    def micro_batches(self, step: int, *, rank: int = 0, world: int = 1, micro_batch: int) -> list[Batch]:
        """The rank's share of a step in slices of `micro_batch` sequences, in order."""
        share, left = divmod(self.batch_sequences, world)
        if left:
            raise UsageError(f"a batch of {self.batch_sequences} sequences cannot be split evenly over {world} ranks")
        if share % micro_batch:
            raise UsageError(f"{share} sequences of a rank cannot be split evenly into micro-batches of {micro_batch}")
        first = step * self.batch_sequences + rank * share
        chosen = self.sequences(np.arange(first, first + share, dtype=np.int64)).tolist()
        return [self.batch(chosen[i : i + micro_batch]) for i in range(0, share, micro_batch)]

    def counts(self, step: int) -> tuple[int, int]:
        """The examples of a step on all ranks, and how many of their tokens are trained on."""
        chosen = self.sequences(step * self.batch_sequences + np.arange(self.batch_sequences, dtype=np.int64))
        examples = [example for sequence in chosen.tolist() for example in self.members(sequence)]
        return len(examples), int(self._trained[examples].sum())

    def batches(self, micro_batch: int, *, task: str | None = None) -> list[Batch]:
        """All sequences once, in order; the last micro-batch may be smaller, and is filled up with empty sequences."""
        found = []
        for at in range(0, self.num_sequences, micro_batch):
            members = list(range(at, min(at + micro_batch, self.num_sequences)))
            found.append(replace(self.batch(members, min(micro_batch, few_sizes(len(members)))), task=task))
        return found

    def sequences(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sequence at each index of the endless sequence of epochs."""
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
        return [int(example) for example in self._order[self._range(sequence)]]

    def _range(self, sequence: int) -> slice:
        return slice(int(self._ends[sequence - 1]) if sequence else 0, int(self._ends[sequence]))

    def batch(self, sequences: list[int], count: int | None = None) -> Batch:
        """`count` sequences, of which those behind the given ones are empty."""
        count, length = count or len(sequences), self.sequence_length
        ranges = [self._range(sequence) for sequence in sequences]
        chosen = np.concatenate([self._order[r] for r in ranges])
        places = self._places[chosen]
        rows_of = np.repeat(np.arange(len(sequences)), [r.stop - r.start for r in ranges])
        begins = rows_of * length + np.concatenate([self._offsets[r] for r in ranges])
        # For every used position: its index within its example, in the corpus, and in the batch.
        within = np.arange(int(places.sum())) - np.repeat(np.cumsum(places) - places, places)
        source = np.repeat(self.examples.ends[chosen] - places - 1, places) + within
        here = np.repeat(begins, places) + within

        tokens = np.zeros(count * length, np.int64)
        targets = np.full(count * length, NOT_TRAINED, np.int64)
        positions = np.zeros(count * length, np.int64)
        tokens[here] = self.examples.tokens[source]
        targets[here] = np.where(self.examples.trained[source + 1], self.examples.tokens[source + 1], NOT_TRAINED)
        positions[here] = within
        # A column's value for a token is stored where that token is the target, like its loss.
        columns = {}
        for name, values in self.examples.columns.items():
            column = np.zeros(count * length, values.dtype)
            column[here] = values[source + 1]
            columns[name] = torch.from_numpy(column)
        segments_begin = begins.tolist()
        used = np.bincount(rows_of, weights=places, minlength=count).astype(np.int64)
        for row, full in enumerate(used.tolist()):
            positions[row * length + full : (row + 1) * length] = np.arange(length - full) % self.longest
            segments_begin += range(row * length + full, (row + 1) * length, self.longest)
        segments_begin.sort()
        most = -(-self.max_documents * count // SEGMENTS_MULTIPLE) * SEGMENTS_MULTIPLE
        most = power_of_two(most) if self._few_shapes else most
        segments = np.full(most + 1, count * length, np.int32)
        segments[: len(segments_begin)] = segments_begin
        trained = np.flatnonzero(targets != NOT_TRAINED)
        rows, row_targets = _rows(trained, targets, few_shapes=self._few_shapes)
        return Batch(
            tokens=torch.from_numpy(tokens),
            targets=torch.from_numpy(targets),
            positions=torch.from_numpy(positions),
            cu_seqlens=torch.from_numpy(segments),
            num_sequences=count,
            sequence_length=length,
            num_target_tokens=len(trained),
            num_padding=count * length - int(used.sum()),
            longest=self.longest,
            rows=rows,
            row_targets=row_targets,
            columns=columns,
        )


def few_sizes(count: int) -> int:
    """The next larger one of a few sizes, at most an eighth larger: with few shapes, little is compiled."""
    unit = max(1, power_of_two(count) // 8)
    return -(-count // unit) * unit


def power_of_two(count: int) -> int:
    """The next power of two that is not smaller."""
    return 1 << (count - 1).bit_length()


def _rows(
    trained: NDArray[np.int64], targets: NDArray[np.int64], *, few_shapes: bool
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """The positions of the trained tokens and their targets, padded with ignored rows; None if all are trained."""
    part = -(-len(targets) // ROW_PARTS)
    parts = max(1, -(-len(trained) // part))
    size = (min(few for few in FEW_PARTS if few >= parts) if few_shapes else parts) * part
    if size >= len(targets):
        return None, None
    rows, row_targets = np.zeros(size, np.int64), np.full(size, NOT_TRAINED, np.int64)
    rows[: len(trained)] = trained
    row_targets[: len(trained)] = targets[trained]
    return torch.from_numpy(rows), torch.from_numpy(row_targets)


def pack_units(lengths: NDArray[np.int64], *, capacity: int, seed: int, unit: int) -> list[list[int]]:
    """Like `pack`, with `unit` consecutive items always in one bin, next to each other."""
    bins = pack(lengths.reshape(-1, unit).sum(axis=1), capacity=capacity, seed=seed)
    return bins if unit == 1 else [[item * unit + i for item in members for i in range(unit)] for members in bins]


def pack(lengths: NDArray[np.int64], *, capacity: int, seed: int) -> list[list[int]]:
    """Assigns items to bins: the longest first, each into the fullest bin that still fits it."""
    if len(lengths) and int(lengths.max()) > capacity:
        raise UsageError(f"an example of {int(lengths.max())} tokens does not fit a sequence of {capacity}")
    # Items of equal length are in a seeded order, so that neighbours in the file are not neighbours here.
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
