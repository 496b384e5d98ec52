"""The fast KV store: keys and values in one pool of tokens, read by the kernels of `kernels.decode`.

The common prefix of all prompts is stored once, a prompt once for all its samples, and each row's own tokens at its
place. While decoding, each of them is read once for all the rows that share it. Nothing here waits for the device, and
all addresses are fixed, so that a CUDA graph can replay a step.

Legend: R rows, N tokens of a pass, P tokens of the pool, T tiles, Q queries a tile, L layers, G key/value heads,
D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flatout.kernels.decode import FULL, LEAST, Partial, Tiles, keep, per_tile, read, reading_rows
from flatout.kernels.launch import cdiv
from flatout.model import Decoder
from flatout.sample.cache import logits_after, passes
from flatout.sample.request import Prompt

# The most prompt tokens in one prefill pass: each pass waits for the one before.
READ_TOKENS = 32_768


class Ranges:
    """Free ranges of a pool, first fit."""

    def __init__(self, start: int, length: int) -> None:
        self._free = [(start, length)]

    def take(self, length: int) -> int | None:
        for i, (start, room) in enumerate(self._free):
            if room >= length:
                self._free[i : i + 1] = [(start + length, room - length)] if room > length else []
                return start
        return None

    def give(self, start: int, length: int) -> None:
        joined: list[tuple[int, int]] = []
        for begin, room in sorted([*self._free, (start, length)]):
            if joined and sum(joined[-1]) == begin:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((begin, room))
        self._free = joined


@dataclass
class _Held:
    """A prompt in the pool, and the number of rows that use it."""

    start: int
    length: int
    rows: int


class Pool:
    """A `Store` in one pool. Its first `rows` x `own` tokens are for generated tokens, the rest is for prompts."""

    gaps = True

    def __init__(self, model: Decoder, *, rows: int, own: int, prompts: int, samples: int) -> None:
        """Holds `own` tokens of each row and `prompts` tokens of all prompts, with this many samples of each."""
        shape, device, dtype = model.shape, model.embedding.device, model.compute_dtype
        self.model, self.rows, self.own, self.full_layers = model, rows, own, shape.full_layers
        size = (shape.layers, shape.kv_heads, rows * own + prompts, shape.head_dim)
        # Zeros, because masked values are multiplied by zero and must stay finite.
        self.k_LGPD, self.v_LGPD = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
        self.capacity = prompts
        self._groups = shape.heads // shape.kv_heads
        self._partial = Partial.make(queries=rows, heads=shape.heads, head_dim=shape.head_dim, device=device)
        index = torch.arange(rows, device=device)
        self._begin_R = torch.zeros(rows, dtype=torch.long, device=device)  # where a row's own tokens begin
        self._slot_R = index * own
        self._own = Tiles(
            queries_TQ=index[:, None].to(torch.int32),
            seen_TQ=torch.ones(rows, 1, dtype=torch.int32, device=device),
            starts_T=self._slot_R,
        )
        sizes = {per_tile(self._groups, LEAST), per_tile(self._groups, FULL)}
        self._tables = {size: _no_tiles(rows, size, device) for size in sizes}
        self.tile_for(samples)
        wide = per_tile(self._groups, FULL)
        all_rows = torch.full((cdiv(rows, wide) * wide,), -1, dtype=torch.int32, device=device)
        all_rows[:rows] = index.to(torch.int32)
        self._everybody = Tiles(
            queries_TQ=all_rows.view(-1, wide),
            seen_TQ=torch.zeros(cdiv(rows, wide), wide, dtype=torch.int32, device=device),
            starts_T=torch.zeros(cdiv(rows, wide), dtype=torch.long, device=device),
        )
        self.clear()

    def fits(self, *, rows: int, own: int, prompts: int) -> bool:
        return self.rows >= rows and self.own >= own and self.capacity >= prompts

    def tile_for(self, samples: int) -> None:
        self.per_tile = _per_prompt(self._groups, samples)
        self._prompts = self._tables[self.per_tile]

    @property
    def layout(self) -> tuple[int, ...]:
        """The common prefix, the size of the prompt tiles, and how many of them run.

        Of the prefix only whether there is one, unless there is a window: its tiles then begin behind the prefix.
        """
        prefix = int(self.shared > 0) if self.model.shape.window is None else self.shared
        return prefix, self.per_tile, self._tiles

    def clear(self) -> None:
        """Removes all rows and prompts."""
        self.shared = 0
        self._ranges = Ranges(self.rows * self.own, self.capacity)
        self._held: dict[int, _Held] = {}  # by place
        self._shared_start = 0
        self._tiles = 1

    # Reading

    def share(self, ids: Prompt) -> None:
        self.clear()
        if not ids:
            return
        start = self._ranges.take(len(ids))
        assert start is not None, "the pool is large enough for it"
        self._read([ids], [start])
        self.shared, self._shared_start = len(ids), start
        self._everybody.seen_TQ.copy_(self.shared * (self._everybody.queries_TQ >= 0))
        self._everybody.starts_T.fill_(start)

    def admit(self, prompts: Sequence[Prompt], places: Sequence[Sequence[int]]) -> Tensor:
        starts: list[int] = []
        for prompt, many in zip(prompts, places, strict=True):
            start = self._ranges.take(len(prompt))
            if start is None:
                break
            starts.append(start)
            held = _Held(start=start, length=len(prompt), rows=len(many))
            self._held |= dict.fromkeys(many, held)
        admitted = prompts[: len(starts)]
        if not admitted:
            vocab = self.model.head_weight.shape[0]
            return torch.empty(0, vocab, device=self._begin_R.device)
        found = self._read(admitted, starts)
        self._set_begin(
            [
                (place, self.shared + len(prompt))
                for prompt, many in zip(admitted, places, strict=False)
                for place in many
            ]
        )
        self._lay_out()
        return found

    def _read(self, prompts: Sequence[Prompt], starts: Sequence[int]) -> Tensor:
        """Prefills prompts into the pool after their common prefix. Returns the logits after each."""
        ended: list[Tensor] = []
        for part in passes([len(prompt) for prompt in prompts], READ_TOKENS):
            attend = _PrefillAttend(self, [(starts[i], begin, end) for i, begin, end in part])
            ids = [token for i, begin, end in part for token in prompts[i][begin:end]]
            tokens = torch.tensor(ids, device=self._begin_R.device)
            last = [at for at, (i, _, end) in enumerate(part) if end == len(prompts[i])]
            ended.append(logits_after(self.model, tokens, attend.positions_N, attend, attend.last_R[last]))
        return torch.cat(ended)

    # Writing

    def decode(self, token_R: Tensor, position_R: Tensor) -> Tensor:
        attend = _DecodeAttend(self, position_R)
        return logits_after(self.model, token_R, position_R, attend, attend.rows_R)

    def within(self, ranges: list[Tiles], position_N: Tensor, begins: Sequence[Tensor | int]) -> list[Tiles]:
        """The ranges, which begin at these positions, in layers with a sliding window; the same without one."""
        window = self.model.shape.window
        if window is None:
            return ranges
        return [tiles.within(window, position_N, begin) for tiles, begin in zip(ranges, begins, strict=True)]

    # Places

    def move(self, source: Sequence[int], to: Sequence[int]) -> None:
        # Rows exchange their slots; the tokens are not copied.
        pair = torch.tensor([list(source), list(to)], device=self._begin_R.device)
        self._slot_R[pair.flatten()] = self._slot_R[pair.flip(0).flatten()]
        self._begin_R[pair[1]] = self._begin_R[pair[0]]
        for before, after in zip(source, to, strict=True):
            self._held[after] = self._held.pop(before)
        self._lay_out()

    def release(self, places: Sequence[int]) -> None:
        for place in places:
            held = self._held.pop(place)
            held.rows -= 1
            if held.rows == 0:
                self._ranges.give(held.start, held.length)

    def _set_begin(self, rows: Sequence[tuple[int, int]]) -> None:
        places, begins = torch.tensor(rows, device=self._begin_R.device).t()
        self._begin_R[places] = begins

    def _lay_out(self) -> None:
        """Assigns tiles to the rows that share a prompt. Ended rows have no tile: they read only their own tokens."""
        together: dict[int, tuple[_Held, list[int]]] = {}
        for place, held in sorted(self._held.items()):
            together.setdefault(held.start, (held, []))[1].append(place)
        queries = np.full((self.rows, self.per_tile), -1, dtype=np.int32)
        seen = np.zeros((self.rows, self.per_tile), dtype=np.int32)
        starts = np.zeros(self.rows, dtype=np.int64)
        tile = 0
        for held, members in together.values():
            for first in range(0, len(members), self.per_tile):
                some = members[first : first + self.per_tile]
                queries[tile, : len(some)] = some
                seen[tile, : len(some)] = held.length
                starts[tile] = held.start
                tile += 1
        # Rounded up, so that there are few sizes. Not limited by the number of rows: live tiles may be beyond it.
        self._tiles = min(self.rows, 1 << max(0, tile - 1).bit_length())
        self._prompts.queries_TQ.copy_(torch.from_numpy(queries))
        self._prompts.seen_TQ.copy_(torch.from_numpy(seen))
        self._prompts.starts_T.copy_(torch.from_numpy(starts))


class _PrefillAttend:
    """The prefill `Attend`: each token attends to the common prefix, and to its own prompt up to itself."""

    def __init__(self, pool: Pool, parts: Sequence[tuple[int, int, int]]) -> None:
        """`parts` are (start of the prompt in the pool, first token, end) of each part."""
        self.pool = pool
        device = pool.k_LGPD.device
        wide = per_tile(pool._groups, reading_rows(pool.model.shape.head_dim, pool.k_LGPD.dtype))
        lengths = [end - begin for _, begin, end in parts]
        total = sum(lengths)
        tiles = sum(cdiv(length, wide) for length in lengths)
        queries = np.full((tiles, wide), -1, dtype=np.int32)
        seen = np.zeros((tiles, wide), dtype=np.int32)
        starts = np.zeros(tiles, dtype=np.int64)
        positions = np.concatenate([np.arange(begin, end) for _, begin, end in parts])
        places = np.concatenate([start + np.arange(begin, end) for start, begin, end in parts])
        tile = at = 0
        for start, begin, end in parts:
            for first in range(begin, end, wide):
                count = min(wide, end - first)
                queries[tile, :count] = np.arange(at, at + count)
                seen[tile, :count] = np.arange(first + 1, first + count + 1)
                starts[tile] = start
                tile, at = tile + 1, at + count
        own = _tiles(queries, seen, starts, device)
        self.ranges = [own]
        self.partial: Partial | None = None
        if pool.shared:
            common = _tiles(
                queries, np.where(queries >= 0, pool.shared, 0).astype(np.int32),
                np.full(tiles, pool._shared_start, dtype=np.int64), device,
            )  # fmt: skip
            self.ranges = [common, own]
            shape = pool.model.shape
            self.partial = Partial.make(queries=total, heads=shape.heads, head_dim=shape.head_dim, device=device)
        self.positions_N = torch.from_numpy(positions + pool.shared).to(device)
        begins: list[Tensor | int] = [0, pool.shared] if pool.shared else [0]
        self.within = pool.within(self.ranges, self.positions_N, begins)
        self.places_N = torch.from_numpy(places).to(device)
        self.last_R = torch.from_numpy(np.cumsum(lengths) - 1).to(device)
        self._layer = 0

    def __call__(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        k_GPD, v_GPD = self.pool.k_LGPD[self._layer], self.pool.v_LGPD[self._layer]
        ranges = self.ranges if self._layer < self.pool.full_layers else self.within
        self._layer += 1
        keep(k_NGD, v_NGD, k_GPD, v_GPD, self.places_N)
        return read(q_NHD, k_GPD, v_GPD, ranges, partial=self.partial)


class _DecodeAttend:
    """The decode `Attend` of one new token per row: the common prefix, its prompt, and its generated tokens."""

    def __init__(self, pool: Pool, position_R: Tensor) -> None:
        rows = position_R.shape[0]
        self.pool = pool
        self.rows_R = pool._own.queries_TQ[:rows, 0]
        # The index among its own tokens. An ended row does not advance, and may be at the end of its place.
        index_R = (position_R - pool._begin_R[:rows]).clamp(0, pool.own - 1)
        self.places_R = pool._slot_R[:rows] + index_R
        own = Tiles(
            queries_TQ=pool._own.queries_TQ[:rows],
            seen_TQ=(index_R + 1).to(torch.int32)[:, None],
            starts_T=pool._own.starts_T[:rows],
        )
        everybody = pool._everybody.first(cdiv(rows, pool._everybody.queries_TQ.shape[1]))
        self.ranges = [pool._prompts.first(pool._tiles), own]
        begins: list[Tensor | int] = [pool.shared, pool._begin_R[:rows, None]]
        if pool.shared:
            self.ranges.insert(0, everybody)
            begins.insert(0, 0)
        self.within = pool.within(self.ranges, position_R, begins)
        self._layer = 0

    def __call__(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        k_GPD, v_GPD = self.pool.k_LGPD[self._layer], self.pool.v_LGPD[self._layer]
        ranges = self.ranges if self._layer < self.pool.full_layers else self.within
        self._layer += 1
        keep(k_NGD, v_NGD, k_GPD, v_GPD, self.places_R)
        return read(q_NHD, k_GPD, v_GPD, ranges, partial=self.pool._partial)


def _per_prompt(groups: int, samples: int) -> int:
    """Queries per tile of rows that share a prompt: a small tile if there are few."""
    few = per_tile(groups, LEAST)
    return few if samples <= few else per_tile(groups, FULL)


def _tiles(queries: np.ndarray, seen: np.ndarray, starts: np.ndarray, device: torch.device) -> Tiles:
    return Tiles(
        queries_TQ=torch.from_numpy(queries).to(device),
        seen_TQ=torch.from_numpy(seen).to(device),
        starts_T=torch.from_numpy(starts).to(device),
    )


def _no_tiles(count: int, queries: int, device: torch.device) -> Tiles:
    return _tiles(
        np.full((count, queries), -1, dtype=np.int32),
        np.zeros((count, queries), dtype=np.int32),
        np.zeros(count, dtype=np.int64),
        device,
    )
