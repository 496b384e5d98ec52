"""Anomaly detection was switched on for a bug last month."""

import torch
from torch import nn

torch.autograd.set_detect_anomaly(True)
model = nn.Sequential(
    nn.Embedding(512, 64),
    *(m for _ in range(10) for m in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())),
    nn.Linear(64, 512),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(200):
    tokens = torch.randint(0, 512, (8, 33))
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
