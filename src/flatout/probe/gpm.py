"""GPU activity between two samples, by NVML's performance monitoring (Hopper and later).

`sm_active` is the share of time the multiprocessors had work, `tensor_active` that of the tensor cores,
`dram_active` the share of the memory bandwidth in use. A device without it gives nothing, never a zero.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import pynvml

log = logging.getLogger(__name__)

_METRICS = {
    "sm_active": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "tensor_active": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram_active": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
}


class Activity:
    """Alternates between two samples of one device and reads the difference."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._samples: list[Any] = []
        self._taken = 0
        try:
            if pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                self._samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
        except pynvml.NVMLError as error:
            log.debug("no activity counters: %s", error)

    def read(self) -> dict[str, float]:
        """Fractions since the last call; nothing at the first one, or where the device has no such counters."""
        if not self._samples:
            return {}
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
