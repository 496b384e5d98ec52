"""NumPy made everything float64, and nobody noticed."""

import numpy as np
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
rng = np.random.default_rng(0)
features = torch.from_numpy(rng.normal(size=(4096, 512)))
labels = torch.from_numpy(rng.integers(0, 10, size=4096))

model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(200):
    rows = torch.randint(0, 4096, (256,))
    loss = nn.functional.cross_entropy(model(features[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
