"""What can go wrong around a step, and what is done about it."""

from __future__ import annotations

import math
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from flatout.errors import INTERRUPTED_EXIT, PREEMPTED_EXIT, EnvironmentLacks, RunFailed

# Skipped updates in a row that end a run. fp16 skips while its loss scale settles; otherwise it is a fault.
MAX_SKIPS = {"fp16": 20, "bf16": 3, "fp32": 3}


class StopRequest:
    """Set by a signal, looked at between steps: the handler itself does nothing else."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        return INTERRUPTED_EXIT if self.signal == signal.SIGINT else PREEMPTED_EXIT

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C does not wait for the save
        self.signal = self.signal or signal.Signals(number)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """SIGTERM, SIGUSR1 and Ctrl-C ask for a stop after the step in flight."""
    request = StopRequest()
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.signal(number, request._handle) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class SkipWatch:
    """Counts updates skipped in a row because something was not finite."""

    def __init__(self, precision: str) -> None:
        self.limit, self.row = MAX_SKIPS[precision], 0
        self.precision = precision

    def see(self, *, step: int, loss: float, grad_norm: float) -> bool:
        """True if this step was skipped; raises when too many were."""
        if math.isfinite(grad_norm + loss):
            self.row = 0
            return False
        self.row += 1
        if self.row >= self.limit:
            raise RunFailed(
                f"{self.row} updates in a row were skipped up to step {step}: loss {loss}, gradient norm {grad_norm} "
                f"in {self.precision}. No weight was changed by them. Lower train.lr, raise train.warmup_steps, "
                "or look at the data of these steps"
            )
        return True


def require_space(folder: Path, *, needed_bytes: int, what: str) -> None:
    """Refuses before the first step when the disk cannot hold what the run will write."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise EnvironmentLacks(
            f"{what} need {needed_bytes / 2**30:.2f} GiB in {folder}, and only {free / 2**30:.2f} GiB are free: make "
            "room, choose another --run folder, or set save.weights_only"
        )
