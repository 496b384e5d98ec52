"""Shared helpers of the kernel files: whether Triton can run, and tile sizes."""

from __future__ import annotations

import torch
import triton
from torch import Tensor


def interpreted() -> bool:
    """Whether kernels run interpreted on the CPU, as in the tests (TRITON_INTERPRET=1)."""
    return bool(triton.knobs.runtime.interpret)


def width(columns: int) -> int:
    """The tile width that holds a row: the next power of two."""
    return int(triton.next_power_of_2(columns))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def num_processors(x: Tensor) -> int:
    """Streaming multiprocessors of the tensor's device."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
