"""What this machine, or a named one, can do: `flatout hardware` prints it and `flatout plan` uses it."""

from flatout.hardware.detect import amd_here, detect, devices, host, unsupported_build
from flatout.hardware.measure import Measured, measure, with_cpu_facts
from flatout.hardware.table import Hardware, named, names, parse

__all__ = [
    "Hardware",
    "Measured",
    "amd_here",
    "detect",
    "devices",
    "host",
    "measure",
    "named",
    "names",
    "parse",
    "unsupported_build",
    "with_cpu_facts",
]
