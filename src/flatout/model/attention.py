"""Attention over token-flat inputs. The decoder is token-flat; an `Attend` handles the layout.

With a `window`, a token attends to that many tokens, itself included. Layers without a window and layers with one are
combined by `Sliding`.

Legend: N tokens of the micro-batch, B sequences of T tokens, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from flatout.cost import ModelShape

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


def causal(length: int, *, window: int | None, device: torch.device) -> Tensor:
    """Which keys (columns) each query (row) of a sequence attends to."""
    mask_TT = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask_TT if window is None else mask_TT.triu(1 - window)


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


def _past(length: int, window: int | None, device: torch.device) -> dict[str, Any]:
    """What makes an attention causal; only a window that is shorter than the sequence needs a mask."""
    if window is None or window >= length:
        return {"is_causal": True}
    return {"attn_mask": causal(length, window=window, device=device)}


@dataclass(frozen=True, kw_only=True)
class Rectangular:
    """Sequences of one length, each attending to its own past: plain concatenated data.

    `repeat_kv` is for backends without grouped heads. A window is a mask: `Varlen` has a kernel for it.
    """

    batch: int
    repeat_kv: bool = False
    window: int | None = None

    def __call__(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        if self.repeat_kv:
            k_NGD, v_NGD = grouped(q_NHD, k_NGD, v_NGD)
        out = F.scaled_dot_product_attention(
            _sequences(q_NHD, self.batch),
            _sequences(k_NGD, self.batch),
            _sequences(v_NGD, self.batch),
            **_past(q_NHD.shape[0] // self.batch, self.window, q_NHD.device),
            enable_gqa=q_NHD.shape[1] != k_NGD.shape[1],
        )
        flat: Tensor = _WithoutGaps.apply(_flat(out))  # type: ignore[no-untyped-call]
        return flat


@dataclass(frozen=True, kw_only=True)
class Masked:
    """Packed documents with an explicit mask: the plain path, on any device and in any precision."""

    mask_B1TT: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, *, batch: int, length: int, window: int | None = None) -> Masked:
        """From cumulative document ends; no document crosses a sequence."""
        index = torch.arange(batch * length, device=cu_seqlens.device)
        document = torch.bucketize(index, cu_seqlens[1:], right=True).view(batch, length)
        same = document[:, :, None] == document[:, None, :]
        return cls(mask_B1TT=(same & causal(length, window=window, device=same.device))[:, None])

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
    """Packed documents as a padded batch. Causal attention ignores the padding at the end, which needs no mask."""

    places_N: Tensor
    documents: int
    longest: int
    window: int | None = None
    packed_rows: int | None = None  # the equal rows that the documents fill, if a model may also take those

    @classmethod
    def of(
        cls,
        cu_seqlens: Tensor,
        *,
        tokens: int,
        longest: int,
        trim: bool = False,
        window: int | None = None,
        packed_rows: int | None = None,
    ) -> Padded:
        """From cumulative document ends. `trim` drops empty documents, which on a GPU would mean a synchronization."""
        index = torch.arange(tokens, device=cu_seqlens.device)
        document = torch.bucketize(index, cu_seqlens[1:], right=True)
        documents = int((cu_seqlens < tokens).sum()) if trim else len(cu_seqlens) - 1
        places_N = document * longest + index - cu_seqlens[document]
        return cls(places_N=places_N, documents=documents, longest=longest, window=window, packed_rows=packed_rows)

    def __call__(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        size = self.documents * self.longest

        def apart(x: Tensor) -> Tensor:
            return _sequences(x.new_zeros(size, *x.shape[1:]).index_copy(0, self.places_N, x), self.documents)

        past = _past(self.longest, self.window, q_NHD.device)
        grouped_heads = q_NHD.shape[1] != k_NGD.shape[1]
        out = F.scaled_dot_product_attention(apart(q_NHD), apart(k_NGD), apart(v_NGD), **past, enable_gqa=grouped_heads)
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
    window: int | None = None

    def __call__(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if self.repeat_kv:
            k_NGD, v_NGD = grouped(q_NHD, k_NGD, v_NGD)
        ends, longest = self.cu_seqlens, self.longest
        before = -1 if self.window is None else self.window - 1
        out = varlen_attn(q_NHD, k_NGD, v_NGD, ends, ends, longest, longest, window_size=(before, 0), **_GROUPED)
        assert isinstance(out, Tensor)
        return out


def over_sequences(shape: ModelShape, *, batch: int) -> Attend:
    """The plain attention of a model over sequences of one length."""
    return _in_layers(shape, Rectangular(batch=batch))


def over_documents(shape: ModelShape, cu_seqlens: Tensor, *, tokens: int, longest: int) -> Attend:
    """The plain attention of a model over documents, which become rows."""
    return _in_layers(shape, Padded.of(cu_seqlens, tokens=tokens, longest=longest))


def _in_layers(shape: ModelShape, full: Rectangular | Padded) -> Attend:
    if shape.window is None:
        return full
    return Sliding(full=full, within=replace(full, window=shape.window), full_layers=shape.full_layers)


@dataclass(frozen=True, kw_only=True)
class Sliding:
    """The first layers attend to everything before a token, the others to a window of it."""

    full: Attend
    within: Attend
    full_layers: int

    def in_layer(self, layer: int) -> Attend:
        return self.full if layer < self.full_layers else self.within

    def __call__(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        raise AssertionError("a model with a sliding window asks for the attention of each layer")
