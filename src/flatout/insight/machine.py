"""The machine as `watch` shows it: the monitor's samples, and the disk that a run writes to."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flatout.cost import GIB
from flatout.probe import Monitor
from flatout.words import number, percent

# CPU time and the GPU's activity counters are differences of two samples, at least this many seconds apart.
LOOK_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One sample of a machine; values that could not be read are missing."""

    sample: Mapping[str, Any]
    disk_free_gib: float | None = None
    disk_total_gib: float | None = None

    @property
    def gpus(self) -> Sequence[Mapping[str, Any]]:
        return list(self.sample.get("gpus", []))

    def host(self) -> dict[str, str]:
        """CPU, RAM and disk as text."""
        ram, total = self.sample.get("ram_gib"), self.sample.get("ram_total_gib")
        known = {
            "CPU": percent(self.sample.get("cpu")),
            "RAM": f"{number(ram)}/{number(total)} GiB{_share(ram, total)}",
        }
        if self.disk_free_gib is not None:
            known["disk free"] = f"{number(self.disk_free_gib)}/{number(self.disk_total_gib)} GiB"
        return known

    @staticmethod
    def memory_of(gpu: Mapping[str, Any]) -> str:
        used, total = gpu.get("memory_gib"), gpu.get("memory_total_gib")
        return f"{number(used)}/{number(total, digits=4)} GiB{_share(used, total)}"

    def to_json(self) -> dict[str, Any]:
        return {**self.sample, "disk_free_gib": self.disk_free_gib, "disk_total_gib": self.disk_total_gib}


class MachineSampler:
    """Samples this machine from a background thread; `latest` returns the last sample."""

    def __init__(self, monitor: Monitor, disk: Path) -> None:
        self._monitor, self._disk = monitor, disk

    def latest(self) -> Machine:
        try:
            disk = psutil.disk_usage(str(self._disk))
            return Machine(
                sample=self._monitor.latest(), disk_free_gib=disk.free / GIB, disk_total_gib=disk.total / GIB
            )
        except OSError:
            return Machine(sample=self._monitor.latest())

    def second(self) -> Machine:
        """Waits briefly for the second sample, the first with CPU time and activity counters."""
        end = time.monotonic() + 8 * LOOK_S
        while "cpu" not in self._monitor.latest() and time.monotonic() < end:
            time.sleep(LOOK_S / 10)
        return self.latest()


@contextmanager
def sampling_machine(*, disk: Path, interval_s: float) -> Iterator[MachineSampler]:
    with Monitor(interval_s=interval_s) as monitor:
        yield MachineSampler(monitor, disk)


def _share(part: float | None, whole: float | None) -> str:
    return "" if part is None or not whole else f" ({percent(part / whole)})"
