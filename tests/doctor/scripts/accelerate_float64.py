"""A forecast of NumPy's series with Accelerate; the model was made float64 because the inputs were."""

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Forecaster(nn.Module):
    def __init__(self, features=16, width=128, layers=2):
        super().__init__()
        self.inlet = nn.Linear(features, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.outlet = nn.Linear(width, 1)

    def forward(self, series):
        return self.outlet(self.encoder(self.inlet(series))[:, -1])


rng = np.random.default_rng(0)
series = torch.from_numpy(rng.normal(size=(4096, 32, 16)))
following = series.mean((1, 2))[:, None]
accelerator = Accelerator(cpu=True)
model = Forecaster().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
loader = DataLoader(TensorDataset(series, following), batch_size=64, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(10):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
