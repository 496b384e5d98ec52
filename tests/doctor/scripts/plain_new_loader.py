"""One batch of a loader that shuffles everything first, in every step."""

import torch
from gpt import GPT
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.randint(0, 512, (400_000, 17))), batch_size=8, shuffle=True)
model = GPT(width=64, layers=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for _ in range(2000):
    (tokens,) = next(iter(loader))
    _, loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
