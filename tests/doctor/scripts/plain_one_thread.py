"""A line copied from a data-loading tutorial."""

import torch
from gpt import GPT

torch.set_num_threads(1)
model = GPT(width=192, layers=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for _ in range(100):
    tokens = torch.randint(0, 512, (8, 65))
    _, loss = model(tokens[:, :-1], tokens[:, 1:])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
