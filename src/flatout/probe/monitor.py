"""Watches the machine from a background thread during a run (`train`, `watch`).

A sample has no key for values that could not be read: without NVML there is no `gpus`, never a zero.
`busy` of a GPU is NVML's utilisation: the share of time in which some kernel was running, not how well it used
the chip; where the device counts them, `sm_active`, `tensor_active` and `dram_active` say that.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import psutil
import pynvml

from flatout.probe.gpm import Activity

log = logging.getLogger(__name__)

_GIB = 1024**3

_THROTTLE_REASONS = {
    "power_cap": pynvml.nvmlClocksEventReasonSwPowerCap,
    "hw_slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
    "hw_thermal": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "hw_power_brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    "sw_thermal": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
}


class Monitor:
    """Samples every `interval_s`; each sample also goes to `on_sample`, in the monitor's thread.

    `gpu` is the CUDA number of the one device to watch; by default all that are visible.
    """

    def __init__(
        self,
        *,
        interval_s: float = 1.0,
        on_sample: Callable[[Mapping[str, Any]], None] | None = None,
        gpu: int | None = None,
    ) -> None:
        self._interval_s = interval_s
        self._on_sample = on_sample
        self._gpu = gpu
        self._latest: Mapping[str, Any] = {}
        self._peak: dict[str, float] = {}
        self._process = psutil.Process()
        self._gpus: list[tuple[int, Any, Activity]] = []
        self._has_nvml = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Takes a first sample and continues in the background."""
        if self._thread is not None:
            raise RuntimeError("the monitor is already running")
        try:
            pynvml.nvmlInit()
            self._has_nvml = True
            self._gpus = [(n, handle, Activity(handle)) for n, handle in visible_gpus() if self._gpu in (None, n)]
        except pynvml.NVMLError as error:
            log.debug("no NVML, so no GPU numbers: %s", error)
        self._stopping.clear()
        # CPU shares cover the time since the call before: the first one only starts the clock.
        self._process.cpu_percent()
        self._take(with_cpu=False)
        self._thread = threading.Thread(target=self._loop, name="flatout-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; when this returns it is gone. Stopping twice is harmless."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._has_nvml:
            for _, _, activity in self._gpus:
                activity.close()
            self._has_nvml, self._gpus = False, []
            pynvml.nvmlShutdown()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def latest(self) -> Mapping[str, Any]:
        """The last sample; empty before `start`."""
        return self._latest

    def utilisation(self) -> dict[str, float]:
        """The last sample as the fractions a step record keeps: cpu, ram, and over the visible GPUs gpu, gpu_memory."""
        sample = self._latest
        shares = {"cpu": sample["cpu"]} if "cpu" in sample else {}
        if "ram_gib" in sample:
            shares["ram"] = sample["ram_gib"] / sample["ram_total_gib"]
        gpus = sample.get("gpus", [])
        busy = [gpu["busy"] for gpu in gpus if "busy" in gpu]
        memory = [gpu["memory_gib"] / gpu["memory_total_gib"] for gpu in gpus if "memory_gib" in gpu]
        if busy:
            shares["gpu"] = sum(busy) / len(busy)
        if memory:
            shares["gpu_memory"] = max(memory)
        return shares

    @property
    def peak(self) -> Mapping[str, float]:
        """The highest value of each number so far; a GPU's under `gpu_`, over all visible ones."""
        return dict(self._peak)

    def _loop(self) -> None:
        psutil.cpu_percent()  # likewise, and this clock is each thread's own
        while not self._stopping.wait(self._interval_s):
            self._take(with_cpu=True)

    def _take(self, *, with_cpu: bool) -> None:
        sample = {"time": time.time(), **self._host(with_cpu=with_cpu)}
        if self._gpus:
            sample["gpus"] = [{"index": index, **_gpu(handle, activity)} for index, handle, activity in self._gpus]
        for key, value in _numbers(sample):
            self._peak[key] = max(value, self._peak.get(key, value))
        self._latest = sample
        if self._on_sample is not None:
            try:
                self._on_sample(sample)
            except Exception:
                self._on_sample = None
                log.warning("the receiver of the monitor's samples failed and gets no more", exc_info=True)

    def _host(self, *, with_cpu: bool) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        sample = {
            "ram_gib": (memory.total - memory.available) / _GIB,
            "ram_total_gib": memory.total / _GIB,
            "process_rss_gib": self._process.memory_info().rss / _GIB,
        }
        if with_cpu:
            sample["cpu"] = psutil.cpu_percent() / 100
            sample["process_cores"] = self._process.cpu_percent() / 100
        return sample


def visible_gpus() -> list[tuple[int, Any]]:
    """NVML's handles of the devices CUDA would show this process, with their CUDA numbers; needs nvmlInit."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return [(index, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())]
    handles: list[Any] = []
    for name in (part.strip() for part in text.split(",")):
        try:
            if name.isdecimal():
                handles.append(pynvml.nvmlDeviceGetHandleByIndex(int(name)))
            else:
                handles.append(pynvml.nvmlDeviceGetHandleByUUID(name))
        except pynvml.NVMLError:
            break  # as CUDA does: the first name it does not know ends the list
    return list(enumerate(handles))


def _gpu(handle: Any, activity: Activity) -> dict[str, Any]:
    sample: dict[str, Any] = {}

    def read(metric: Callable[[], dict[str, Any]]) -> None:
        try:
            sample.update(metric())
        except pynvml.NVMLError as error:
            log.debug("a GPU metric is missing: %s", error)

    def memory() -> dict[str, Any]:
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return {"memory_gib": info.used / _GIB, "memory_total_gib": info.total / _GIB}

    def throttle() -> dict[str, Any]:
        bits = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        return {"throttle": [name for name, bit in _THROTTLE_REASONS.items() if bits & bit]}

    read(memory)
    read(throttle)
    read(lambda: {"busy": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100})
    read(lambda: {"power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000})
    read(lambda: {"temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)})
    read(lambda: {"sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)})
    read(activity.read)
    return sample


def _numbers(sample: Mapping[str, Any]) -> list[tuple[str, float]]:
    host = [(key, value) for key, value in sample.items() if key != "time" and isinstance(value, float)]
    gpus = [
        (f"gpu_{key}", float(value))
        for gpu in sample.get("gpus", [])
        for key, value in gpu.items()
        if key != "index" and isinstance(value, int | float)
    ]
    return host + gpus
