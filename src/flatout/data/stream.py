"""The batch of a step as a pure function of (data, seed, step), without any state to save.

Steps can be requested in any order, by any number of ranks, in micro-batches of any size, and the rows are the same.
This gives exact resume, the same batches on one rank as on eight, and retries after running out of memory.
The order of an epoch is a seeded bijection computed per index, not a shuffled list, so it costs no memory.
Used by every recipe, through `feed`.

Shape legend: S sequences, T sequence_length, N = S * T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.shards import Shards
from flatout.errors import RunFailed, UsageError

NOT_TRAINED = -100
FEISTEL_ROUNDS = 6
SEGMENTS_MULTIPLE = 8


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch, token-flat."""

    tokens: Tensor  # int64 [N]
    targets: Tensor  # int64 [N], NOT_TRAINED where a token is not trained on
    positions: Tensor  # int64 [N], from 0 in every sequence (concat) or document (documents)
    cu_seqlens: Tensor | None  # int32, where segments end, padded with N to one length for the whole run
    num_sequences: int
    sequence_length: int
    num_target_tokens: int
    task: str | None = None
    num_padding: int = 0  # padding tokens among them
    longest: int | None = None  # no segment is longer, in any batch of the run; None: the sequence length
    # int64 [R]: the tokens with a target, and those targets, unless nearly all tokens have one; both padded alike.
    rows: Tensor | None = None
    row_targets: Tensor | None = None
    # [N] each, for objectives that need more: old log-probability, advantage, weight, adapter, value target.
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, the fields first, then the columns."""
        values = {field.name: getattr(self, field.name) for field in fields(self)} | dict(self.columns)
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Batch:
        """The same batch with other tensors."""
        own = {name: value for name, value in tensors.items() if name not in self.columns}
        return replace(self, **own, columns={name: tensors[name] for name in self.columns})  # type: ignore[arg-type]

    def pinned(self) -> Batch:
        """The same batch in page-locked memory."""
        return self.with_tensors({name: tensor.pin_memory() for name, tensor in self.tensors.items()})

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Batch:
        """The same batch on a device; from pinned memory the copy overlaps with computation."""
        return self.with_tensors(
            {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.tensors.items()}
        )


class Steps(Protocol):
    """The source of a run's batches: any step, in any order, by any number of ranks."""

    def micro_batches(self, step: int, *, rank: int = 0, world: int = 1, micro_batch: int) -> list[Batch]: ...
    @property
    def steps_per_epoch(self) -> float | None: ...


@dataclass(frozen=True, kw_only=True)
class StepArrays:
    """The sequences of one rank in one step."""

    windows: NDArray[np.int64]  # [S], which windows of the corpus
    tokens: NDArray[np.int64]  # [S, T + 1]
    starts: NDArray[np.bool_] | None  # [S, T + 1], where documents begin; None when they do not matter


