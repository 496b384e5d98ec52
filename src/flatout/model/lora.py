"""LoRA: frozen weights, with a pair of small trainable matrices for each projection (`lora:` in a configuration).

An adapter belongs to one of our fused projections and has one pair per sub-projection, so that PEFT's files, which
have only q, k, v, can be read and written. The A matrices of one input are stacked, so that one matmul is enough. The
result equals W x + scale B (A x), see `kernels.lowrank`.

A bank has several named adapters on one base (recipe router): every token has a weight for each of them, so one pass
can hold the documents of many tasks, each through its own adapter or through a mix. Without weights, a bank is off.

Legend: N tokens, K inputs, M outputs, P sub-projections with an adapter, C = P x rank columns of one adapter,
E adapters, R = E x C.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.cost import Adapters, ModelShape, projections
from flatout.kernels import lowrank
from flatout.model import rope
from flatout.model.decoder import Block, Decoder, linear
from flatout.model.nf4 import Nf4, rebuilt

# Our fused projections and their sub-projections, in stacking order.
GROUPS = {"qkv": ("q", "k", "v"), "out": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


class Adapter(nn.Module):
    """The pairs of one fused projection."""

    def __init__(self, spec: Adapters, shape: ModelShape, *, group: str) -> None:
        super().__init__()
        widths = projections(shape)
        self.parts = [name for name in GROUPS[group] if name in spec.targets]
        # For each sub-projection: its rows in the fused one, and the index of its adapter, if any.
        self.layout = [
            (widths[name][1], self.parts.index(name) if name in self.parts else None) for name in GROUPS[group]
        ]
        self.rank, self.scale, self.dropout = spec.rank, spec.scale, spec.dropout
        self.names = spec.names
        # The weight stacked with these matrices, for the kernels; see `stack_weights`.
        self.stacked: lowrank.Stacked | None = None
        # The first dimension is that of the bank.
        self.a = nn.Parameter(torch.empty(spec.count, spec.rank * len(self.parts), widths[self.parts[0]][0]))
        self.b = nn.Parameter(torch.zeros(spec.count, sum(widths[name][1] for name in self.parts), spec.rank))

    def forward(self, x_NK: Tensor, weight: Tensor | Nf4, bias: Tensor | None, mix_NE: Tensor | None = None) -> Tensor:
        if self.is_off(mix_NE):
            return linear(x_NK, weight, bias)
        a_RK, b_MR = self.matrices()
        if self.dropout and torch.is_grad_enabled():
            between_NR = linear(F.dropout(x_NK, self.dropout), a_RK) * self.scale
            if mix_NE is not None:
                columns = mix_NE.repeat_interleave(a_RK.shape[0] // len(self.names), dim=1)
                between_NR = between_NR * columns.to(between_NR.dtype)
            return linear(x_NK, weight, bias) + linear(between_NR, b_MR)
        bias = None if bias is None else bias.to(x_NK.dtype)
        low = (bias, a_RK, b_MR, self.scale, mix_NE)
        if isinstance(weight, Nf4):
            out: Tensor = _Adapted.apply(x_NK, weight.codes, weight.scales, weight.shape, *low)  # type: ignore[no-untyped-call]
        else:
            out = _Adapted.apply(x_NK, weight, None, None, *low)  # type: ignore[no-untyped-call]
        return out

    def is_off(self, mix_NE: Tensor | None) -> bool:
        """A bank without weights for its adapters leaves the base as it is."""
        return bool(self.names) and mix_NE is None

    def matrices(self) -> tuple[Tensor, Tensor]:
        """The stacked A, and B as one matrix from all of A's rows to the whole output, block-sparse."""
        return self.a.flatten(0, 1), torch.cat([self._wide(b) for b in self.b], dim=1)

    def _wide(self, b: Tensor) -> Tensor:
        """B of one adapter as one matrix to the whole output."""
        if len(self.layout) == 1:
            return b
        pieces, begin, count = [], 0, len(self.parts)
        for rows, index in self.layout:
            if index is None:
                pieces.append(b.new_zeros(rows, count * self.rank))
            else:
                padding = (index * self.rank, (count - 1 - index) * self.rank)
                pieces.append(F.pad(b[begin : begin + rows], padding))
                begin += rows
        return torch.cat(pieces)

    def pairs(self, which: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
        """(A, B) of each sub-projection, as views; of one adapter of a bank."""
        rows = [rows for rows, index in self.layout if index is not None]
        a, b = self.a[which].split(self.rank), self.b[which].split(rows)
        return dict(zip(self.parts, zip(a, b, strict=True), strict=True))


class _Adapted(torch.autograd.Function):
    """Keeps the input and the product with A. The frozen weight gets no gradient and is not copied."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scales: Tensor | None, shape: torch.Size | None, bias: Tensor | None,
        a: Tensor, b: Tensor, scale: float, mix: Tensor | None,
    ) -> Tensor:  # fmt: skip
        cast = lowrank.cast(a, b, scale, x.dtype)
        learns = ctx.needs_input_grad[-1]
        mixed = None if mix is None else lowrank.Mixed(mix, columns=len(a), dtype=x.dtype, learns=learns)
        y, between = lowrank.forward(x, _dense(weight, scales, shape, x.dtype), bias, *cast, mixed=mixed)
        ctx.save_for_backward(x, between, weight, scales, a, b, mix, mixed.raw if mixed else None)
        ctx.shape, ctx.scale = shape, scale
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, between, weight, scales, a, b, mix, raw = ctx.saved_tensors
        dense = _dense(weight, scales, ctx.shape, dy.dtype)
        r, cast = len(a), lowrank.cast(a, b, ctx.scale, x.dtype)
        mixed = None if mix is None else lowrank.Mixed(mix, columns=r, dtype=x.dtype)
        dx, d_a, d_b, d_mix = lowrank.backward(dy, x, between, dense, *cast, a.dtype, mixed=mixed, raw=raw)
        return dx, None, None, None, None, d_a[:r], d_b[:, :r] * ctx.scale, None, d_mix


def _dense(weight: Tensor, scales: Tensor | None, shape: torch.Size | None, dtype: torch.dtype) -> Tensor:
    if scales is None or shape is None:
        return weight.to(dtype)
    return rebuilt(weight, scales, dtype).view(shape)


def meta_decoder(shape: ModelShape, *, compute_dtype: torch.dtype) -> Decoder:
    """A decoder whose weights take no memory until `freeze` loads or initialises them, one at a time."""
    with torch.device("meta"):
        model = Decoder(shape, compute_dtype=compute_dtype)
    model.frequencies = rope.frequencies(shape)
    return model


@torch.no_grad()
def freeze(
    model: Decoder,
    *,
    device: torch.device,
    base_bits: int,
    seed: int,
    fill: Callable[[str, Tensor], None] | None = None,
) -> None:
    """Moves every weight to the device and freezes it, matrices in the compute type or 4 bits.

    One at a time, so that no memory ever holds more than the result. Weights that do not exist yet are filled by
    `fill` (see `weights.filler`), already in their final type; without it they are randomly initialised.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    make = fill or partial(model.draw_, generator=generator)
    model.frequencies = model.frequencies.to(device)
    for name, parameter in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        leaf = name.rpartition(".")[2]
        dtype = model.compute_dtype if parameter.ndim > 1 else torch.float32
        if parameter.is_meta:
            value = torch.empty(parameter.shape, device=device, dtype=dtype)
            make(name, value)
        else:
            value = parameter.detach().to(device, dtype)
        if base_bits == 4 and isinstance(owner, Block) and value.ndim == 2:
            delattr(owner, leaf)
            setattr(owner, leaf, Nf4.of(value))
        else:
            setattr(owner, leaf, nn.Parameter(value, requires_grad=False))


@torch.no_grad()
def attach(model: Decoder, spec: Adapters, *, seed: int) -> None:
    """Adds adapters to the frozen model: A random as in PEFT, B zero, so that nothing changes before the first step."""
    device = model.embedding.device
    generator = torch.Generator(device=device).manual_seed(seed)
    for block in model.blocks:
        assert isinstance(block, Block)
        for group, parts in GROUPS.items():
            if any(name in spec.targets for name in parts):
                adapter = Adapter(spec, model.shape, group=group).to(device)
                bound = adapter.a.shape[-1] ** -0.5
                adapter.a.uniform_(-bound, bound, generator=generator)
                block.adapters[group] = adapter


@torch.no_grad()
def stack_weights(block: Block, *groups: str) -> None:
    """Stacks the frozen weights of these projections with their adapters in memory, as the kernels need them."""
    for group in groups:
        if group in block.adapters:
            adapter, weight = block.adapters[group], getattr(block, group)
            assert isinstance(adapter, Adapter)
            adapter.stacked = lowrank.Stacked(
                weight, adapter.layout, rank=adapter.rank, scale=adapter.scale, count=len(adapter.a)
            )
            setattr(block, group, nn.Parameter(adapter.stacked.weight, requires_grad=False))


def adapters(model: Decoder, which: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, B) of every adapted projection, by `layer.target`, as views; of one adapter of a bank."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        for adapter in block.adapters.values():
            assert isinstance(adapter, Adapter)
            found |= {f"{i}.{name}": pair for name, pair in adapter.pairs(which).items()}
    return found


def names_of(model: Decoder) -> tuple[str, ...]:
    """The names of a bank's adapters; none for a plain model or a single adapter."""
    block = model.blocks[0]
    assert isinstance(block, Block)
    adapter = next(iter(block.adapters.values()), None)
    return adapter.names if isinstance(adapter, Adapter) else ()


def alone(model: Decoder, which: int | None) -> Decoder:
    """The same weights with one adapter of the bank, or none, as a plain model: for sampling and merging."""
    plain = copy.copy(model)
    plain._modules = dict(model._modules)
    plain.router = None
    plain.blocks = nn.ModuleList(copy.copy(block) for block in model.blocks)
    for block in plain.blocks:
        assert isinstance(block, Block)
        bank, block._modules = block.adapters, dict(block._modules)
        block.adapters = nn.ModuleDict() if which is None else nn.ModuleDict(dict(_one(bank, which)))
    return plain


def _one(bank: nn.ModuleDict, which: int) -> Iterator[tuple[str, Adapter]]:
    for group, adapter in bank.items():
        assert isinstance(adapter, Adapter)
        one = copy.copy(adapter)
        one._parameters = {
            name: nn.Parameter(values.detach()[which : which + 1], requires_grad=False)
            for name, values in adapter.named_parameters()
        }
        one.names, one.stacked = (), None
        yield group, one


@torch.no_grad()
def merge(model: Decoder) -> None:
    """Merges every adapter into its weight, in fp32, and removes it: the result is an equivalent plain model."""
    for block in model.blocks:
        assert isinstance(block, Block)
        for group in list(block.adapters):
            adapter = block.adapters[group]
            assert isinstance(adapter, Adapter)
            assert not adapter.names, "one adapter of a bank is merged, see `alone`"
            a_RK, b_MR = adapter.matrices()
            weight = getattr(block, group)
            dense = weight.dense(torch.float32) if isinstance(weight, Nf4) else weight.detach().float()
            delattr(block, group)
            setattr(block, group, nn.Parameter(dense + adapter.scale * (b_MR @ a_RK), requires_grad=False))
            del block.adapters[group]
        for group in GROUPS:
            if isinstance(weight := getattr(block, group), Nf4):
                delattr(block, group)
                setattr(block, group, nn.Parameter(weight.dense(torch.float32), requires_grad=False))
