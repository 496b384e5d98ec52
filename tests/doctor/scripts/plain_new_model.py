"""Every step begins with a model that knows nothing."""

import torch
from gpt import GPT

for _ in range(2000):
    model = GPT(width=64, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(0, 512, (8, 65))
    _, loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
