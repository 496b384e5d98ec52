"""Weights sharded over ranks by FSDP2: every rank holds some rows of each matrix and gathers a block when it runs.

What is small stays whole on every rank: norm gains, biases, adapters and their router. Their gradients are summed as
those of replicated weights. The optimizer must be built after `shard`, which replaces the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engine.ranks import Ranks
from flatout.engine.resolve import Active
from flatout.model import Decoder, Model
from flatout.optim import is_sharded


def shard(model: Model, *, active: Active, ranks: Ranks, mesh: Any = None) -> None:
    """Shards the decoder, and the critic beside it, block by block; then what is left of them.

    `mesh` is the mesh of all ranks, if there is one already.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    assert isinstance(model, Decoder), "the plan shards only flatout's own decoder"
    mesh = mesh or init_device_mesh(active.device.type, (ranks.world,))
    narrow = None if active.dtype == torch.float32 else active.dtype
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False)
    whole = {parameter for parameter in model.parameters() if not is_split(parameter, ranks.world)}
    if model.router is not None:  # it runs before the root's forward pass
        whole.update(model.router.parameters())
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "ignored_params": whole}
    for parameter in whole:
        parameter.data = parameter.data.to(active.device)
    for decoder in [module for module in model.modules() if isinstance(module, Decoder)]:
        for block in decoder.blocks:
            fully_shard(block, **options)
    # The root's weights are needed at both ends of a pass: they stay gathered between forward and backward.
    fully_shard(model, reshard_after_forward=False, **options)
    for module in _units(model):
        # Losses are divided by the targets of all ranks already, so gradients are summed; gloo can do nothing else.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def is_split(parameter: Tensor, world: int) -> bool:
    """Whether a weight is sharded: matrices with a row for every rank."""
    return parameter.ndim == 2 and parameter.shape[0] >= world


def _units(model: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reduce_gradients(model: nn.Module, *, last: bool) -> None:
    """Whether the next backward pass sums the gradients over ranks: only that of the last micro-batch does."""
    root: Any = model
    root.set_requires_gradient_sync(last)
    root.set_is_last_backward(last)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """All weights whole on every rank: the ranks may then run different numbers of passes, without gradients."""
    units = _units(model) if any(is_sharded(parameter) for parameter in model.parameters()) else []
    if units:
        units[0]._get_fsdp_state()._lazy_init()
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for at, unit in enumerate(units):
            unit.reshard()
            unit.set_reshard_after_forward(at > 0, recurse=False)


def as_gradient(parameter: Tensor, rows: Tensor) -> Tensor:
    """A gradient of this rank's rows in the form that the parameter's must have."""
    if not is_sharded(parameter):
        return rows
    from torch.distributed.tensor import DTensor

    like: Any = parameter
    made: Tensor = DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made
