"""Faults around a step and how they are handled: out of memory, signals, skipped updates, full disks."""

from __future__ import annotations

import math
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from flatout.errors import EnvironmentLacks, RunFailed

# Skipped updates in a row that a run accepts. fp16 skips while its loss scale adapts; otherwise it is a fault.
MAX_SKIPS = {"fp16": 20, "bf16": 3, "fp32": 3}
# How often a run goes back to its last checkpoint because of them.
MAX_ROLLBACKS = 2


class OutOfMemory(Exception):
    """A step ran out of memory, and nothing of it was applied.

    `recorded`: CUDA graphs were held and are dropped now, so that the same step may fit.
    """

    def __init__(self, text: str, *, recorded: bool = False) -> None:
        super().__init__(text)
        self.recorded = recorded


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator failed, the device's or the host's (which raises a plain RuntimeError)."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    # From the host's allocator, a library's workspace, and a kernel's first launch.
    words = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "[CUDA]: out of memory")
    return any(word in str(error) for word in words)


@contextmanager
def explained(predicted_gib: Mapping[str, float]) -> Iterator[None]:
    """Turns an out-of-memory error outside a step into a RunFailed that names the largest consumers."""
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise RunFailed(f"out of memory: {str(error).splitlines()[0]} {largest(predicted_gib)}") from None


def largest(predicted_gib: Mapping[str, float]) -> str:
    parts = sorted(predicted_gib.items(), key=lambda part: -part[1])[:3]
    named = ", ".join(f"{name.replace('_', ' ')} {size:.2f} GiB" for name, size in parts)
    return (
        f"Largest parts as predicted: {named}. Shorten data.sequence_length, set plan.recompute: full, or use a "
        "smaller model"
    )


def smaller(micro_batch: int) -> int:
    """The next size to try: half, or a smaller divisor where it is odd."""
    return next(size for size in range(micro_batch // 2, 0, -1) if micro_batch % size == 0)


class StopRequest:
    """Set by a signal and checked between steps; the signal handler does nothing else."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C does not wait for the save
        self.signal = self.signal or signal.Signals(number)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """SIGTERM, SIGUSR1, SIGUSR2, SIGHUP and Ctrl-C request a stop after the current step.

    Under nohup SIGHUP stays ignored, so that the run outlives its terminal.
    """
    request = StopRequest()
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, request._handle) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class SkipWatch:
    """Counts updates skipped in a row because something was not finite. After too many the run goes back.

    In fp16 that is not tried: a loss scale that keeps falling falls again.
    """

    def __init__(self, precision: str) -> None:
        self.limit, self.row = MAX_SKIPS[precision], 0
        self.precision = precision
        self.first = 0  # step of this row
        self.cause = ""  # why the run must go back; empty: it need not
        self.rollbacks = 0

    def see(self, *, step: int, loss: float, grad_norm: float) -> bool:
        """True if this step was skipped."""
        if math.isfinite(grad_norm + loss):
            self.row = 0
            return False
        self.row += 1
        self.first = step if self.row == 1 else self.first
        if self.row >= self.limit:
            self.cause = (
                f"{self.row} updates in a row were skipped up to step {step}: loss {loss}, gradient norm {grad_norm} "
                f"in {self.precision}"
            )
            if self.precision == "fp16":
                raise self.fatal("a loss scale that keeps falling falls again")
        return True

    def fatal(self, why: str) -> RunFailed:
        return RunFailed(
            f"{self.cause}. They changed no weights, and the run cannot go back to a checkpoint: {why}. "
            "Lower train.lr, raise train.warmup_steps, or check the data of these steps"
        )

    def gone_back(self) -> None:
        self.row, self.cause = 0, ""
        self.rollbacks += 1


def require_space(folder: Path, *, needed_bytes: int, what: str, smaller: Sequence[str] = ()) -> None:
    """Refuses before the first step when the disk cannot hold what the run will write.

    `smaller` says how to write less, as far as that is not done yet.
    """
    try:
        existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        free = shutil.disk_usage(existing).free
    except OSError as error:
        raise EnvironmentLacks(f"{folder} cannot be read: {error.strerror}. Choose another --run folder") from None
    if free < needed_bytes:
        ways = ["free some space", "choose another --run folder", *smaller]
        raise EnvironmentLacks(
            f"{what} need {needed_bytes / 2**30:.2f} GiB in {folder}, and only {free / 2**30:.2f} GiB are free: "
            f"{', '.join(ways[:-1])}, or {ways[-1]}"
        )
