"""Samples the next token: a pure function of the logits and of (seed, prompt, sample, position)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flatout.kernels.uniform import FIRST, GOLDEN, MASK, SECOND, signed
from flatout.sample.request import Keys, Sampling


def row_key(seed: int, prompt: int, sample: int) -> int:
    """64 bits that make one completion's random numbers differ from any other's (splitmix64)."""
    key = 0
    for part in (seed, prompt, sample):
        key = (key ^ part) + GOLDEN & MASK
        key = (key ^ key >> 30) * FIRST & MASK
        key = (key ^ key >> 27) * SECOND & MASK
        key ^= key >> 31
    return signed(key)


def numbered(num_prompts: int, samples: int, *, first: int, keys: Keys, seed: int) -> Iterator[tuple[int, int, int]]:
    """(prompt, sample, key of its random numbers), for `Sampler.generate`."""
    for i in range(num_prompts):
        for sample in range(first, first + samples):
            yield i, sample, row_key(seed, i if keys is None else keys[i], sample)


def draw(logits_RV: Tensor, uniform_R: Tensor, positions_R: Tensor, sampling: Sampling) -> Tensor:
    """Samples one token per row by inverting the cumulative probabilities in vocabulary order."""
    if sampling.min_tokens and sampling.stop_ids:
        # Tokens that would end a completion too early are never sampled.
        stops = torch.tensor(sorted(sampling.stop_ids), device=logits_RV.device)
        early_RV = torch.zeros_like(logits_RV, dtype=torch.bool)
        early_RV[:, stops[stops < logits_RV.shape[-1]]] = True
        early_RV &= (positions_R < sampling.min_tokens)[:, None]
        logits_RV = logits_RV.masked_fill(early_RV, float("-inf"))
    if sampling.temperature == 0:
        return logits_RV.argmax(-1)
    if 0 < sampling.top_k < logits_RV.shape[-1]:
        # Ties at the threshold are all kept.
        border_R1 = logits_RV.topk(sampling.top_k).values[:, -1:]
        logits_RV = logits_RV.masked_fill(logits_RV < border_R1, float("-inf"))
    p_RV = (logits_RV / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        p_RV = _nucleus(p_RV, sampling.top_p)
    cumulated_RV = p_RV.double().cumsum(-1)
    chosen_R1 = torch.searchsorted(cumulated_RV, uniform_R[:, None] * cumulated_RV[:, -1:], right=True)
    return chosen_R1[:, 0].clamp(max=logits_RV.shape[-1] - 1)


def _nucleus(p_RV: Tensor, top_p: float) -> Tensor:
    """Zeroes all but the likeliest tokens that together reach `top_p`; ties with the last of them are kept."""
    sorted_RV = p_RV.sort(dim=-1, descending=True).values
    before_RV = sorted_RV.cumsum(-1) - sorted_RV
    border_R1 = sorted_RV.masked_fill(before_RV >= top_p, 2.0).amin(-1, keepdim=True)
    return p_RV.where(p_RV >= border_R1, 0.0)
