"""Attention over token-flat inputs. The decoder is token-flat; an `Attend` handles the layout.

Legend: N tokens of the micro-batch, B sequences of T tokens, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

# The variable-length kernel supports grouped heads; from torch 2.12 they must be enabled.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if TorchVersion(torch.__version__) >= "2.12" else {}


class Attend(Protocol):
    """Causal attention over token-flat q, k, v; the result is flat again."""

    def __call__(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor: ...


def _sequences(x_NHD: Tensor, batch: int) -> Tensor:
    return x_NHD.view(batch, -1, *x_NHD.shape[1:]).transpose(1, 2)


def grouped(q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values repeated to one per query head, for kernels without grouped heads."""
    groups = q_NHD.shape[1] // k_NGD.shape[1]
    if groups == 1:
        return k_NGD, v_NGD
    return k_NGD.repeat_interleave(groups, dim=1), v_NGD.repeat_interleave(groups, dim=1)


def _flat(x_BHTD: Tensor) -> Tensor:
    return x_BHTD.transpose(1, 2).flatten(0, 1)


class _WithoutGaps(torch.autograd.Function):
    """Closes the gaps between rows of a gradient.

    cuDNN's backward pass is built for one layout of the gradient but cached by the layout of everything else, so in one
    process a gradient with gaps, as adapters give it, would break those without: torch 2.11 does not check this.
    """

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, d: Tensor) -> Tensor:
        return d.contiguous()


@dataclass(frozen=True, kw_only=True)
class Rectangular:
    """Sequences of one length, each attending to its own past: plain concatenated data.

    `repeat_kv` is for backends without grouped heads.
    """

    batch: int
    repeat_kv: bool = False

    def __call__(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        if self.repeat_kv:
            k_NGD, v_NGD = grouped(q_NHD, k_NGD, v_NGD)
        out = F.scaled_dot_product_attention(
            _sequences(q_NHD, self.batch),
            _sequences(k_NGD, self.batch),
            _sequences(v_NGD, self.batch),
            is_causal=True,
            enable_gqa=q_NHD.shape[1] != k_NGD.shape[1],
        )
        flat: Tensor = _WithoutGaps.apply(_flat(out))  # type: ignore[no-untyped-call]
        return flat


@dataclass(frozen=True, kw_only=True)
class Masked:
    """Packed documents with an explicit mask: the plain path, on any device and in any precision."""

    mask_B1TT: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, *, batch: int, length: int) -> Masked:
        """From cumulative document ends; no document crosses a sequence."""
        index = torch.arange(batch * length, device=cu_seqlens.device)
        document = torch.bucketize(index, cu_seqlens[1:], right=True).view(batch, length)
        same = document[:, :, None] == document[:, None, :]
        causal = torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
        return cls(mask_B1TT=(same & causal)[:, None])

    def __call__(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        batch = self.mask_B1TT.shape[0]
        out = F.scaled_dot_product_attention(
            _sequences(q_NHD, batch),
            _sequences(k_NGD, batch),
            _sequences(v_NGD, batch),
            attn_mask=self.mask_B1TT,
            enable_gqa=q_NHD.shape[1] != k_NGD.shape[1],
        )
        return _flat(out)


@dataclass(frozen=True, kw_only=True)
class Padded:
    """Packed documents as a padded batch. Causal attention ignores the padding at the end, so there is no mask."""

    places_N: Tensor
    documents: int
    longest: int

    @classmethod
    def of(cls, cu_seqlens: Tensor, *, tokens: int, longest: int, trim: bool = False) -> Padded:
        """From cumulative document ends. `trim` drops empty documents, which on a GPU would mean a synchronization."""
        index = torch.arange(tokens, device=cu_seqlens.device)
        document = torch.bucketize(index, cu_seqlens[1:], right=True)
        documents = int((cu_seqlens < tokens).sum()) if trim else len(cu_seqlens) - 1
        return cls(places_N=document * longest + index - cu_seqlens[document], documents=documents, longest=longest)

    def __call__(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        size = self.documents * self.longest

        def apart(x: Tensor) -> Tensor:
            return _sequences(x.new_zeros(size, *x.shape[1:]).index_copy(0, self.places_N, x), self.documents)

        out = F.scaled_dot_product_attention(
            apart(q_NHD), apart(k_NGD), apart(v_NGD), is_causal=True, enable_gqa=q_NHD.shape[1] != k_NGD.shape[1]
        )
        return _flat(out).index_select(0, self.places_N)


@dataclass(frozen=True, kw_only=True)
class Short:
    """Packed documents that are no longer than a tile, by our own kernel: see `kernels.documents`."""

    cu_seqlens: Tensor
    longest: int

    def __call__(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        from flatout.kernels import documents

        return documents.attend(q_NHD, k_NGD, v_NGD, self.cu_seqlens, self.longest)


@dataclass(frozen=True, kw_only=True)
class Varlen:
    """Packed documents by torch's variable-length flash kernel: bf16 or fp16 on CUDA.

    `cu_seqlens` is padded to a fixed length by repeating N (empty documents), so shapes never change.
    """

    cu_seqlens: Tensor
    longest: int
    repeat_kv: bool = False

    def __call__(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if self.repeat_kv:
            k_NGD, v_NGD = grouped(q_NHD, k_NGD, v_NGD)
        ends, longest = self.cu_seqlens, self.longest
        out = varlen_attn(q_NHD, k_NGD, v_NGD, ends, ends, longest, longest, window_size=(-1, 0), **_GROUPED)
        assert isinstance(out, Tensor)
        return out
