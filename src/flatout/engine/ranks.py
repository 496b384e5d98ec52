"""This process among its ranks: a single rank, unless torchrun or a similar launcher set the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatout.cost import BUCKET_BYTES
from flatout.errors import FlatoutError, RunFailed, UsageError, first_line
from flatout.probe import launched

# In the message of a collective whose peer has ended: gloo's words, and NCCL's.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL error", "remote process exited")
# How many collectives of this process wait for other ranks just now.
_waits = 0
# The group that this process has joined.
_group: Ranks | None = None

# Ranks may wait this long for one that scores or samples.
HOST_WAIT = timedelta(days=1)
VARIABLES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


class FirstRankFailed(FlatoutError):
    """This rank exits because the first one failed and reported the error."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("the first rank failed")
        self.exit_code = exit_code


def in_collective() -> bool:
    """Whether the host waits for other ranks just now; read by another thread."""
    return _waits > 0


@contextmanager
def _waiting() -> Iterator[None]:
    global _waits
    _waits += 1
    try:
        yield
    finally:
        _waits -= 1


@dataclass(frozen=True, kw_only=True)
class Ranks:
    rank: int = 0
    local_rank: int = 0
    world: int = 1
    # A group over the hosts' network, for what the hosts must agree on without using their devices.
    host_group: Any = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums in place over all ranks; enqueued, not waited for."""
        if self.world > 1:
            with _waiting():
                dist.all_reduce(tensor)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """The largest over all ranks, in place."""
        if self.world > 1:
            with _waiting():
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def sum_gradients_(self, gradients: list[Tensor]) -> None:
        """Sums large gradients in place; small ones are concatenated in buckets, summed and copied back."""
        if self.world == 1:
            return
        for bucket in buckets(gradients):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                self.sum_(bucket[0])
                continue
            flat = self.sum_(torch.cat([g.reshape(-1) for g in bucket]))
            pieces = flat.split([g.numel() for g in bucket])
            torch._foreach_copy_(bucket, [p.view_as(g) for p, g in zip(pieces, bucket, strict=True)])

    def agree(self, text: str) -> str:
        """The first rank's text, on every rank."""
        if self.world == 1:
            return text
        box = [text]
        with _waiting():
            dist.broadcast_object_list(box, src=0, group=self.host_group)
        return box[0]

    @contextmanager
    def first_leads(self) -> Iterator[None]:
        """For work of the first rank only. If it fails, the others exit quietly with the same exit code."""
        code = 0
        try:
            yield
        except FlatoutError as error:
            code = error.exit_code
            raise
        finally:
            told = int(self.agree(str(code)))
            if told and not self.first:
                raise FirstRankFailed(told)

    def on_first(self, work: Callable[[], object]) -> bool:
        """Works on the first rank while the others wait. Returns on every rank whether the result is true."""
        found = False
        with self.first_leads():
            if self.first:
                found = bool(work())
        return self.any(found)

    def first_text(self, text: str) -> str:
        """The text of the first rank that has one, on every rank; "" if none has."""
        if self.world == 1:
            return text
        every = [""] * self.world
        with _waiting():
            dist.all_gather_object(every, text, group=self.host_group)
        return next((one for one in every if one), "")

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. The hosts wait for each other, the devices do not."""
        if self.world == 1:
            return flag
        votes = torch.tensor([int(flag)])
        with _waiting():
            dist.all_reduce(votes, group=self.host_group)
        return bool(votes.item())

    def most(self, count: int) -> int:
        """The largest count of any rank. The hosts wait for each other, the devices do not."""
        if self.world == 1:
            return count
        found = torch.tensor([count])
        with _waiting():
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.host_group)
        return int(found.item())

    def barrier(self) -> None:
        if self.world > 1:
            with _waiting():
                dist.barrier(group=self.host_group)


def buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups gradients in order, by type and up to a bucket's bytes; a larger gradient is its own bucket."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (bucket[0].dtype != gradient.dtype or size + gradient.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket


def from_environment() -> Ranks:
    """Reads torchrun's variables without joining anything."""
    try:
        rank, local, world = (int(os.environ.get(name, value)) for name, value in VARIABLES.items())
    except ValueError as error:
        raise UsageError(f"RANK, LOCAL_RANK and WORLD_SIZE must be numbers, as torchrun sets them: {error}") from None
    if world > 1 and ("RANK" not in os.environ or "MASTER_ADDR" not in os.environ):
        raise UsageError(
            f"WORLD_SIZE is {world}, but RANK or MASTER_ADDR is not set: start several ranks with torchrun, or unset it"
        )
    return Ranks(rank=rank, local_rank=local, world=world)


def _join(backend: str, ranks: Ranks) -> None:
    """Joins the group. torchrun keeps one store for all its attempts: in it, each needs a place of its own, or a
    restarted rank connects to where a dead one was."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        dist.init_process_group(backend)
        return
    library: Any = dist
    store = library.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks.world, is_master=False)
    store = library.PrefixStore(f"flatout/attempt-{launched.restarts()}", store)
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world)


@contextmanager
def joined(ranks: Ranks, *, num_gpus: int) -> Iterator[Ranks]:
    """Joins the process group for the duration of the block, unless there is one rank or it has joined already."""
    global _group
    if _group is not None:
        yield _group
        return
    cuda = num_gpus > 0
    if cuda and ranks.local_rank >= num_gpus:
        raise UsageError(
            f"rank {ranks.rank} needs GPU {ranks.local_rank}, but this machine has {num_gpus}: "
            f"torchrun --nproc-per-node {num_gpus}"
        )
    launched.end_with_launcher()
    if ranks.world == 1:
        yield ranks
        return
    if cuda:
        torch.cuda.set_device(ranks.local_rank)
    _join("nccl" if cuda else "gloo", ranks)
    try:
        _group = replace(ranks, host_group=dist.new_group(backend="gloo", timeout=HOST_WAIT))
        yield _group
    except RuntimeError as error:
        if not any(word in str(error) for word in _LOST):
            raise
        raise RunFailed(
            f"rank {ranks.rank} lost the connection to another rank, which ended first and says why: "
            f"{first_line(error).split('. ')[0]}"
        ) from None
    finally:
        _group = None
        dist.destroy_process_group()
