"""Measures a training process from within: its phases, its machine, its software. Torch is never required."""

from flatout.probe.environment import describe
from flatout.probe.monitor import Monitor
from flatout.probe.phases import Phases, StepTiming

__all__ = ["Monitor", "Phases", "StepTiming", "describe"]
