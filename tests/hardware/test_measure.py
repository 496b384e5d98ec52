from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.waiting import wait_until

from flatout.errors import EnvironmentLacks
from flatout.hardware import Hardware, detect, measure, named, with_cpu_facts
from flatout.hardware.measure import _COPY_BYTES, _SMALLEST, CpuFacts, _burst_s, _dtypes, _side, _thread_clock

torch = pytest.importorskip("torch")


def test_a_cpu_is_measured() -> None:
    measured = measure(named("CPU"), seconds=0.05)
    assert set(measured.flops) == {"fp32", "bf16"}
    assert all(0 < flops < math.inf for flops in measured.flops.values())
    assert measured.bandwidth is not None
    assert 0 < measured.bandwidth < math.inf
    assert [note.split(":")[0] for note in measured.notes] == ["fp32", "bf16", "bandwidth", "CPU"]
    assert json.loads(json.dumps(measured.to_json())) == measured.to_json()


def test_figures_are_operations_and_bytes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that says 0.05 s a call: products stay at the smallest size, and a copy reads and writes."""
    monkeypatch.setattr(sys.modules["flatout.hardware.measure"], "_cpu_clock", lambda call, num_calls: 0.05 * num_calls)
    measured = measure(named("CPU"), seconds=0.0)
    assert measured.flops == {dtype: pytest.approx(2 * _SMALLEST**3 / 0.05) for dtype in ("fp32", "bf16")}
    assert measured.bandwidth == pytest.approx(2 * _COPY_BYTES / 0.05)


def test_measuring_leaves_the_precision_of_products_as_it_was() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    measure(named("CPU"), seconds=0.0)
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.parametrize(("flops", "side"), [(1e8, 128), (1e11, 1024), (1e13, 4096), (1e15, 8192)])
def test_the_size_suits_the_device(flops: float, side: int) -> None:
    """On a device of so many operations a second, one product stays within a tenth of a second."""
    made: list[int] = []

    def product_of(side: int) -> Callable[[], object]:
        made.append(side)
        return lambda: None

    assert _side(product_of, clock=lambda call, num_calls: 2 * made[-1] ** 3 / flops) == side


def test_the_median_ignores_a_hiccup() -> None:
    bursts_s = iter([0.001, 0.01, 5.0, 0.01])  # the first only sizes the bursts: ten calls
    assert _burst_s(lambda: None, clock=lambda call, num_calls: next(bursts_s), budget_s=0.0) == 0.001


def test_dtypes_without_units_are_left_out() -> None:
    assert _dtypes(named("T4")) == ["fp32", "fp16"]
    assert _dtypes(named("A100-40GB")) == ["fp32", "tf32", "fp16", "bf16"]
    assert _dtypes(named("H200")) == ["fp32", "tf32", "fp16", "bf16", "fp8"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_that_is_not_here_cannot_be_measured() -> None:
    with pytest.raises(EnvironmentLacks, match=r"CUDA build of torch|no driver"):  # by the build of torch
        measure(named("H200"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_reaches_most_of_its_datasheet_and_no_more() -> None:
    hardware = detect()
    measured = measure(hardware, seconds=0.3)
    assert set(measured.flops) == set(_dtypes(hardware))
    for dtype, peak in hardware.peak_flops.items():
        assert 0.3 * peak < measured.flops[dtype] < 1.1 * peak, dtype
    if hardware.bandwidth is not None:
        assert measured.bandwidth is not None
        assert 0.5 * hardware.bandwidth < measured.bandwidth < 1.05 * hardware.bandwidth
    total_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    assert hardware.memory_gib == pytest.approx(total_gib, rel=0.01)


# The CPU's facts in the cache


FREE_CORES = sys.modules["flatout.hardware.measure"].free_cores


@pytest.fixture(autouse=True)
def _an_idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["flatout.hardware.measure"], "free_cores", lambda allowed: allowed)


def found_cpu(**changes: Any) -> Hardware:
    return replace(named("CPU"), cpu="a CPU", num_cpus=2, **changes)


def test_a_cpu_is_measured_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def facts(cpu: str | None) -> CpuFacts:
        measured.append(cpu)
        return CpuFacts(cpu=cpu, torch=metadata.version("torch"), flops={"fp32": 2e11, "bf16": 1e11}, process_gib=0.3)

    monkeypatch.setattr(sys.modules["flatout.hardware.measure"], "_cpu_facts", facts)
    known = with_cpu_facts(found_cpu(), cache=tmp_path)
    assert known == replace(with_cpu_facts(found_cpu(), cache=tmp_path), process_gib=known.process_gib)
    assert (known.peak_flops, known.peak_source) == ({"fp32": 4e11, "bf16": 2e11}, "measured"), "two threads"
    assert known.process_gib is not None
    assert known.process_gib > 0.05, "what this process itself takes"
    assert with_cpu_facts(found_cpu(), cache=tmp_path, num_ranks=2).peak_flops["fp32"] == 2e11, "one thread for each"
    assert measured == ["a CPU"], "the next times it is read"
    (file,) = (tmp_path / "cpu").iterdir()
    for damage in ("{", "{}", file.read_text().replace("2e+11", "-1").replace("200000000000.0", "-1")):
        file.write_text(damage)
        assert with_cpu_facts(found_cpu(), cache=tmp_path).peak_flops["fp32"] == 4e11
    assert measured == ["a CPU"] * 4


def test_the_first_product_of_a_data_type_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch generates its kernel then: bf16 units that are five times as fast as fp32 looked 300 times as slow."""
    module, made = sys.modules["flatout.hardware.measure"], []

    def product(dtype: str, side: int, *, device: object) -> list[object]:
        made.append(found := [dtype, side, 0])
        return found

    def clock(call: list[Any]) -> float:
        call[2] += 1
        first = 30.0 if call[2] == 1 else 1.0
        return first * 2 * call[1] ** 3 / (5e11 if call[0] == "bf16" else 1e11)

    monkeypatch.setattr(module, "_product", product)
    monkeypatch.setattr(module, "_thread_clock", clock)
    facts = module._cpu_facts("a CPU", seconds=0.0)
    assert facts.flops == {"fp32": pytest.approx(1e11), "bf16": pytest.approx(5e11)}
    assert len(made) == 3, "fp32, a small bf16 product, and a large one, as the small one was fast"


