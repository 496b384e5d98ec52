import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from tests.waiting import wait_until

from flatout.probe import monitor
from flatout.probe.monitor import Monitor


def monitor_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "flatout-monitor"]


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML of one GPU that cannot tell its power, as under MIG."""

    def refuse(*_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def by_index(index: int) -> str:
        if index != 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return "handle"

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=2 << 30, total=8 << 30),
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=75),
        "nvmlDeviceGetPowerUsage": refuse,
        "nvmlDeviceGetTemperature": lambda *_: 60,
        "nvmlDeviceGetClockInfo": lambda *_: 1980,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _: pynvml.nvmlClocksEventReasonSwPowerCap,
    }.items():
        monkeypatch.setattr(pynvml, name, value)


@pytest.mark.usefixtures("no_nvml")
def test_without_nvml_there_are_host_numbers_only():
    samples: list[Mapping[str, Any]] = []
    watcher = Monitor(interval_s=0.01, on_sample=samples.append)
    assert watcher.latest() == {}
    with watcher:
        assert watcher.latest()["process_rss_gib"] > 0  # the first sample is there at once
        assert "cpu" not in samples[0]  # and claims nothing about a time not yet watched
        wait_until(lambda: len(samples) >= 3)
    assert "gpus" not in samples[-1]
    assert set(watcher.utilisation()) == {"cpu", "ram"}
    assert all(0 <= share <= 1 for share in watcher.utilisation().values())
    assert watcher.peak["process_rss_gib"] == max(sample["process_rss_gib"] for sample in samples)
    assert [sample["time"] for sample in samples] == sorted(sample["time"] for sample in samples)


@pytest.mark.usefixtures("no_nvml")
def test_the_first_cpu_share_covers_a_time_that_was_watched(monkeypatch: pytest.MonkeyPatch):
    calls: dict[int, int] = {}

    def cpu_percent() -> float:  # as psutil does: a thread's first call knows no time before it and says zero
        ident = threading.get_ident()
        calls[ident] = calls.get(ident, 0) + 1
        return 0.0 if calls[ident] == 1 else 50.0

    monkeypatch.setattr(monitor.psutil, "cpu_percent", cpu_percent)
    with Monitor(interval_s=0.01) as watcher:
        wait_until(lambda: "cpu" in watcher.latest())
        assert watcher.latest()["cpu"] == 0.5


@pytest.mark.usefixtures("no_nvml")
def test_the_thread_is_gone_after_stop_and_can_start_again():
    watcher = Monitor(interval_s=60)  # stopping does not wait for the interval
    for _ in range(2):
        watcher.start()
        (thread,) = monitor_threads()
        assert thread.daemon
        with pytest.raises(RuntimeError, match="already running"):
            watcher.start()
        watcher.stop()
        assert monitor_threads() == []
    watcher.stop()


@pytest.mark.usefixtures("no_nvml")
def test_a_failing_receiver_is_dropped_and_watching_goes_on():
    times = []

    def fail(sample: Mapping[str, Any]) -> None:
        times.append(sample["time"])
        raise OSError("no room")

    with Monitor(interval_s=0.01, on_sample=fail) as watcher:
        first = watcher.latest()["time"]
        wait_until(lambda: watcher.latest()["time"] > first)
    assert times == [first]


@pytest.mark.usefixtures("one_gpu")
def test_a_metric_that_cannot_be_read_is_absent():
    with Monitor() as watcher:
        (gpu,) = watcher.latest()["gpus"]
    assert gpu == {
        "index": 0,
        "memory_gib": 2.0,
        "memory_total_gib": 8.0,
        "throttle": ["power_cap"],
        "busy": 0.75,
        "temperature_c": 60,
        "sm_clock_mhz": 1980,
    }
    assert watcher.utilisation()["gpu"] == 0.75
    assert watcher.utilisation()["gpu_memory"] == 0.25
    assert watcher.peak["gpu_memory_gib"] == 2.0
    assert "gpu_power_w" not in watcher.peak


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(("visible", "count"), [(None, 1), ("0", 1), ("", 0), ("-1", 0), ("0,7", 1), ("7,0", 0)])
def test_only_visible_gpus_are_watched(monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int):
    def unknown(_: str) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", unknown)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(monitor.visible_gpus()) == count


@pytest.mark.gpu
def test_a_real_gpu_is_seen():
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        pytest.skip("needs an NVIDIA driver")
    with Monitor() as watcher:
        gpu = watcher.latest()["gpus"][0]
    assert 0 < gpu["memory_gib"] < gpu["memory_total_gib"]
    assert gpu["power_w"] > 0
    assert 0 <= gpu["busy"] <= 1
    assert "throttle" in gpu
