"""Waiting for something to happen. No test depends on how fast the machine is; a test that hangs fails."""

import time
from collections.abc import Callable
from typing import Protocol

# Only a hang takes this long, on a busy machine too.
HANG_S = 300.0


class Process(Protocol):
    def poll(self) -> int | None: ...


def wait_until(happened: Callable[[], object], *, process: Process | None = None) -> None:
    """Returns once `happened()` is true; fails where `process` has ended without that, or after HANG_S."""
    end = time.monotonic() + HANG_S
    while True:
        ended = process is not None and process.poll() is not None
        if happened():
            return
        assert not ended, "the process ended before it happened"
        assert time.monotonic() < end, f"it did not happen in {HANG_S:.0f} s"
        time.sleep(0.005)
