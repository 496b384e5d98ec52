"""What this machine, or a named one, can do: `flatout hardware` prints it and `flatout plan` reckons with it."""

from flatout.hardware.detect import detect, unsupported_build
from flatout.hardware.measure import Measured, bf16_ratio, measure
from flatout.hardware.table import Hardware, named, names, parse

__all__ = ["Hardware", "Measured", "bf16_ratio", "detect", "measure", "named", "names", "parse", "unsupported_build"]
