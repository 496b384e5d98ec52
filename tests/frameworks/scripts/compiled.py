"""A compiled model."""

import torch
from counted import saw, stepped
from gpt import GPT

torch.manual_seed(0)
model = torch.compile(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(60):
    ids = torch.randint(0, 512, (8, 129))
    _, loss = model(ids[:, :-1], ids[:, 1:])
    saw(8 * 128)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    stepped()
