"""flatout makes LLM training run at the limit of the hardware, and proves it with measurements.

The names below are for other Python programs (docs/python.md). They are imported when they are first used, so that
`import flatout` needs no torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["Meter", "__version__", "accelerate", "hf", "linear_cross_entropy", "pack", "plan", "settings", "train"]

_FUNCTIONS = ("accelerate", "linear_cross_entropy", "pack", "settings", "train")


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(import_module("flatout.api"), name)
    if name == "Meter":
        return import_module("flatout.meter").Meter
    if name in ("hf", "plan"):  # modules; the second can be called
        return import_module(f"flatout.{name}")
    raise AttributeError(f"module 'flatout' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
