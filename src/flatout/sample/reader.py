"""The model used for generation: weights in the compute type, adapters merged, kernels attached.

A model that already has this form is used directly. Any other, such as a model in training, gets a copy that is
refreshed in place, so that its addresses stay.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from flatout.model import Block, Decoder
from flatout.model.lora import Adapter, meta_decoder
from flatout.model.nf4 import Nf4


class Reader:
    """`model` has the weights that `source` had at the last `refresh`."""

    def __init__(self, source: Decoder, *, kernels: bool) -> None:
        self.source = source
        self.model = source if not kernels or _ready(source) else _plain_copy(source)
        if kernels:
            _fuse(self.model)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        if self.model is self.source:
            return
        names = {name for name, _ in self.source.named_parameters()}
        for name, to in self.model.named_parameters():
            if name in names and not _adapted(self.source, name):
                to.copy_(self.source.get_parameter(name))
            else:
                to.copy_(_dense(self.source, name))


def _ready(model: Decoder) -> bool:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    plain = not any(block.adapters for block in _blocks(model)) and not any(
        isinstance(module, Nf4) for module in model.modules()
    )
    return plain and all(p.dtype == model.compute_dtype and not p.requires_grad for p in matrices)


def _plain_copy(model: Decoder) -> Decoder:
    copied = meta_decoder(model.shape, compute_dtype=model.compute_dtype)
    device = model.embedding.device
    for name, parameter in list(copied.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        dtype = model.compute_dtype if parameter.ndim > 1 else torch.float32
        value = torch.empty(parameter.shape, device=device, dtype=dtype)
        setattr(copied.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    copied.frequencies = model.frequencies
    return copied.eval()


def _adapted(model: Decoder, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    block = model.get_submodule(owner)
    return isinstance(block, Block) and leaf in block.adapters


def _dense(model: Decoder, name: str) -> Tensor:
    """A projection with its adapter merged, in fp32."""
    owner, _, leaf = name.rpartition(".")
    block = model.get_submodule(owner)
    assert isinstance(block, Block)
    weight: Tensor | Nf4 = getattr(block, leaf)
    dense = weight.dense(torch.float32) if isinstance(weight, Nf4) else weight.float()
    if leaf in block.adapters:
        adapter = block.adapters[leaf]
        assert isinstance(adapter, Adapter)
        a_RK, b_MR = adapter.matrices()
        dense = dense + adapter.scale * (b_MR.float() @ a_RK.float())
    return dense


def _blocks(model: Decoder) -> list[Block]:
    return [block for block in model.blocks if isinstance(block, Block)]


def _fuse(model: Decoder) -> None:
    """Attaches the segments' kernels if the model has none.

    The residual stream is kept in fp32 between blocks: its rounding causes most of the error of 16 bits in
    log-probabilities, and its memory is small compared with the cache.
    """
    from flatout.kernels import segments

    if model.norm_kernel is not None:
        return
    shape, eps, dtype = model.shape, model.shape.norm_eps, None
    # The rotation with norms supports only head widths that are powers of two.
    rotates = not shape.qk_norm or shape.head_dim & (shape.head_dim - 1) == 0
    if rotates:
        model.residual_dtype, dtype = torch.float32, model.compute_dtype
    for block in _blocks(model):
        if rotates:
            block.qkv_kernel = partial(
                segments.norm_qkv_rope, eps=eps, heads=shape.heads, groups=shape.kv_heads, dtype=dtype
            )
        block.mlp_kernel = partial(segments.norm_mlp, eps=eps, dtype=dtype)
    model.norm_kernel = partial(segments.norm, eps=eps, dtype=dtype)
