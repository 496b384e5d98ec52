"""The settings that the doctor passes to the agent."""

from __future__ import annotations

import json
import time
from typing import Any

WARM_STEPS = 3


class Settings:
    """The settings from the environment variable FLATOUT_AGENT."""

    def __init__(self, text: str) -> None:
        asked = json.loads(text)
        self.out: str = asked["out"]
        self.steps: int = asked["steps"]
        self.seconds: float = asked["seconds"]
        self.stop: bool = asked["stop"]
        self.look: bool = asked.get("look", True)  # profile and replay; --prove only measures time
        self.switch: dict[str, Any] = asked.get("switch", {})
        self.ends_at: float = asked.get("ends_at", float("inf"))  # of the whole watch, on the monotonic clock
        self.stack_signal: int | None = asked.get("stack_signal")
        self.warm = min(WARM_STEPS, max(1, self.steps // 4))
        self.fit()

    def fit(self) -> None:
        """No longer than what is left of the whole watch, replays included."""
        self.seconds = min(self.seconds, max(0.0, 0.7 * (self.ends_at - time.monotonic())))
        # What one replay may take, and all of them together.
        self.replay_s, self.replays_s = self.seconds / 40, self.seconds / 3
