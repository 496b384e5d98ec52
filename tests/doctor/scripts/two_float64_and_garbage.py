"""float64 by accident, and gc.collect() by habit."""

import gc

import torch
from torch import nn

index = [{"row": i, "name": str(i)} for i in range(150_000)]
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(200):
    x, y = torch.randn(768, 512).double(), torch.randint(0, 10, (768,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    gc.collect()
