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
        assert not ended, f"the process ended before it happened: {process and process.poll()}\n{_said(process)}"
        assert time.monotonic() < end, f"it did not happen in {HANG_S:.0f} s\n{getattr(process, 'seen', '')}"
        time.sleep(0.005)


def _said(process: Process | None) -> str:
    """What the process wrote, where that is kept."""
    communicate = getattr(process, "communicate", None)
    return "" if communicate is None else "\n".join(str(text) for text in communicate())
