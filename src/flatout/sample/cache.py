"""Keys and values of rows in flight, each row with all it has read: the plain store, on any device.

A prompt with several samples is read once and its row copied; so is what all prompts begin with.

Legend: R rows (one sequence each), S tokens a row can hold, N tokens of this pass, Q the most of them in one row,
H query heads, G key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.cost import ModelShape
from flatout.model import Attend, Decoder
from flatout.sample.request import Prompt

# What is looked at of a cache grows in such steps, so that there are few shapes.
BLOCK = 64
# Most tokens of prompts that are read in one pass.
READ_TOKENS = 8192


class Store(Protocol):
    """Where rows keep what they have read. Rows have places, 0 to `rows` - 1."""

    @property
    def rows(self) -> int: ...
    @property
    def own(self) -> int | None:
        """Tokens a row may write, if that is fixed."""
        ...

    @property
    def shared(self) -> int:
        """Tokens that every prompt begins with, as read by `share`."""
        ...

    @property
    def holes(self) -> bool:
        """Whether rows that have ended may stand among others."""
        ...

    @property
    def layout(self) -> tuple[int, ...]:
        """What a recorded step of so many rows has fixed; another needs a recording of its own."""
        ...

    def share(self, ids: Prompt) -> None:
        """What every prompt begins with: read here, and left out of the prompts that are admitted."""
        ...

    def admit(self, prompts: Sequence[Prompt], places: Sequence[Sequence[int]]) -> Tensor:
        """Reads each prompt once for all its places; the logits after as many of them as there was room for."""
        ...

    def decode(self, token_R: Tensor, position_R: Tensor) -> Tensor:
        """The logits after one more token of each of the first R rows."""
        ...

    def move(self, source: Sequence[int], to: Sequence[int]) -> None:
        """Rows to other places, whose rows have ended."""
        ...

    def leave(self, places: Sequence[int]) -> None:
        """Rows that have ended."""
        ...


def logits(hidden_NC: Tensor, weight_VC: Tensor) -> Tensor:
    """In fp32: beyond 16, where a trained model's likely tokens are, bf16 knows steps of an eighth only."""
    weight_CV = weight_VC.to(hidden_NC.dtype).t()
    if hidden_NC.is_cuda and hidden_NC.dtype != torch.float32:
        out: Tensor = torch.mm(hidden_NC, weight_CV, out_dtype=torch.float32)
        return out
    return (hidden_NC @ weight_CV).float()


def logits_after(model: Decoder, tokens_N: Tensor, positions_N: Tensor, attend: Attend, at: Tensor) -> Tensor:
    """Of some of the tokens."""
    out: Tensor = model(tokens_N, positions_N, attend, lambda hidden_NC, weight_VC: logits(hidden_NC[at], weight_VC))
    return out


