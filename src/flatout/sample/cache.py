"""Keys and values of what was read so far, and the `Attend` that reads and extends them.

Everything has a fixed address and shapes that the caller chooses, so that a CUDA graph can replay a step.

Legend: R rows (one sequence each), S tokens a row can hold, N tokens of this pass, Q the most of them in one row,
H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.cost import ModelShape


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
