"""The learning rate changes, so somebody makes a new optimizer for it."""

import torch
from gpt import GPT

model = GPT(vocab=64, width=16, layers=12, heads=2, length=16)
for step in range(2000):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 / (1 + step))
    tokens = torch.randint(0, 64, (2, 9))
    _, loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
