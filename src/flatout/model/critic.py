"""The critic of PPO: the return it expects at each token, from the policy's hidden states or from a trunk of its own.

It is a submodule of the policy's model, so that one optimizer, one checkpoint and one gradient reduction cover both.
Sampling and export leave it out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatout.model.attention import Attend
from flatout.model.decoder import Decoder


class Critic(nn.Module):
    def __init__(self, *, hidden: int, device: torch.device, trunk: Decoder | None = None) -> None:
        super().__init__()
        # Zero, so that the first advantages are the rewards themselves.
        self.weight = nn.Parameter(torch.zeros(hidden, device=device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))
        self.trunk = trunk
        if trunk is not None and trunk.head is not None:
            trunk.head.requires_grad_(False)  # no logits are taken from it

    def forward(self, hidden_NC: Tensor, *, tokens_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """`hidden_NC` are the policy's last hidden states."""
        if self.trunk is not None:
            hidden_NC = self.trunk.hidden(tokens_N, positions_N, attend)
        return hidden_NC.float() @ self.weight + self.bias
