"""Turns a plain decoder into the one that trains, in the one right order: recompute, then compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flatout.config.settings import Recompute
from flatout.data.stream import Batch
from flatout.engine.resolve import Active
from flatout.losses import RowLoss, row_loss
from flatout.model import Attend, Block, Decoder, Masked, Rectangular, Varlen


def prepare(model: Decoder, *, active: Active, recompute: Recompute) -> RowLoss:
    """Operates on the model in place; gives the row loss that goes with it."""
    for block in model.blocks:
        assert isinstance(block, Block)
        block.recompute = recompute
    if active.compile == "none":
        return row_loss
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False}
    if active.compile == "max-autotune":
        options["mode"] = "max-autotune-no-cudagraphs"
    for block in model.blocks:
        block.compile(**options)
    model.enter = torch.compile(model.enter, **options)  # type: ignore[method-assign]
    model.leave = torch.compile(model.leave, **options)  # type: ignore[method-assign]
    compiled: Callable[..., Any] = torch.compile(row_loss, **options)
    return compiled


def attend_for(batch: Batch, *, active: Active) -> Attend:
    """The attention that fits a batch's layout."""
    if batch.cu_seqlens is None:
        return Rectangular(batch=batch.num_sequences, repeat_kv=active.repeat_kv)
    if active.varlen:
        return Varlen(cu_seqlens=batch.cu_seqlens, longest=batch.sequence_length)
    return Masked.of(batch.cu_seqlens, batch=batch.num_sequences, length=batch.sequence_length)


def recompiles() -> int | None:
    """Graphs compiled so far in this process; it must stop growing after the first steps."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
