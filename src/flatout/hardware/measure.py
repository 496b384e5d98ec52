"""Measures what the datasheet states: a large matmul per dtype, and a copy within the device's memory.

`flatout hardware --measure` prints it next to the datasheet. Figures are sustained, not a first burst: under load a
card drops to the clock that its power limit allows, and training runs at that clock.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import EnvironmentLacks, UsageError
from flatout.files import BadFile, read_json, sweep, typed, write_atomic
from flatout.hardware.detect import unsupported_build
from flatout.hardware.table import Hardware
from flatout.words import counted

if TYPE_CHECKING:
    import torch

_SMALLEST, _LARGEST = 64, 8192  # matrix sides
_LONGEST_CALL_S = 0.1  # a product is not made larger than this; bf16 on a CPU without units for it is 100 times slower
_SHORTEST_BURST_S = 0.01  # calls timed together last at least this, so that starting the clock does not count
_FEWEST_BURSTS = 3
_NOISE = 1.5  # repeats that differ by more than this factor are called noise
_CPU_SIDE = 512  # large enough for a core's best rate, and milliseconds even at a tenth of it
_SMALL_CPU_SIDE = 128  # enough to see whether there are units for a data type
_COPY_BYTES = 2**29  # far beyond any cache

Call = Callable[[], object]
Clock = Callable[[Call, int], float]  # total seconds of this many calls


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one device: FLOP/s by dtype, and memory bytes/s, reads and writes summed."""

    flops: Mapping[str, float]
    bandwidth: float | None
    notes: tuple[str, ...]  # how each figure was measured

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"notes": list(self.notes)}


def measure(hardware: Hardware, *, seconds: float = 1.0) -> Measured:
    """Measure the first GPU of this machine, or its CPU where `hardware` has no GPU; about `seconds` per figure."""
    try:
        import torch
    except ImportError as error:
        raise EnvironmentLacks("measuring needs torch: pip install 'flatout[train]'") from error

    if hardware.gpu is not None:
        _require_here(hardware.gpu, sm=hardware.sm)
    device = torch.device("cpu" if hardware.gpu is None else "cuda")
    clock = _cpu_clock if hardware.gpu is None else _cuda_clock
    flops: dict[str, float] = {}
    notes: list[str] = []
    try:
        sides: dict[str, int] = {}
        calls: dict[str, Call] = {}
        for dtype in _dtypes(hardware):
            with _fp32_precision("tf32" if dtype == "tf32" else "ieee"):
                sides[dtype] = _side(partial(_product, dtype, device=device), clock=clock)
                calls[dtype] = _product(dtype, sides[dtype], device=device)
        for dtype, bursts in _in_turns(calls, clock=clock, budget_s=seconds).items():
            flops[dtype] = 2 * sides[dtype] ** 3 / statistics.median(bursts)
            size = f"{sides[dtype]} x {sides[dtype]}"
            notes.append(f"{dtype}: {size} matmul, median over {seconds:g} s{_noise(bursts)}")
        copy_s = _burst_s(_copy(device), clock=clock, budget_s=seconds)
    except torch.OutOfMemoryError as error:
        raise EnvironmentLacks(
            f"too little free memory on {hardware.gpu} to measure it: stop other processes on it. ({error})"
        ) from error
    notes.append(f"bandwidth: copy of {_COPY_BYTES // 2**20} MiB, median over {seconds:g} s")
    if hardware.gpu is None:
        notes.append(f"CPU: {counted(torch.get_num_threads(), 'thread')}")
    return Measured(flops=flops, bandwidth=2 * _COPY_BYTES / copy_s, notes=tuple(notes))


@dataclass(frozen=True, kw_only=True)
class CpuFacts:
    """The file of one CPU in the cache: what one of its threads does."""

    cpu: str | None
    torch: str
    flops: Mapping[str, float]
    process_gib: float


