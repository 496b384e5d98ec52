"""The router of a bank: a small network that chooses an adapter from the base model's state of the prompt.

The base reads the prompt without any adapter, its last hidden states are averaged over the prompt, and two layers turn
them into one logit for each adapter. A whole document has one choice: its adapter, or its mix of adapters.

Legend: N tokens, C hidden width, D documents, E adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.model.attention import Attend
from flatout.model.decoder import Decoder

LARGEST_TEMPERATURE = 10.0


@dataclass(frozen=True, kw_only=True)
class Routed:
    """The weights of the adapters for each token, and what the router said about each document."""

    mix_NE: Tensor
    logits_DE: Tensor | None = None  # None: the adapters were given
    probabilities_DE: Tensor | None = None  # at the temperature, without noise
    temperature: Tensor | None = None


class Router(nn.Module):
    """In fp32, whatever the compute type of the model is."""

    def __init__(
        self, names: Sequence[str], *, width: int, hidden: int, temperature: float, lowest: float, learned: bool
    ) -> None:
        """`temperature` is that of inference, and the first one if it is learned, never below `lowest`."""
        super().__init__()
        self.names, self.lowest, self.learned = tuple(names), lowest, learned
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, hidden)
        self.out = nn.Linear(hidden, len(self.names))
        logarithm = torch.tensor([temperature]).log()
        self.log_temperature: Tensor
        if learned:
            self.log_temperature = nn.Parameter(logarithm)
        else:
            self.register_buffer("log_temperature", logarithm)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Small random weights; the last layer is zero, so that all adapters are equally likely at first."""
        generator = torch.Generator().manual_seed(seed)
        bound = self.inner.in_features**-0.5
        self.inner.weight.copy_(torch.empty(self.inner.weight.shape).uniform_(-bound, bound, generator=generator))
        for parameter in (self.inner.bias, self.out.weight, self.out.bias):
            parameter.zero_()

    @property
    def temperature(self) -> Tensor:
        return self.log_temperature.exp().clamp(self.lowest, LARGEST_TEMPERATURE)

    def forward(self, state_DC: Tensor) -> Tensor:
        logits: Tensor = self.out(F.gelu(self.inner(self.norm(state_DC.float()))))
        return logits


@torch.no_grad()
def prompt_states(
    model: Decoder, tokens_N: Tensor, positions_N: Tensor, attend: Attend, prompt_N: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """The mean of the base model's last hidden states over the prompt of each document; 0 where there is none."""
    # By the forward pass of the root, which gathers sharded weights.
    hidden_NC: Tensor = model(tokens_N, positions_N, attend, lambda hidden_NC, _: hidden_NC)
    hidden_NC = hidden_NC.float() * prompt_N[:, None]
    both = torch.cat((hidden_NC, prompt_N[:, None]), dim=1)
    # In the order of the tokens, so that the same batch always gives the same sums.
    sums = torch.segment_reduce(both, "sum", offsets=cu_seqlens.long(), axis=0, unsafe=True)
    return sums[:, :-1] / sums[:, -1:].clamp(min=1.0)


def documents_of(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The document of each token."""
    place = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, place, right=True) - 1


def mixed(logits_DE: Tensor, temperature: Tensor, *, hard: bool, noise_DE: Tensor | None = None) -> Tensor:
    """The weights of the adapters: the softmax, or a choice with the gradient of the softmax (straight-through)."""
    soft = ((logits_DE if noise_DE is None else logits_DE + noise_DE) / temperature).softmax(-1)
    if not hard:
        return soft
    return F.one_hot(soft.argmax(-1), soft.shape[-1]).float() + soft - soft.detach()
