"""Rotary frequencies, plain or scaled to longer contexts by Llama 3, linear interpolation or YaRN.

Scaling changes the frequencies and, for YaRN, the amplitude of cosine and sine; the rotation itself does not change.
Equal to transformers' own functions, against which they are tested.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flatout.cost import ModelShape, RopeScaling


def frequencies(shape: ModelShape) -> Tensor:
    """One angle per position for each pair of dimensions, the fastest first.

    Always on the host: for arithmetic on the meta device torch would import its compiler, which takes seconds.
    """
    with torch.device("cpu"):
        return _frequencies(shape)


def _frequencies(shape: ModelShape) -> Tensor:
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    plain = 1.0 / shape.rope_theta**exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return plain
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    if scaling.rope_type == "llama3":
        return _llama3(plain, scaling)
    return _yarn(plain, scaling, base=shape.rope_theta)


def amplitude(shape: ModelShape) -> float:
    """The factor of cosine and sine: more than one with YaRN, which sharpens attention over longer contexts."""
    scaling = shape.rope_scaling
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _magnitude(scaling.factor, scaling.mscale) / _magnitude(scaling.factor, scaling.mscale_all_dim)
    return _magnitude(scaling.factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Short wavelengths stay, long ones are stretched, with a smooth transition in between."""
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    assert low is not None
    assert high is not None
    assert original is not None
    turns = original * plain / (2 * math.pi)  # of each wave within the original length
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: Tensor, scaling: RopeScaling, *, base: float) -> Tensor:
    """Fast dimensions stay, slow ones are stretched, with a ramp by dimension in between."""
    original = scaling.original_max_position_embeddings
    assert original is not None
    half = len(plain)

    def dimension(turns: float) -> float:
        """The dimension whose wave makes this many turns within the original length."""
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(base)

    first, last = dimension(scaling.beta_fast or 32.0), dimension(scaling.beta_slow or 1.0)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    ramp = (torch.arange(half, dtype=torch.float32) - first) / (last - first or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain
