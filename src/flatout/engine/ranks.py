"""This process among its peers. Alone unless torchrun (or a launcher like it) set the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Ranks:
    rank: int = 0
    local_rank: int = 0
    world: int = 1
    # Over the hosts' own network, for what the hosts must agree on without asking their devices.
    host_group: Any = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums in place over all ranks; enqueued, not waited for."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_gradients_(self, gradients: list[Tensor]) -> None:
        """One collective over all gradients: they are laid end to end, summed and copied back."""
        if self.world == 1:
            return
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        pieces = flat.split([g.numel() for g in gradients])
        torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(pieces, gradients, strict=True)])

    def agree(self, text: str) -> str:
        """What the first rank says, on every rank."""
        if self.world == 1:
            return text
        box = [text]
        dist.broadcast_object_list(box, src=0, group=self.host_group)
        return box[0]

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank. The hosts wait for each other, the devices do not."""
        if self.world == 1:
            return flag
        votes = torch.tensor([int(flag)])
        dist.all_reduce(votes, group=self.host_group)
        return bool(votes.item())

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(group=self.host_group)


def from_environment() -> Ranks:
    """Reads torchrun's variables without joining anything."""
    return Ranks(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world=int(os.environ.get("WORLD_SIZE", "1")),
    )


@contextmanager
def joined(ranks: Ranks, *, cuda: bool) -> Iterator[Ranks]:
    """Joins the process group for the time of the block; nothing to do for one rank."""
    if ranks.world == 1:
        yield ranks
        return
    if cuda:
        torch.cuda.set_device(ranks.local_rank)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield replace(ranks, host_group=dist.new_group(backend="gloo") if cuda else None)
    finally:
        dist.destroy_process_group()