def with_cpu_facts(hardware: Hardware, *, cache: Path, num_ranks: int = 1, remembered: bool = False) -> Hardware:
    """A CPU machine with its measured peak, for each of `num_ranks` processes, and what such a process takes.

    Measured once, in less than a second, and kept in `cache`. Without torch, and with a GPU, nothing is measured;
    nor where only what is `remembered` is wanted.
    """
    if hardware.gpu is not None:
        return hardware
    threads = max(1, (hardware.num_cpus or 1) // num_ranks)
    try:
        facts = _remembered(cache, cpu=hardware.cpu)
        if facts is None and remembered:
            return hardware
        if facts is None:
            facts = _cpu_facts(hardware.cpu)
            _remember(cache, facts)
    except (ImportError, OSError):  # torch is not installed, or cannot be loaded: the plan says that nothing is known
        return hardware
    # Ranks that start together would take each other for other processes.
    free = free_cores(hardware.num_cpus or 1) if num_ranks == 1 else None
    threads = threads if free is None else min(threads, free)
    # A process that has torch knows best what it takes itself.
    process_gib = _process_gib() if "torch" in sys.modules else facts.process_gib
    return replace(
        hardware,
        peak_flops={dtype: threads * flops for dtype, flops in facts.flops.items()},
        source=f"measured on one thread, times {threads}",
        peak_source="measured",
        free_cpus=free,
        process_gib=process_gib,
    )


def free_cores(allowed: int, *, seconds: float = 0.1) -> int | None:
    """How many of the cores that this process may use no other process keeps busy, at least one.

    What this process and its children use is not counted: they are the run itself. None where it cannot be measured.
    """
    import psutil

    try:
        cores = sorted(os.sched_getaffinity(0))
        own, idle = _own_cpu_s(), _idle_s(cores)
        time.sleep(seconds)
        # Idle time is counted in hundredths of a second, a core at a time.
        others = len(cores) * seconds - (_idle_s(cores) - idle) - (_own_cpu_s() - own)
    except (AttributeError, OSError, IndexError, psutil.Error):
        return None
    return max(1, min(allowed, len(cores) - round(max(0.0, others) / seconds)))


def _idle_s(cores: Sequence[int]) -> float:
    import psutil

    times = psutil.cpu_times(percpu=True)
    return float(sum(times[core].idle + getattr(times[core], "iowait", 0.0) for core in cores))


def _own_cpu_s() -> float:
    import psutil

    own, found = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            times = process.cpu_times()
            found += times.user + times.system
    return found


def _cpu_facts(cpu: str | None, *, seconds: float = 0.5) -> CpuFacts:
    """Measures one thread by its own CPU time, so that a busy machine gives the same answer as an idle one.

    The data types take turns, and the best of each counts: other processes can only make it slower, and the first
    product of a data type, for which torch generates its kernel, can take thirty times as long.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cpu_device = torch.device("cpu")
        products = {"fp32": _product("fp32", _CPU_SIDE, device=cpu_device)}
        small = _product("bf16", _SMALL_CPU_SIDE, device=cpu_device)
        flops = {"bf16": _flops(_SMALL_CPU_SIDE, [_thread_clock(small) for _ in range(_FEWEST_BURSTS)])}
        taken: dict[str, list[float]] = {"fp32": [_thread_clock(products["fp32"])]}
        # Without units for it, bf16 is a hundred times slower, and a small product tells that.
        if flops["bf16"] > _flops(_CPU_SIDE, taken["fp32"]) / 8:
            products["bf16"] = _product("bf16", _CPU_SIDE, device=cpu_device)
            taken["bf16"] = [_thread_clock(products["bf16"])]
        deadline = time.perf_counter() + seconds
        while len(taken["fp32"]) < _FEWEST_BURSTS or time.perf_counter() < deadline:
            for dtype, call in products.items():
                taken[dtype].append(_thread_clock(call))
    finally:
        torch.set_num_threads(before)
    flops |= {dtype: _flops(_CPU_SIDE, times) for dtype, times in taken.items()}
    return CpuFacts(cpu=cpu, torch=metadata.version("torch"), flops=flops, process_gib=_process_gib())


def _flops(side: int, times: Sequence[float]) -> float:
    return 2 * side**3 / min(times)


def _thread_clock(call: Call) -> float:
    """Seconds that this thread was running during the call; waiting for a core does not count."""
    start = time.thread_time()
    call()
    return max(time.thread_time() - start, 1e-6)


def _process_gib() -> float:
    import psutil

    return float(psutil.Process().memory_info().rss) / 2**30


def _remembered(cache: Path, *, cpu: str | None) -> CpuFacts | None:
    """The cached measurement; None if there is no valid one."""
    path = _cached(cache, cpu=cpu)
    try:
        found = typed(CpuFacts, read_json(path, limit=1 << 16), source=path)
    except (OSError, BadFile):
        return None
    same = (found.cpu, found.torch) == (cpu, metadata.version("torch"))
    possible = {"fp32", "bf16"} == set(found.flops) and all(0 < one < 1e18 for one in found.flops.values())
    return found if same and possible and 0 < found.process_gib < 1e6 else None


def _remember(cache: Path, facts: CpuFacts) -> None:
    path = _cached(cache, cpu=facts.cpu)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent)
        write_atomic(path, json.dumps(asdict(facts)).encode())
    except OSError:
        return  # a cache that cannot be written is measured again


def _cached(cache: Path, *, cpu: str | None) -> Path:
    name = f"one thread of {cpu}, torch {metadata.version('torch')}, best of several"
    return cache / "cpu" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"


def _require_here(gpu: str, *, sm: tuple[int, int] | None) -> None:
    import torch

    arch_list = torch.cuda.get_arch_list()
    if refusal := unsupported_build(sm=sm, arch_list=arch_list, torch_version=torch.__version__):
        raise EnvironmentLacks(refusal)
    if not torch.cuda.is_available():
        raise EnvironmentLacks(f"{gpu} cannot be measured: this machine has no GPU, or no driver for it")
    here = torch.cuda.get_device_name()
    if here not in gpu.split(" + "):  # as `detect` joins cards of several kinds
        raise UsageError(f"{gpu} is not on this machine, which has {here}: only this machine can be measured")


def _dtypes(hardware: Hardware) -> list[str]:
    """The dtypes with units of their own; the others are emulated, and nobody should train in them."""
    if hardware.gpu is None:
        return ["fp32", "bf16"]
    first_sm = {"fp32": (0, 0), "tf32": (8, 0), "fp16": (7, 0), "bf16": (8, 0), "fp8": (8, 9)}
    return [dtype for dtype, first in first_sm.items() if (hardware.sm or (0, 0)) >= first]


def _product(dtype: str, side: int, *, device: torch.device) -> Call:
    """One product of random square matrices. Random, because a GPU draws less power, and clocks higher, on zeros."""
    import torch

    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    if dtype == "fp8":
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()  # the kernel wants b column by column
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
    torch_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32)
    a, b = a.to(torch_dtype), b.to(torch_dtype)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _copy(device: torch.device) -> Call:
    import torch

    source, target = (torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def _side(product_of: Callable[[int], Call], *, clock: Clock) -> int:
    """The largest matrix this device multiplies in the time of one call, found by doubling."""
    side = _SMALLEST
    while side < _LARGEST:
        product = product_of(side)
        product()  # the first call also chooses and loads the kernel
        if 8 * clock(product, 1) > _LONGEST_CALL_S:  # twice the side is eight times the work
            break
        side *= 2
    return side


def _in_turns(calls: Mapping[str, Call], *, clock: Clock, budget_s: float) -> dict[str, list[float]]:
    """Seconds of one call of each kind, several times; the kinds take turns, so that all meet the same other load."""
    sizes = {}
    for dtype, call in calls.items():
        with _fp32_precision("tf32" if dtype == "tf32" else "ieee"):
            call()
            sizes[dtype] = max(1, round(_SHORTEST_BURST_S / max(clock(call, 1), 1e-6)))
    taken: dict[str, list[float]] = {dtype: [] for dtype in calls}
    deadline = time.perf_counter() + budget_s * len(calls)
    while min(map(len, taken.values())) < _FEWEST_BURSTS or time.perf_counter() < deadline:
        for dtype, call in calls.items():
            with _fp32_precision("tf32" if dtype == "tf32" else "ieee"):
                taken[dtype].append(clock(call, sizes[dtype]) / sizes[dtype])
    return taken


def _noise(bursts: list[float]) -> str:
    """Said of a figure whose repeats differ so much that something else uses the device."""
    ordered = sorted(bursts)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return f"; noise: repeats differ by a factor of {high / low:.1f}" if high > _NOISE * low else ""


def _burst_s(call: Call, *, clock: Clock, budget_s: float) -> float:
    """Seconds of one call, by the median of several bursts."""
    call()
    burst = max(1, round(_SHORTEST_BURST_S / max(clock(call, 1), 1e-6)))
    bursts_s: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(bursts_s) < _FEWEST_BURSTS or time.perf_counter() < deadline:
        bursts_s.append(clock(call, burst))
    return statistics.median(bursts_s) / burst


def _cpu_clock(call: Call, num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return time.perf_counter() - start


def _cuda_clock(call: Call, num_calls: int) -> float:
    import torch

    start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num_calls):
        call()
    end.record()
    end.synchronize()  # waits for the device: measuring is all that happens here
    return start.elapsed_time(end) / 1e3


@contextmanager
def _fp32_precision(precision: str) -> Iterator[None]:
    """fp32 products on CUDA in full precision (`ieee`) or on the tensor cores (`tf32`), and as before afterwards."""
    import torch

    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
