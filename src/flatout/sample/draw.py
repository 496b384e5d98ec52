"""Which token comes next: a pure function of the logits and of (seed, prompt, sample, position)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flatout.sample.request import Keys, Sampling

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def row_key(seed: int, prompt: int, sample: int) -> int:
    """64 bits that tell one completion's draws from any other's (splitmix64)."""
    key = 0
    for part in (seed, prompt, sample):
        key = (key ^ part) + _GOLDEN & _MASK
        key = (key ^ key >> 30) * _FIRST & _MASK
        key = (key ^ key >> 27) * _SECOND & _MASK
        key ^= key >> 31
    return _signed(key)


def numbered(num_prompts: int, samples: int, *, first: int, keys: Keys, seed: int) -> Iterator[tuple[int, int, int]]:
    """(prompt, sample, key of its draws), for `Sampler.generate`."""
    for i in range(num_prompts):
        for sample in range(first, first + samples):
            yield i, sample, row_key(seed, i if keys is None else keys[i], sample)


def uniform(keys_R: Tensor, positions_R: Tensor) -> Tensor:
    """A number in [0, 1) for each row at its position; on the device, with no state."""
    x = keys_R + (positions_R + 1) * _signed(_GOLDEN)
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND)
    x = x ^ _shifted(x, 31)
    return _shifted(x, 11).double() * 2.0**-53


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros: the bits are an unsigned number's."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def draw(logits_RV: Tensor, uniform_R: Tensor, positions_R: Tensor, sampling: Sampling) -> Tensor:
    """One token a row, by the inverse of the cumulated probabilities in the vocabulary's own order."""
    if sampling.min_tokens and sampling.stop_ids:
        # What would end a completion too early is never drawn.
        stops = torch.tensor(sorted(sampling.stop_ids), device=logits_RV.device)
        early_RV = torch.zeros_like(logits_RV, dtype=torch.bool)
        early_RV[:, stops[stops < logits_RV.shape[-1]]] = True
        early_RV &= (positions_R < sampling.min_tokens)[:, None]
        logits_RV = logits_RV.masked_fill(early_RV, float("-inf"))
    if sampling.temperature == 0:
        return logits_RV.argmax(-1)
    if 0 < sampling.top_k < logits_RV.shape[-1]:
        # Ties at the border all stay.
        border_R1 = logits_RV.topk(sampling.top_k).values[:, -1:]
        logits_RV = logits_RV.masked_fill(logits_RV < border_R1, float("-inf"))
    p_RV = (logits_RV / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        p_RV = _nucleus(p_RV, sampling.top_p)
    cumulated_RV = p_RV.double().cumsum(-1)
    chosen_R1 = torch.searchsorted(cumulated_RV, uniform_R[:, None] * cumulated_RV[:, -1:], right=True)
    return chosen_R1[:, 0].clamp(max=logits_RV.shape[-1] - 1)


def _nucleus(p_RV: Tensor, top_p: float) -> Tensor:
    """The likeliest tokens that together reach `top_p`, and all that are as likely as the last of them; the others
    at zero."""
    sorted_RV = p_RV.sort(dim=-1, descending=True).values
    before_RV = sorted_RV.cumsum(-1) - sorted_RV
    border_R1 = sorted_RV.masked_fill(before_RV >= top_p, 2.0).amin(-1, keepdim=True)
    return p_RV.where(p_RV >= border_R1, 0.0)
