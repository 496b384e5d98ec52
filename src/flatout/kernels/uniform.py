"""A stateless random number in [0, 1) for a row at a position, in torch; the sampling kernel computes the same."""

from __future__ import annotations

from torch import Tensor

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1


def signed(value: int) -> int:
    """The same 64 bits as a signed integer, as torch stores them."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def uniform(keys_R: Tensor, positions_R: Tensor) -> Tensor:
    """Random numbers by splitmix64, on the device."""
    x = keys_R + (positions_R + 1) * signed(GOLDEN)
    x = (x ^ _shifted(x, 30)) * signed(FIRST)
    x = (x ^ _shifted(x, 27)) * signed(SECOND)
    x = x ^ _shifted(x, 31)
    return _shifted(x, 11).double() * 2.0**-53


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical shift to the right, which fills with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
