"""Compiles the kernels of a run in parallel while its data is being opened: on a machine that has never run it, both
take seconds.

Each kernel is tried in a separate process, because compiling holds the GIL most of the time. The processes are forked
before this process uses CUDA, so that they need not import torch again. The run finds their results in Triton's cache.
Nothing depends on them: a kernel that fails here fails again, with its message, when the run tries it.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import torch

from flatout.engine.resolve import DTYPES, try_kernel, why_no_fp8
from flatout.plan import Plan


@contextmanager
def compiling(plan: Plan | None) -> Iterator[list[BaseProcess]]:
    """The processes, to be joined before the first kernel is needed; empty if CUDA is already in use."""
    processes: list[BaseProcess] = []
    if plan is not None and not torch.cuda.is_initialized():
        wish = plan.decisions
        names = {"qkv": wish.fused_qkv, "mlp": wish.fused_mlp, "loss": wish.fused_loss}
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=_compile, args=(name, plan)) for name, wanted in names.items() if wanted]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's threads sleep, and no child wakes them
        for process in processes:
            process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.join()


def _compile(name: str, plan: Plan) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    device, dtype = torch.device("cuda", torch.cuda.current_device()), DTYPES[plan.decisions.precision]
    eight = plan.decisions.fp8
    try_kernel(name, shape=plan.job.shape, dtype=dtype, device=device, eight=eight)
    if eight and name == "loss":  # its kernels compile fastest
        why_no_fp8(device, dtype)