def test_time_spent_waiting_for_a_core_does_not_count() -> None:
    assert _thread_clock(lambda: time.sleep(0.5)) < 0.25


def test_nothing_is_measured_where_there_is_a_gpu_or_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_cpu_facts(named("H200"), cache=tmp_path) == named("H200")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch", None)  # importing it now fails
        assert with_cpu_facts(found_cpu(), cache=tmp_path) == found_cpu()

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert with_cpu_facts(found_cpu(), cache=tmp_path) == found_cpu()
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_cache_that_cannot_be_written_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    known = with_cpu_facts(found_cpu(), cache=tmp_path / "file")
    assert known.peak_flops["fp32"] > 0
    assert known.peak_flops["bf16"] > 0


def test_kinds_take_turns_and_noise_is_called_noise() -> None:
    from flatout.hardware.measure import _in_turns, _noise

    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in ("fp32", "bf16")}

    def clock(call, num_calls: int) -> float:
        call()
        return 1.0

    taken = _in_turns(calls, clock=clock, budget_s=0.0)
    assert taken == {"fp32": [1.0] * 3, "bf16": [1.0] * 3}
    assert order[-6:] == ["fp32", "bf16"] * 3
    assert _noise([1.0, 1.1, 1.2]) == ""
    assert _noise([1.0, 1.1, 2.0]) == "; noise: repeats differ by a factor of 2.0"


@pytest.fixture
def machine() -> Any:
    return sys.modules["flatout.hardware.measure"]


@pytest.mark.parametrize(
    ("idle", "own", "free"),
    [(0.8, 0.0, 4), (0.75, 0.0, 4), (0.0, 0.8, 4), (0.4, 0.2, 3), (0.2, 0.0, 1), (0.0, 0.0, 1)],
)
def test_cores_that_others_use_are_not_free(
    machine: Any, monkeypatch: pytest.MonkeyPatch, idle: float, own: float, free: int
) -> None:
    idles, owns = iter((0.0, idle)), iter((0.0, own))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(machine, "_idle_s", lambda _: next(idles))
    monkeypatch.setattr(machine, "_own_cpu_s", lambda: next(owns))
    assert FREE_CORES(8, seconds=0.2) == free


def test_a_child_belongs_to_the_run_itself(machine: Any) -> None:
    before = machine._own_cpu_s()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        wait_until(lambda: psutil.Process(child.pid).cpu_times().user > 0.1)
        assert machine._own_cpu_s() - before > 0.1
    finally:
        child.kill()
        child.wait()
