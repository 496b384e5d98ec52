"""Activity counters: two samples in turn, fractions between them, nothing where there are none."""

import threading
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from flatout.probe.gpm import Activity

SUPPORTED = "supported"


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """NVML with counters that stand at a new value at each look; DRAM cannot be read."""
    seen: dict[str, Any] = {"looks": 0, "freed": [], "pairs": []}

    def alloc() -> Any:
        return pynvml.c_nvmlGpmSample_t()

    def take(_: str, sample: Any) -> None:
        seen["looks"] += 1

    def metrics(query: Any) -> Any:
        assert (query.version, query.numMetrics) == (1, 3)
        for slot in range(query.numMetrics):
            metric = query.metrics[slot]
            metric.value = {pynvml.NVML_GPM_METRIC_SM_UTIL: 80.0, pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 45.0}.get(
                metric.metricId, 0.0
            )
            known = metric.metricId != pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL
            metric.nvmlReturn = pynvml.NVML_SUCCESS if known else pynvml.NVML_ERROR_NOT_SUPPORTED
        return query

    for name, value in {
        "nvmlGpmQueryDeviceSupport": lambda handle: SimpleNamespace(isSupportedDevice=handle == SUPPORTED),
        "nvmlDeviceGetUUID": str,
        "nvmlGpmSampleAlloc": alloc,
        "nvmlGpmSampleGet": take,
        "nvmlGpmMetricsGet": metrics,
        "nvmlGpmSampleFree": seen["freed"].append,
    }.items():
        monkeypatch.setattr(pynvml, name, value)
    return seen


def test_the_first_look_says_nothing_and_the_next_fractions(counters: dict[str, Any]):
    activity = Activity(SUPPORTED)
    assert activity.read() == {}
    assert activity.read() == {"sm_active": 0.8, "tensor_active": 0.45}  # and no DRAM, rather than a zero
    activity.close()
    assert len(counters["freed"]) == 2
    assert activity.read() == {}


def test_readers_of_one_device_take_turns_and_the_last_one_frees_its_samples(
    counters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    inside, together = threading.Lock(), list[bool]()

    def take(_: str, sample: Any) -> None:
        free = inside.acquire(blocking=False)
        together.append(not free)
        threading.Event().wait(0.001)  # lets another thread run
        if free:
            inside.release()

    monkeypatch.setattr(pynvml, "nvmlGpmSampleGet", take)
    both = Activity(SUPPORTED), Activity(SUPPORTED)
    threads = [threading.Thread(target=lambda one=one: [one.read() for _ in range(20)]) for one in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(together) == 40
    assert not any(together)
    both[0].close()
    assert counters["freed"] == []
    assert both[1].read() != {}
    both[1].close()
    assert len(counters["freed"]) == 2


def test_a_device_without_counters_gives_nothing(counters: dict[str, Any]):
    activity = Activity("older")
    assert activity.read() == activity.read() == {}
    assert counters["looks"] == 0


def test_a_library_without_them_gives_nothing(monkeypatch: pytest.MonkeyPatch):
    def missing(_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlGpmQueryDeviceSupport", missing)
    assert Activity(SUPPORTED).read() == {}


@pytest.mark.gpu
def test_a_real_device_gives_fractions_where_it_counts():
    import torch

    pynvml.nvmlInit()
    activity = Activity(pynvml.nvmlDeviceGetHandleByIndex(0))
    try:
        activity.read()
        if activity._name is None:
            pytest.skip("this GPU has no activity counters")
        matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for _ in range(700):  # about a second: the counters are read off ten times in one
            matrix @ matrix
        torch.cuda.synchronize()
        busy = activity.read()
        assert 0 < busy["tensor_active"] <= 1
        assert 0 < busy["sm_active"] <= 1
    finally:
        activity.close()
        pynvml.nvmlShutdown()


@pytest.mark.gpu
def test_two_monitors_of_one_process_read_a_real_device():
    pynvml.nvmlInit()
    both = [Activity(pynvml.nvmlDeviceGetHandleByIndex(0)) for _ in range(2)]
    try:
        if both[0]._name is None:
            pytest.skip("this GPU has no activity counters")
        threads = [threading.Thread(target=lambda one=one: [one.read() for _ in range(300)]) for one in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert both[0].read().keys() == both[1].read().keys() != set()
    finally:
        for one in both:
            one.close()
        pynvml.nvmlShutdown()