class Stream:
    """Windows of `sequence_length` tokens of the corpus, in the order in which a run visits them.

    Window w is tokens [w T, w T + T + 1) of the concatenated corpus. Step s takes the indices [s B, (s + 1) B)
    of an endless sequence of epochs; rank r of W takes the r-th contiguous block of them.

    Shards that are still being written are visited in blocks, shuffled within each, so that the order does not
    depend on how much was written at the time.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        sequence_length: int,
        batch_sequences: int,
        seed: int,
        packing: Literal["concat", "documents"],
        shuffle: bool,
        max_documents: int | None = None,
    ) -> None:
        """`max_documents` bounds the documents in one window; by default it is counted, or the worst case while
        the corpus is not complete."""
        shards.wait_for(sequence_length + 1)
        if shards.num_tokens <= sequence_length:
            raise UsageError(
                f"{shards.name} has {shards.num_tokens} tokens, but one sequence needs {sequence_length + 1}; shorten "
                "data.sequence_length, or give more data (for validation: a larger data.valid_share)"
            )
        self.shards = shards
        self.sequence_length = sequence_length
        self.batch_sequences = batch_sequences
        self.seed = seed
        self.packing = packing
        self.shuffle = shuffle
        self.max_documents = 1
        if packing == "documents":
            # A document has at least one token and its EOS.
            worst = sequence_length // 2 + 1
            counted = shards.max_segments(sequence_length) if shards.complete else worst
            self.max_documents = counted if max_documents is None else max_documents

    @property
    def num_sequences(self) -> int | None:
        """Windows in one epoch; `None` while the corpus is still being written."""
        return (self.shards.num_tokens - 1) // self.sequence_length if self.shards.complete else None

    @property
    def steps_per_epoch(self) -> float | None:
        count = self.num_sequences
        return None if count is None else count / self.batch_sequences

    def step_arrays(self, step: int, *, rank: int = 0, world: int = 1) -> StepArrays:
        """The rank's share of the batch of a step."""
        if self.batch_sequences % world:
            raise UsageError(f"a batch of {self.batch_sequences} sequences cannot be split evenly over {world} ranks")
        share = self.batch_sequences // world
        first = step * self.batch_sequences + rank * share
        windows = self.windows(np.arange(first, first + share, dtype=np.int64))
        length = self.sequence_length
        tokens = np.empty((share, length + 1), np.int64)
        starts = np.zeros((share, length + 1), np.bool_) if self.packing == "documents" else None
        for row, window in enumerate(windows.tolist()):
            tokens[row] = self.shards.window(window * length, length + 1)
            if starts is not None:
                starts[row, self.shards.document_starts(window * length, length + 1)] = True
        return StepArrays(windows=windows, tokens=tokens, starts=starts)

    def micro_batches(self, step: int, *, rank: int = 0, world: int = 1, micro_batch: int) -> list[Batch]:
        """The rank's share of a step in slices of `micro_batch` sequences, in order."""
        arrays = self.step_arrays(step, rank=rank, world=world)
        count = len(arrays.tokens)
        if count % micro_batch:
            raise UsageError(f"{count} sequences of a rank cannot be split evenly into micro-batches of {micro_batch}")
        return [self._batch(arrays, slice(i, i + micro_batch)) for i in range(0, count, micro_batch)]

    def windows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The window at each index of the endless sequence of epochs."""
        block = self._block()
        count = self.num_sequences
        if count is None:
            needed = (int(indices.max()) // block + 1) * block
            self.shards.wait_for(needed * self.sequence_length + 1)
            # Complete now: the true count. Otherwise all indices are in whole blocks of the first epoch.
            count = self.num_sequences or needed
        epochs, within = np.divmod(indices, count)
        if not self.shuffle:
            return within
        found = np.empty_like(within)
        blocks = within // block
        for epoch, number in sorted(set(zip(epochs.tolist(), blocks.tolist(), strict=True))):
            chosen = (epochs == epoch) & (blocks == number)
            begin = number * block
            size = min(block, count - begin)
            found[chosen] = begin + permute(within[chosen] - begin, size, key=(self.seed, epoch, number))
        return found

    def _block(self) -> int:
        """The number of windows shuffled among themselves, which must therefore all be written."""
        if not self.shuffle:
            return 1
        manifest = self.shards.manifest
        if manifest is not None and manifest.streaming:
            return max(1, (manifest.shard_tokens - 1) // self.sequence_length)
        return (self.shards.num_tokens - 1) // self.sequence_length

    def _batch(self, arrays: StepArrays, rows: slice) -> Batch:
        tokens_ST = arrays.tokens[rows]
        num_sequences, length = tokens_ST.shape[0], self.sequence_length
        targets_ST = tokens_ST[:, 1:].copy()
        positions_ST = np.broadcast_to(np.arange(length), (num_sequences, length))
        segments, num_targets = None, targets_ST.size
        if arrays.starts is not None:
            starts_ST = arrays.starts[rows]
            # The token after a document's last one belongs to another text.
            targets_ST[starts_ST[:, 1:]] = NOT_TRAINED
            num_targets -= int(starts_ST[:, 1:].sum())
            begins_ST = np.where(starts_ST[:, :-1], positions_ST, 0)
            positions_ST = positions_ST - np.maximum.accumulate(begins_ST, axis=1)
            segments = self._segments(positions_ST.reshape(-1) == 0, num_sequences=num_sequences)
        return Batch(
            tokens=torch.from_numpy(tokens_ST[:, :-1].reshape(-1)),
            targets=torch.from_numpy(targets_ST.reshape(-1)),
            positions=torch.from_numpy(positions_ST.reshape(-1).copy()),
            cu_seqlens=segments,
            num_sequences=num_sequences,
            sequence_length=length,
            num_target_tokens=num_targets,
        )

    def _segments(self, begins: NDArray[np.bool_], *, num_sequences: int) -> Tensor:
        most = -(-self.max_documents * num_sequences // SEGMENTS_MULTIPLE) * SEGMENTS_MULTIPLE
        found = np.flatnonzero(begins)
        if len(found) > most:
            raise RunFailed(
                f"{len(found)} documents in {num_sequences} sequences of {self.shards.name}, but the fixed shape holds "
                f"{most}; allow more than {self.max_documents} per sequence, or use data.packing: concat"
            )
        segments = np.full(most + 1, len(begins), np.int32)
        segments[: len(found)] = found
        return torch.from_numpy(segments)


def permute(indices: NDArray[np.int64], size: int, *, key: tuple[int, int, int]) -> NDArray[np.int64]:
    """A bijection of range(size), determined by `key`, at the given indices.

    A Feistel network permutes the numbers of an even count of bits, whatever its round function is. Results outside
    the range go through it again until they are inside, which keeps it a bijection.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * FEISTEL_ROUNDS).digest()
    round_keys = np.frombuffer(digest, "<u8")
    values = indices.astype(np.uint64)
    outside = np.ones(len(values), np.bool_)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        values[outside] = (left << half) | right
        outside = values >= size
    return values.astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spreads every bit over all 64 by xor-shifts and wrapping odd multiplications."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed
