"""Hundreds of small adapters, stepped one by one."""

import torch
from torch import nn


class Adapters(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.pairs = nn.ModuleList(nn.Linear(32, 32) for _ in range(200))
        self.head = nn.Linear(32, 64)

    def forward(self, tokens):
        x = self.table(tokens)
        weight = torch.stack([pair.weight for pair in self.pairs]).mean(0)
        bias = torch.stack([pair.bias for pair in self.pairs]).mean(0)
        return self.head(nn.functional.linear(x, weight, bias))


model = Adapters()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(300):
    tokens = torch.randint(0, 64, (2, 129))
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