def passes(lengths: Sequence[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Prompts of such lengths in parts of so many tokens together: (prompt, from, to); long ones in several."""
    part: list[tuple[int, int, int]] = []
    room = most
    for i, length in enumerate(lengths):
        start = 0
        while start < length:
            end = min(length, start + room)
            part.append((i, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield part
                part, room = [], most
    if part:
        yield part


@dataclass(frozen=True, kw_only=True)
class Cache:
    k_LRGSD: Tensor
    v_LRGSD: Tensor

    @classmethod
    def make(cls, shape: ModelShape, *, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> Cache:
        size = (shape.layers, rows, shape.kv_heads, length, shape.head_dim)
        # Zeros: what is masked counts nothing, and nothing times zero must stay a number.
        k, v = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
        return cls(k_LRGSD=k, v_LRGSD=v)

    @property
    def rows(self) -> int:
        return self.k_LRGSD.shape[1]

    @property
    def length(self) -> int:
        return self.k_LRGSD.shape[3]

    def copy(self, source: Sequence[int], to: Sequence[int], *, length: int) -> None:
        """The first `length` tokens of rows to other rows."""
        if source:
            for store in (self.k_LRGSD, self.v_LRGSD):
                store[:, list(to), :, :length] = store[:, list(source), :, :length]


class Cached:
    """Each token sees what its row has read, itself included: a whole prompt, a part of one, or one new token.

    One pass of the model uses one of these; blocks call it in order, and so it knows the layer. Rows are a range of
    the cache. Prompts may be of any lengths: only the attention is padded, and nothing else of the model.
    """

    def __init__(self, cache: Cache, *, first: int, lengths: Sequence[int], starts: Sequence[int], block: int) -> None:
        """Row `first + i` reads `lengths[i]` tokens from position `starts[i]` on; `block` rounds what is looked at."""
        device = cache.k_LRGSD.device
        rows, self.width = len(lengths), max(lengths)
        counts = torch.tensor(lengths, device=device)
        self.row_N = torch.arange(rows, device=device).repeat_interleave(counts)
        ends = counts.cumsum(0)
        self.offset_N = torch.arange(int(sum(lengths)), device=device) - (ends - counts)[self.row_N]
        starts_R = torch.tensor(starts, device=device)
        self.positions_N = starts_R[self.row_N] + self.offset_N
        self.last_R = ends - 1
        longest = max(start + length for start, length in zip(starts, lengths, strict=True))
        seen = min(cache.length, -(-longest // block) * block)
        self.k_LRGSD = cache.k_LRGSD[:, first : first + rows, :, :seen]
        self.v_LRGSD = cache.v_LRGSD[:, first : first + rows, :, :seen]
        at_RQ = starts_R[:, None] + torch.arange(self.width, device=device)
        # Places beyond a row's own tokens see them too: unused, and never a row without anything to see.
        self.mask_RQS = torch.arange(seen, device=device) <= at_RQ[:, :, None]
        self._layer = 0

    def __call__(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        k_RGSD, v_RGSD = self.k_LRGSD[self._layer], self.v_LRGSD[self._layer]
        self._layer += 1
        k_RGSD[self.row_N, :, self.positions_N] = k_NGD
        v_RGSD[self.row_N, :, self.positions_N] = v_NGD
        rows, kv_heads, _, head_dim = k_RGSD.shape
        heads = q_NHD.shape[1]
        # The heads of a group stand beside each other as further queries: no backend has to know groups, and no
        # key is copied.
        groups = heads // kv_heads
        q_RQHD = q_NHD.new_zeros(rows, self.width, heads, head_dim)
        q_RQHD[self.row_N, self.offset_N] = q_NHD
        q = q_RQHD.view(rows, self.width, kv_heads, groups, head_dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
        mask = self.mask_RQS.repeat_interleave(groups, dim=1)[:, None]
        out = F.scaled_dot_product_attention(q, k_RGSD, v_RGSD, attn_mask=mask)
        out_RQHD: Tensor = out.unflatten(2, (self.width, groups)).permute(0, 2, 1, 3, 4).flatten(2, 3)
        return out_RQHD[self.row_N, self.offset_N]


class Rows:
    """A `Store` on a cache, whose row after the last holds what all prompts begin with. Rows stand without holes."""

    holes = False
    own: int | None = None
    layout: tuple[int, ...] = ()  # never recorded

    def __init__(self, model: Decoder, cache: Cache, *, rows: int) -> None:
        self.model, self.cache, self.rows = model, cache, min(rows, cache.rows - 1)
        self.shared = 0
        self._length = 0  # the longest row so far

    def share(self, ids: Prompt) -> None:
        if ids:
            self._read([ids], first=self.rows, start=0)
        self.shared = len(ids)

    def admit(self, prompts: Sequence[Prompt], places: Sequence[Sequence[int]]) -> Tensor:
        """Readers stand side by side, so each prompt is read at one of the first places and copied from there."""
        first, shared = places[0][0], self.shared
        readers = range(first, first + len(prompts))
        if shared:
            self.cache.copy([self.rows] * len(prompts), readers, length=shared)
        found = self._read(prompts, first=first, start=shared)
        longest = shared + max(map(len, prompts))
        # From the last on: a copy may stand where a later prompt was read, never an earlier one.
        for reader, many in reversed(list(zip(readers, places, strict=True))):
            others = [place for place in many if place != reader]
            self.cache.copy([reader] * len(others), others, length=longest)
        self._length = max(self._length, longest)
        return found

    def decode(self, token_R: Tensor, position_R: Tensor) -> Tensor:
        starts = position_R.tolist()
        self._length = max([self._length, *(start + 1 for start in starts)])
        attend = Cached(self.cache, first=0, lengths=[1] * len(starts), starts=starts, block=BLOCK)
        return logits_after(self.model, token_R, position_R, attend, attend.last_R)

    def move(self, source: Sequence[int], to: Sequence[int]) -> None:
        self.cache.copy(source, to, length=self._length)

    def leave(self, places: Sequence[int]) -> None:
        pass

    def _read(self, prompts: Sequence[Prompt], *, first: int, start: int) -> Tensor:
        """Prompts side by side from row `first` on, each going on at position `start`; the logits after each."""
        ended: list[Tensor] = []
        for part in passes([len(prompt) for prompt in prompts], READ_TOKENS):
            lengths = [end - begin for _, begin, end in part]
            starts = [start + begin for _, begin, _ in part]
            attend = Cached(self.cache, first=first + part[0][0], lengths=lengths, starts=starts, block=BLOCK)
            ids = [token for i, begin, end in part for token in prompts[i][begin:end]]
            tokens = torch.tensor(ids, device=self.model.embedding.device)
            last = [at for at, (i, _, end) in enumerate(part) if end == len(prompts[i])]
            ended.append(logits_after(self.model, tokens, attend.positions_N, attend, attend.last_R[last]))
        return torch.cat(ended)
