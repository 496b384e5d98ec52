"""Compiles the kernels of a run while its data is being opened: on a fresh machine both take seconds.

A decoder of one layer takes a forward and a backward pass in a thread. Its weights are dropped; the compiled kernels
stay in Triton's caches, where the run finds them. Nothing depends on the result: what fails here fails again, with its
message, where the run tries it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from flatout.data.stream import Batch
from flatout.engine.objective import CrossEntropy, Head
from flatout.engine.prepare import attend_for, prepare
from flatout.engine.resolve import resolve
from flatout.model import Decoder, lora
from flatout.plan import Plan


@contextmanager
def compiling(plan: Plan | None, *, local_rank: int, deterministic: bool) -> Iterator[threading.Thread | None]:
    """The thread, to be joined before the device is used; None on a CPU and for foreign models."""
    if plan is None or plan.job.device != "gpu" or plan.job.shape.adapter:
        yield None
        return
    thread = threading.Thread(
        target=_compile, args=(plan, local_rank, deterministic), name="flatout-compile", daemon=True
    )
    thread.start()
    try:
        yield thread
    finally:
        thread.join()


def _compile(plan: Plan, local_rank: int, deterministic: bool) -> None:
    try:
        _pass(plan, local_rank, deterministic)
    except Exception:  # the run meets it again, and says it
        return
    finally:
        torch.cuda.empty_cache()


def _pass(plan: Plan, local_rank: int, deterministic: bool) -> None:
    active = resolve(plan, local_rank=local_rank, deterministic=deterministic)
    adapters, decisions = plan.job.adapters, plan.decisions
    with torch.device(active.device):
        model = Decoder(replace(plan.job.shape, layers=1), compute_dtype=active.dtype)
    model.initialise(0)
    if adapters is not None:
        lora.freeze(model, device=active.device, base_bits=adapters.base_bits, seed=0)
        lora.attach(model, adapters, seed=0)
    loss, eight = prepare(
        model, active=active, recompute=decisions.recompute or "none", loss_chunk=decisions.loss_chunk or 1024
    )
    if eight is not None:
        eight.ready()
    batch = _batch(plan).to(active.device)
    objective = CrossEntropy()

    def head(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return objective(batch, Head(hidden_NC=hidden, weight_VC=weight, loss=loss))["loss"]

    summed: torch.Tensor = model(batch.tokens, batch.positions, attend_for(batch, active=active), head)
    summed.backward()
    torch.cuda.synchronize()


def _batch(plan: Plan) -> Batch:
    """A micro-batch of the run's size; where documents are packed, one to a sequence."""
    sequences, length = plan.decisions.micro_batch or 1, plan.job.sequence_length
    tokens = torch.zeros(sequences * length, dtype=torch.int64)
    ends = torch.arange(0, sequences * length + 1, length, dtype=torch.int32)
    return Batch(
        tokens=tokens,
        targets=tokens,
        positions=torch.arange(length).repeat(sequences),
        cu_seqlens=ends if plan.job.packing == "documents" else None,
        num_sequences=sequences,
        sequence_length=length,
        num_target_tokens=len(tokens),
    )
