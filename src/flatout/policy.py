"""The arithmetic of policy gradients: advantages, ratios and clipping, KL estimators, aggregation, GAE. Pure functions.

Rewards and values are NumPy arrays on the host, where rollouts are graded; what a training step differentiates is in
torch. Every aggregation of token losses is a weight for each token, computed with the batch. The step divides the
weighted sum by all target tokens, which gives the aggregated loss for any micro-batch and any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.config.settings import Aggregation, Algorithm, KlEstimator

Estimator = Literal["group", "group_mean", "leave_one_out"]
Floats = NDArray[np.float64]

# Below this the spread of a group's rewards is rounding, and above it division by it is stable.
STD_EPS = 1e-6
# Log-ratios beyond this are clamped: their exponential would overflow.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, kw_only=True)
class Method:
    """What an algorithm is made of, where the settings do not say otherwise."""

    estimator: Estimator | None  # None: generalised advantage estimation with a critic
    aggregation: Aggregation = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    by_sequence: bool = False  # one ratio for all tokens of a sequence


ALGORITHMS: Mapping[Algorithm, Method] = {
    "grpo": Method(estimator="group"),
    "dr_grpo": Method(estimator="group_mean", aggregation="seq-mean-token-sum-norm"),
    "dapo": Method(estimator="group", clip_high=0.28),
    "gspo": Method(
        estimator="group", aggregation="seq-mean-token-mean", clip_low=3e-4, clip_high=4e-4, by_sequence=True
    ),
    "rloo": Method(estimator="leave_one_out"),
    "ppo": Method(estimator=None),
}


def group_advantages(rewards_PS: Floats, *, estimator: Estimator) -> Floats:
    """Advantage of each sample over the other samples of its prompt; P prompts, S samples.

    `group` divides by the standard deviation with Bessel's correction (GRPO), `group_mean` does not (Dr. GRPO),
    `leave_one_out` compares with the mean of the others (RLOO). Groups whose rewards are all equal get exactly zero.
    """
    samples = rewards_PS.shape[1]
    if samples < 2:
        raise ValueError(f"{samples} sample per prompt has nothing to be compared with: at least 2 are needed")
    same = (rewards_PS == rewards_PS[:, :1]).all(axis=1, keepdims=True)
    centred = np.where(same, 0.0, rewards_PS - rewards_PS.mean(axis=1, keepdims=True))
    scale: Floats | float = 1.0
    if estimator == "leave_one_out":
        scale = samples / (samples - 1)
    elif estimator == "group":
        scale = 1 / (rewards_PS.std(axis=1, ddof=1, keepdims=True) + STD_EPS)
    advantages: Floats = centred * scale
    return advantages


def overlong_penalty(length: int, *, limit: int, buffer: int) -> float:
    """0 up to `limit - buffer` tokens, then down linearly to -1 at `limit`."""
    return -min(1.0, max(0.0, (length - (limit - buffer)) / buffer)) if buffer > 0 else 0.0


def token_weights(
    lengths: NDArray[np.int64],
    *,
    aggregation: Aggregation,
    max_length: int | None = None,
    tokens: float | None = None,
    sequences: float | None = None,
) -> Floats:
    """Weight of the tokens of each sequence, all sequences of a step together.

    The weighted sum over tokens, divided by the number of tokens, is the aggregated loss. `tokens` and `sequences` are
    those of the whole step, where the given sequences are only a part of it.
    """
    count = len(lengths)
    tokens = float(lengths.sum()) if tokens is None else tokens
    if aggregation == "token-mean":
        return np.ones(count)
    per_sequence: Floats = np.full(count, tokens / (sequences or count))
    if aggregation == "seq-mean-token-mean":
        per_sequence = per_sequence / lengths
    elif aggregation == "seq-mean-token-sum-norm":
        if max_length is None:
            raise ValueError(f"{aggregation} divides by the length limit, which is not given")
        per_sequence = per_sequence / max_length
    return per_sequence


def gae(rewards_T: Floats, values_T: Floats, *, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Advantages and returns of one sequence by generalised advantage estimation; nothing follows its last token."""
    advantages = np.zeros_like(values_T)
    following_value = following = 0.0
    for t in range(len(values_T) - 1, -1, -1):
        delta = rewards_T[t] + gamma * following_value - values_T[t]
        following = delta + gamma * lam * following
        advantages[t], following_value = following, values_T[t]
    return advantages, advantages + values_T


def log_ratio(logp_N: Tensor, old_logp_N: Tensor) -> Tensor:
    return (logp_N - old_logp_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_log_ratio(log_ratio_N: Tensor, sequence_N: Tensor, *, trained_N: Tensor, num_sequences: int) -> Tensor:
    """The mean log-ratio of each token's sequence (GSPO), with the gradient of that token's own ratio."""
    trained = trained_N.to(log_ratio_N.dtype)
    sums = log_ratio_N.new_zeros(num_sequences).index_add(0, sequence_N, log_ratio_N * trained)
    counts = log_ratio_N.new_zeros(num_sequences).index_add(0, sequence_N, trained).clamp(min=1.0)
    mean_N = (sums / counts).index_select(0, sequence_N)
    return mean_N.detach() + log_ratio_N - log_ratio_N.detach()


def policy_loss(
    log_ratio_N: Tensor, advantage_N: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate loss of each token, and whether clipping changed it.

    `dual_clip` bounds the loss where the advantage is negative and the ratio large, at -advantage * dual_clip.
    """
    ratio = log_ratio_N.exp()
    plain = -advantage_N * ratio
    loss = torch.maximum(plain, -advantage_N * ratio.clamp(1 - clip_low, 1 + clip_high))
    clipped = loss > plain
    if dual_clip is not None:
        bounded = torch.where(advantage_N < 0, torch.minimum(loss, -advantage_N * dual_clip), loss)
        clipped = clipped | (bounded < loss)
        loss = bounded
    return loss, clipped


def value_loss(value_N: Tensor, old_value_N: Tensor, return_N: Tensor, *, clip: float | None) -> Tensor:
    """Half the squared error of each token; with `clip`, at least that of the value clipped to the old one's range."""
    loss = (value_N - return_N).square()
    if clip is not None:
        near = old_value_N + (value_N - old_value_N).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - return_N).square())
    return 0.5 * loss


def kl(logp_N: Tensor, reference_N: Tensor, *, estimator: KlEstimator) -> Tensor:
    """An estimate of KL(policy || reference) at each token, from the token that the policy sampled."""
    difference = log_ratio(reference_N, logp_N)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return difference.exp() - difference - 1


def importance_weights(logp_N: Tensor, sampler_logp_N: Tensor, *, limit: float) -> Tensor:
    """How much likelier the trainer holds each token than the sampler that drew it, truncated at `limit`.

    Per token: a product over thousands of tokens is decided by rounding.
    """
    return log_ratio(logp_N.detach(), sampler_logp_N).exp().clamp(max=limit)
