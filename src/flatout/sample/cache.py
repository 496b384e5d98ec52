"""The plain KV cache, on any device: each row has the keys and values of its whole sequence.

A prompt with several samples is prefilled once and its row copied; so is the common prefix of all prompts.

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

# The attended part of a cache grows in steps of this size, so that there are few shapes.
BLOCK = 64
# The most prompt tokens in one prefill pass.
READ_TOKENS = 8192


class Store(Protocol):
    """Stores the keys and values of rows. Rows have places, 0 to `rows` - 1."""

    @property
    def rows(self) -> int: ...
    @property
    def own(self) -> int | None:
        """The most tokens a row may generate, if that is fixed."""
        ...

    @property
    def shared(self) -> int:
        """The length of the common prefix of all prompts, as read by `share`."""
        ...

    @property
    def gaps(self) -> bool:
        """Whether places of ended rows may stay free among live ones."""
        ...

    @property
    def layout(self) -> tuple[int, ...]:
        """What a CUDA graph of a step has fixed; another layout needs its own graph."""
        ...

    def share(self, ids: Prompt) -> None:
        """Prefills the common prefix of all prompts, which is left out of the prompts given to `admit`."""
        ...

    def admit(self, prompts: Sequence[Prompt], places: Sequence[Sequence[int]]) -> Tensor:
        """Prefills each prompt once for all its places. Returns the logits after as many prompts as fit."""
        ...

    def decode(self, token_R: Tensor, position_R: Tensor) -> Tensor:
        """The logits after one more token in each of the first R rows."""
        ...

    def move(self, source: Sequence[int], to: Sequence[int]) -> None:
        """Moves rows to free places."""
        ...

    def release(self, places: Sequence[int]) -> None:
        """Frees the places of ended rows."""
        ...


def logits(hidden_NC: Tensor, weight_VC: Tensor) -> Tensor:
    """In fp32: above 16, where a trained model's likely tokens are, bf16 has a resolution of only an eighth."""
    weight_CV = weight_VC.to(hidden_NC.dtype).t()
    if hidden_NC.is_cuda and hidden_NC.dtype != torch.float32:
        out: Tensor = torch.mm(hidden_NC, weight_CV, out_dtype=torch.float32)
        return out
    return (hidden_NC @ weight_CV).float()


def logits_after(model: Decoder, tokens_N: Tensor, positions_N: Tensor, attend: Attend, at: Tensor) -> Tensor:
    """The logits after some of the tokens."""
    out: Tensor = model(tokens_N, positions_N, attend, lambda hidden_NC, weight_VC: logits(hidden_NC[at], weight_VC))
    return out


def passes(lengths: Sequence[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Splits prompts of these lengths into passes of at most `most` tokens: (prompt, from, to)."""
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
    window: int | None
    full_layers: int

    @classmethod
    def make(cls, shape: ModelShape, *, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> Cache:
        size = (shape.layers, rows, shape.kv_heads, length, shape.head_dim)
        # Zeros, because masked values are multiplied by zero and must stay finite.
        k, v = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
        return cls(k_LRGSD=k, v_LRGSD=v, window=shape.window, full_layers=shape.full_layers)

    @property
    def rows(self) -> int:
        return self.k_LRGSD.shape[1]

    @property
    def length(self) -> int:
        return self.k_LRGSD.shape[3]

    def copy(self, source: Sequence[int], to: Sequence[int], *, length: int) -> None:
        """Copies the first `length` tokens of rows to other rows."""
        if source:
            for store in (self.k_LRGSD, self.v_LRGSD):
                store[:, list(to), :, :length] = store[:, list(source), :, :length]


class Cached:
    """Each token attends to its row up to itself: a whole prompt, a part of one, or one new token.

    One pass of the model uses one of these. Blocks call it in order, so it counts the layers. Rows are a range of the
    cache. Prompts may have any lengths: only the attention is padded, no other part of the model.
    """

    def __init__(self, cache: Cache, *, first: int, lengths: Sequence[int], starts: Sequence[int], block: int) -> None:
        """Row `first + i` reads `lengths[i]` tokens from position `starts[i]`; `block` rounds the attended length."""
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
        # Padding queries attend to what the row's last one does, so that no softmax is over an empty set.
        at_RQ = starts_R[:, None] + torch.arange(self.width, device=device).clamp(max=counts[:, None] - 1)
        key_S = torch.arange(seen, device=device)
        self.mask_RQS = self.within_RQS = key_S <= at_RQ[:, :, None]
        if cache.window is not None:
            self.within_RQS = self.mask_RQS & (key_S > at_RQ[:, :, None] - cache.window)
        self._layer, self._full_layers = 0, cache.full_layers

    def __call__(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        k_RGSD, v_RGSD = self.k_LRGSD[self._layer], self.v_LRGSD[self._layer]
        mask_RQS = self.mask_RQS if self._layer < self._full_layers else self.within_RQS
        self._layer += 1
        k_RGSD[self.row_N, :, self.positions_N] = k_NGD
        v_RGSD[self.row_N, :, self.positions_N] = v_NGD
        rows, kv_heads, _, head_dim = k_RGSD.shape
        heads = q_NHD.shape[1]
        # The heads of a group become additional queries: no backend needs grouped heads, and no key is copied.
        groups = heads // kv_heads
        q_RQHD = q_NHD.new_zeros(rows, self.width, heads, head_dim)
        q_RQHD[self.row_N, self.offset_N] = q_NHD
        q = q_RQHD.view(rows, self.width, kv_heads, groups, head_dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
        mask = mask_RQS.repeat_interleave(groups, dim=1)[:, None]
        out = F.scaled_dot_product_attention(q, k_RGSD, v_RGSD, attn_mask=mask)
        out_RQHD: Tensor = out.unflatten(2, (self.width, groups)).permute(0, 2, 1, 3, 4).flatten(2, 3)
        return out_RQHD[self.row_N, self.offset_N]


class Rows:
    """A `Store` on a cache, whose extra last row holds the common prefix of all prompts. Live rows have no gaps."""

    gaps = False
    own: int | None = None
    layout: tuple[int, ...] = ()  # never used with CUDA graphs

    def __init__(self, model: Decoder, cache: Cache, *, rows: int) -> None:
        self.model, self.cache, self.rows = model, cache, min(rows, cache.rows - 1)
        self.shared = 0
        self._length = 0  # the longest row so far

    def share(self, ids: Prompt) -> None:
        if ids:
            self._read([ids], first=self.rows, start=0)
        self.shared = len(ids)

    def admit(self, prompts: Sequence[Prompt], places: Sequence[Sequence[int]]) -> Tensor:
        """Each prompt is prefilled in one of the first free places, which are adjacent, and copied from there."""
        first, shared = places[0][0], self.shared
        readers = range(first, first + len(prompts))
        if shared:
            self.cache.copy([self.rows] * len(prompts), readers, length=shared)
        found = self._read(prompts, first=first, start=shared)
        longest = shared + max(map(len, prompts))
        # Copied from the last to the first, because a copy may overwrite a later prompt, never an earlier one.
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

    def release(self, places: Sequence[int]) -> None:
        pass

    def _read(self, prompts: Sequence[Prompt], *, first: int, start: int) -> Tensor:
        """Prefills prompts in adjacent rows from `first`, each from position `start`. Returns the logits after each."""
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
