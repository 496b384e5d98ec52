"""Records the forward and backward pass of a micro-batch as CUDA graphs, for hosts that are slower than the device.

A layer takes many kernel launches in both passes, about 150 with adapters, and a host needs milliseconds for them
whatever the size of the batch. The micro-batches of a run have few different shapes (see `data.packed`), so a few
graphs are enough. Used by `Engine`, with gradients that are accumulated in place.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatout.data.stream import Batch
from flatout.engine.faults import is_out_of_memory
from flatout.engine.objective import LOSS
from flatout.errors import RunFailed, first_line

# Only this thread's calls are checked during capture: data loaders pin memory in their own threads.
MODE = "thread_local"


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The CUDA graph of the passes for one shape, and the tensors it reads and writes."""

    batch: Batch
    sums: Mapping[str, Tensor]  # the objective's results: the loss, summed over targets, and its metrics
    gradient: Tensor  # of the loss
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph

    def take(self, host_batch: Batch) -> None:
        given = host_batch.tensors
        for name, place in self.batch.tensors.items():
            place.copy_(given[name], non_blocking=True)


class Replay:
    """CUDA graphs by shape. A shape's first micro-batch runs without one, which compiles its kernels."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._known: dict[Any, Recorded | None] = {}
        self._memory: Any = None  # shared by all graphs, since no two run at once
        self._begun = False

    def __bool__(self) -> bool:
        """Whether a capture was started, so that gradients must keep their addresses."""
        return self._begun

    def is_due(self, batch: Batch) -> bool:
        """Whether a batch of this shape has run before and has no graph yet."""
        return self._known.get(_key(batch), self) is None

    def of(self, batch: Batch) -> Recorded | None:
        """The graph for a batch of this shape; None the first time."""
        return self._known.setdefault(_key(batch), None)

    def forget(self) -> None:
        self._known.clear()
        self._memory = None
        self._begun = False

    def record(self, batch: Batch, sums: Callable[[Batch], Mapping[str, Tensor]]) -> None:
        """Captures both passes over a batch on the device. Later batches are copied into this batch's tensors."""
        self._begun = True
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gc.collect()  # what is left of a recomputed pass holds nodes of the parameters, which belong to another stream
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        gradient = torch.ones((), device=batch.tokens.device)
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(forward, pool=self._memory, capture_error_mode=MODE):
                found = sums(batch)
            with torch.cuda.graph(backward, pool=self._memory, capture_error_mode=MODE):
                (found[LOSS] * gradient).backward()  # as an argument, it makes torch import sympy, for seconds
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise RunFailed(f"CUDA graph capture failed ({first_line(error)}): set plan.graphs: false") from error
        self._known[_key(batch)] = Recorded(
            batch=batch,
            sums={name: value.detach() for name, value in found.items()},
            gradient=gradient,
            forward=forward,
            backward=backward,
        )


def _key(batch: Batch) -> Any:
    sizes = tuple((name, tensor.shape) for name, tensor in batch.tensors.items())
    return sizes, batch.num_sequences, batch.longest
