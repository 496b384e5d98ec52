"""Times what the datasheet promises: a large matrix product per dtype, and a copy within the device's memory.

`flatout hardware --measure` prints it beside the datasheet. Figures are sustained, not a first burst: under load a
card falls to the clock its power limit allows, and that is where training runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from flatout.errors import EnvironmentLacks, UsageError
from flatout.hardware.detect import unsupported_build
from flatout.hardware.table import Hardware

if TYPE_CHECKING:
    import torch

_SMALLEST, _LARGEST = 64, 8192  # matrix sides
_LONGEST_CALL_S = 0.1  # a product is not made larger than this; bf16 on a CPU without units for it is 100 times slower
_SHORTEST_BURST_S = 0.01  # calls timed together last at least this, so that starting the clock does not count
_FEWEST_BURSTS = 3
_COPY_BYTES = 2**29  # far beyond any cache

Call = Callable[[], object]
Clock = Callable[[Call, int], float]  # seconds that so many calls took together


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one device did: operations/s by dtype, and bytes/s of its memory, read and written summed."""

    flops: Mapping[str, float]
    bandwidth: float | None
    notes: tuple[str, ...]  # how each figure came about

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
        for dtype in _dtypes(hardware):
            with _fp32_precision("tf32" if dtype == "tf32" else "ieee"):
                product_of = partial(_product, dtype, device=device)
                side = _side(product_of, clock=clock)
                product_s = _median_s(product_of(side), clock=clock, budget_s=seconds)
            flops[dtype] = 2 * side**3 / product_s
            notes.append(f"{dtype}: product of {side} x {side} matrices, median over {seconds:g} s")
        copy_s = _median_s(_copy(device), clock=clock, budget_s=seconds)
    except torch.OutOfMemoryError as error:
        raise EnvironmentLacks(
            f"too little free memory on {hardware.gpu} to measure it: end what else runs there. ({error})"
        ) from error
    notes.append(f"bandwidth: copy of {_COPY_BYTES // 2**20} MiB, median over {seconds:g} s")
    if hardware.gpu is None:
        notes.append(f"CPU: {torch.get_num_threads()} threads")
    return Measured(flops=flops, bandwidth=2 * _COPY_BYTES / copy_s, notes=tuple(notes))


def bf16_ratio(*, seconds: float = 0.05) -> float:
    """How many times as fast as fp32 this CPU multiplies in bf16: below 1 without units for it."""
    import torch

    device, taken = torch.device("cpu"), {}
    # One small size for both: on a CPU that emulates bf16 a larger product would take seconds.
    for dtype in ("fp32", "bf16"):
        taken[dtype] = _median_s(_product(dtype, 256, device=device), clock=_cpu_clock, budget_s=seconds)
    return taken["fp32"] / taken["bf16"]


def _require_here(gpu: str, *, sm: tuple[int, int] | None) -> None:
    import torch

    arch_list = torch.cuda.get_arch_list()
    if refusal := unsupported_build(sm=sm, arch_list=arch_list, torch_version=torch.__version__):
        raise EnvironmentLacks(refusal)
    here = torch.cuda.get_device_name()
    if here not in gpu.split(" + "):  # as `detect` joins cards of several kinds
        raise UsageError(f"{gpu} is not here, {here} is: only the machine at hand can be measured")


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


def _median_s(call: Call, *, clock: Clock, budget_s: float) -> float:
    """Median seconds of one call."""
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
