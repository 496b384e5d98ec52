"""The training thread's time, divided into phases."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

# Phases that keep all the time inside them.
WHOLE = ("generate", "save", "empty-cache", "backward", "eval")


class Timeline:
    """Divides the training thread's time into phases; on CUDA a timing event on the stream marks every boundary.

    On the device, a phase lasts from the moment it has passed one boundary to the next: a phase in which the host kept
    the device waiting shows as that wait, and one the device never noticed as nothing.
    """

    def __init__(self) -> None:
        self.phase = "other"
        self.host: dict[str, float] = defaultdict(float)
        self.make_event: Callable[[], Any] | None = None
        self._since = time.perf_counter()
        self._event: Any = None
        self._spans: list[tuple[str, Any, Any]] = []

    def enter(self, phase: str) -> str:
        """Go over to `phase`; returns the one left, to be entered again."""
        before, now = self.phase, time.perf_counter()
        self.host[before] += now - self._since
        self._since = now
        if self.make_event is not None and phase != before:
            event = self.make_event()
            if event is not None:
                if self._event is not None:
                    self._spans.append((before, self._event, event))
                self._event = event
        self.phase = phase
        return before

    def take(self) -> tuple[dict[str, float], list[tuple[str, Any, Any]]]:
        """Everything since the last call."""
        self.enter(self.phase)
        if self.make_event is not None:
            event = self.make_event()
            if event is not None and self._event is not None:
                self._spans.append((self.phase, self._event, event))
            self._event = event
        host, spans = dict(self.host), self._spans
        self.host, self._spans = defaultdict(float), []
        return host, spans
