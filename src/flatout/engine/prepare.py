"""Prepares a plain decoder for training, in the required order: kernels, recompute, then compile."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flatout.config.settings import Recompute
from flatout.cost import SHORT_DOCUMENT
from flatout.data.stream import Batch
from flatout.engine.objective import HeadLoss
from flatout.engine.resolve import Active
from flatout.losses import RowLoss, capped, linear_cross_entropy, row_loss
from flatout.model import (
    Attend,
    Block,
    Decoder,
    Foreign,
    Masked,
    Model,
    Padded,
    Rectangular,
    Short,
    Sliding,
    Varlen,
    lora,
    nf4,
)

M = TypeVar("M", bound=nn.Module)

# Documents are padded to one length only if that multiplies their tokens by at most this: padding takes memory too.
MOST_PADDING = 2


def prepare(
    model: Model, *, active: Active, recompute: Recompute, loss_chunk: int
) -> tuple[HeadLoss, EightBits | None]:
    """Prepares the model in place. Returns its loss, and its 8-bit state if it has one."""
    if isinstance(model, Foreign):
        model.recompute(recompute)
        of_rows = _rows(active) if model.cap is None else capped(_rows(active), model.cap)
        return partial(linear_cross_entropy, chunk=loss_chunk, rows=of_rows), None
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    for block in blocks:
        block.recompute = recompute
    eight = EightBits(model, blocks, active) if active.fp8 else None
    rows: RowLoss = row_loss
    if active.fused_qkv or active.fused_mlp or active.fused_loss:
        rows = _fuse(model, blocks, active=active, eight=eight)
    if active.compile != "none":
        rows = _compile(model, blocks, active=active, rows=rows)
    plain = partial(linear_cross_entropy, chunk=loss_chunk, rows=rows)
    if eight is None or eight.head is None:
        return plain, eight
    return eight.loss(plain, chunk=loss_chunk), eight


def _fuse(model: Decoder, blocks: list[Block], *, active: Active, eight: EightBits | None) -> RowLoss:
    """Attaches the kernels to the model."""
    from flatout.kernels import segments

    shape = model.shape
    for i, block in enumerate(blocks):
        lora.stack_weights(
            block, *(["qkv"] if active.fused_qkv else []), *(["gate_up", "down"] if active.fused_mlp else [])
        )
        if active.fused_qkv:
            scales = None if eight is None else eight.qkv[i]
            block.qkv_kernel = partial(
                segments.norm_qkv_rope, eps=shape.norm_eps, heads=shape.heads, groups=shape.kv_heads, scales=scales
            )
        if active.fused_mlp:
            block.mlp_kernel = partial(
                segments.norm_mlp, eps=shape.norm_eps, scales=None if eight is None else eight.mlp[i]
            )
    if active.fused_mlp:
        model.norm_kernel = partial(segments.norm, eps=shape.norm_eps)
    return _rows(active)


def _rows(active: Active) -> RowLoss:
    if not active.fused_loss:
        return row_loss
    from flatout.kernels import rows

    return rows.cross_entropy_


def _compile(model: Decoder, blocks: list[Block], *, active: Active, rows: RowLoss) -> RowLoss:
    """Compiles everything that is not already a kernel."""
    torch.compiler.assume_constant_result(nf4.pairs)
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False}
    if active.compile == "max-autotune":
        options["mode"] = "max-autotune-no-cudagraphs"
    for block in blocks:
        # Compile a whole block, or the one segment of it that has no kernel.
        if not active.fused_qkv and not active.fused_mlp:
            block.compile(**options)
        elif not active.fused_qkv:
            block.norm_qkv_rope = torch.compile(block.norm_qkv_rope, **options)  # type: ignore[method-assign]
        elif not active.fused_mlp:
            block.norm_mlp = torch.compile(block.norm_mlp, **options)  # type: ignore[method-assign]
    model.enter = torch.compile(model.enter, **options)  # type: ignore[method-assign]
    if not active.fused_mlp:
        model.leave = torch.compile(model.leave, **options)  # type: ignore[method-assign]
    if active.fused_loss:
        return rows
    compiled: Callable[..., Any] = torch.compile(rows, **options)
    return compiled


def unprepared(model: Model) -> Model:
    """The same weights without the work of `prepare`, for shapes that training never has: prompts, single tokens."""
    if isinstance(model, Foreign):
        return model
    plain = _twin(model, Decoder)
    plain._modules = {name: module for name, module in model._modules.items() if name != "critic"}  # a router stays
    plain.blocks = nn.ModuleList(_twin(block, Block) for block in model.blocks)
    plain.norm_kernel = plain.residual_dtype = None
    for block in plain.blocks:
        assert isinstance(block, Block)
        block.recompute, block.qkv_kernel, block.mlp_kernel = "none", None, None
    # Compiled methods are instance attributes that shadow those of the class.
    for module in (plain, *plain.blocks):
        for name in ("enter", "leave", "norm_qkv_rope", "norm_mlp"):
            module.__dict__.pop(name, None)
        module._compiled_call_impl = None
    return plain


def _twin(module: nn.Module, kind: type[M]) -> M:
    """A second module with the same parameters, as they are gathered and sharded, but without the hooks of FSDP2."""
    twin = kind.__new__(kind)
    twin.__dict__.update(module.__dict__)
    twin._forward_pre_hooks, twin._forward_hooks = OrderedDict(), OrderedDict()
    return twin


class EightBits:
    """The scales and 8-bit weights of a model, brought up to date after every update."""

    def __init__(self, model: Decoder, blocks: list[Block], active: Active) -> None:
        from flatout.kernels import fp8, head, segments

        self._refresh = fp8.Weight.refresh
        forward, backward = fp8.FORWARD, fp8.BACKWARD
        kinds = [forward, backward, forward, forward, backward, backward]
        self.scales = fp8.Scales(kinds * len(blocks), active.device)
        self.qkv: list[Any] = []
        self.mlp: list[Any] = []
        self._weights: list[Tensor] = []
        self._copies: list[Any] = []

        def copy(weight: Tensor) -> Any:
            self._weights.append(weight)
            self._copies.append(fp8.Weight(weight))
            return self._copies[-1]

        for i, block in enumerate(blocks):
            x, d_qkv, x_mlp, h, d_out, d_gate_up = (self.scales[len(kinds) * i + k] for k in range(len(kinds)))
            eight_qkv = active.fused_qkv and block.qkv_bias is None
            self.qkv.append(segments.Qkv8(x=x, d_qkv=d_qkv, weight=copy(block.qkv)) if eight_qkv else None)
            self.mlp.append(
                segments.Mlp8(
                    x=x_mlp, h=h, d_out=d_out, d_gate_up=d_gate_up, gate_up=copy(block.gate_up), down=copy(block.down)
                )
                if active.fused_mlp
                else None
            )
        self.head: Any = None
        if active.fused_loss:
            weight = model.head_weight
            self.head = head.Head8(weight)
            self._weights.append(weight)
            self._copies.append(self.head.weight)
        # Saved with the weights, so that a resumed run scales like an uninterrupted one.
        for name in ("scale", "inverse", "recent"):
            model.register_buffer(f"fp8_{name}", getattr(self.scales, name))
        self._stale = True

    def ready(self) -> None:
        """Called before the first step, and after weights were loaded."""
        if self._stale:
            self._refresh(self._weights, self._copies)
            self._stale = False

    def updated(self) -> None:
        """Called after an update: computes new scales from the step's values and new copies of the weights."""
        self.scales.advance()
        self._refresh(self._weights, self._copies)

    def forget(self) -> None:
        """Drops the values of an abandoned step, and the weight copies, in case weights are loaded before the next."""
        self.scales.amax.zero_()
        self._stale = True

    def loss(self, plain: HeadLoss, *, chunk: int) -> HeadLoss:
        """The head in 8 bits while training, the plain head in evaluations."""
        from flatout.kernels.head import linear_cross_entropy8

        def loss(hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                return plain(hidden_NC, weight_VC, targets_N)
            return linear_cross_entropy8(hidden_NC, weight_VC, targets_N, chunk=chunk, head=self.head)

        return loss


def attend_for(batch: Batch, *, active: Active) -> Attend:
    """The attention that fits a batch's layout. A sliding window that no sequence exceeds is no window."""
    window, longest = active.window, batch.longest or batch.sequence_length
    if window is None or longest <= window:
        return _attend(batch, active=active, window=None)
    within = _attend(batch, active=active, window=window)
    if not active.full_layers:
        return within
    return Sliding(full=_attend(batch, active=active, window=None), within=within, full_layers=active.full_layers)


def _attend(batch: Batch, *, active: Active, window: int | None) -> Attend:
    longest = batch.longest or batch.sequence_length
    if batch.cu_seqlens is None and (window is None or not active.varlen):
        return Rectangular(batch=batch.num_sequences, repeat_kv=active.repeat_kv, window=window)
    if batch.cu_seqlens is None:
        size, length = batch.tokens.numel(), batch.sequence_length
        ends = torch.arange(0, size + 1, length, dtype=torch.int32, device=active.device)
        return Varlen(cu_seqlens=ends, longest=length, repeat_kv=active.repeat_kv, window=window)
    if active.attention == "transformers":  # how many documents, and how long, is read from the device
        size, longest = batch.tokens.numel(), int(batch.cu_seqlens.diff().max())
        return Padded.of(batch.cu_seqlens, tokens=size, longest=longest, trim=True, packed_rows=batch.num_sequences)
    if active.attention == "short" and longest <= SHORT_DOCUMENT and window is None:
        return Short(cu_seqlens=batch.cu_seqlens, longest=longest)
    if active.varlen:
        return Varlen(cu_seqlens=batch.cu_seqlens, longest=longest, repeat_kv=active.repeat_kv, window=window)
    # Eager code on a CPU takes any number of documents; elsewhere the number must be the same for every batch.
    trim = active.device.type == "cpu" and active.compile == "none"
    apart = Padded.of(batch.cu_seqlens, tokens=batch.tokens.numel(), longest=longest, trim=trim, window=window)
    scores, masked = apart.documents * longest**2, batch.num_sequences * batch.sequence_length**2
    if scores < masked and apart.documents * longest <= MOST_PADDING * batch.tokens.numel():
        return apart
    return Masked.of(batch.cu_seqlens, batch=batch.num_sequences, length=batch.sequence_length, window=window)


def recompiles() -> int | None:
    """The number of graphs compiled so far in this process; it must stop growing after the first steps."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
