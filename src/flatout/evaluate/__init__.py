"""Evaluates models on tasks, with confidence intervals (`flatout eval`, and recipes during training)."""

from flatout.evaluate.intervals import Difference, Interval, mean_interval, paired, wilson
from flatout.evaluate.measure import Score, chosen, compare, evaluate

__all__ = ["Difference", "Interval", "Score", "chosen", "compare", "evaluate", "mean_interval", "paired", "wilson"]
