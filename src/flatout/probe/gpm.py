"""GPU activity between two samples, by NVML's performance monitoring (Hopper and later).

`sm_active` is the share of time the multiprocessors had work, `tensor_active` that of the tensor cores,
`dram_active` the share of the memory bandwidth in use. A device without it gives nothing, never a zero.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import Any, ClassVar

import pynvml

log = logging.getLogger(__name__)

_METRICS = {
    "sm_active": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "tensor_active": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram_active": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
}


class Activity:
    """The activity of one device since the last reading.

    All readers of a device in this process share two samples and take turns: NVML crashes where two threads sample
    the same device at once.
    """

    _lock = threading.Lock()
    _open: ClassVar[dict[str, _Counters]] = {}

    def __init__(self, handle: Any) -> None:
        self._name: str | None = None
        with self._lock:
            try:
                if pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                    name = str(pynvml.nvmlDeviceGetUUID(handle))
                    self._open.setdefault(name, _Counters(handle)).readers += 1
                    self._name = name
            except pynvml.NVMLError as error:
                log.debug("no activity counters: %s", error)

    def read(self) -> dict[str, float]:
        """Fractions since the last reading; nothing at the first one, or where the device has no such counters."""
        with self._lock:
            return {} if self._name is None else self._open[self._name].read()

    def close(self) -> None:
        name, self._name = self._name, None
        if name is None:
            return
        with self._lock:
            self._open[name].readers -= 1
            if not self._open[name].readers:
                self._open.pop(name).close()


class _Counters:
    """Alternates between two samples of one device and reads the difference."""

    def __init__(self, handle: Any) -> None:
        self.readers = 0
        self._handle, self._samples, self._taken = handle, list[Any](), 0

    def read(self) -> dict[str, float]:
        if not self._samples:
            self._samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
        now, before = self._samples[self._taken % 2], self._samples[(self._taken + 1) % 2]
        pynvml.nvmlGpmSampleGet(self._handle, now)
        self._taken += 1
        return {} if self._taken == 1 else _between(before, now)

    def close(self) -> None:
        samples, self._samples = self._samples, []
        for sample in samples:
            pynvml.nvmlGpmSampleFree(sample)


def _between(before: Any, now: Any) -> dict[str, float]:
    query = pynvml.c_nvmlGpmMetricsGet_t()
    query.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    query.numMetrics = len(_METRICS)
    query.sample1, query.sample2 = before, now
    for slot, metric in enumerate(_METRICS.values()):
        query.metrics[slot].metricId = metric
    found = pynvml.nvmlGpmMetricsGet(query)
    return {
        name: found.metrics[slot].value / 100
        for slot, name in enumerate(_METRICS)
        if found.metrics[slot].nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(found.metrics[slot].value)
    }
