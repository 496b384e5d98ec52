"""A learning rate from a paper with another batch size, and no clipping."""

import torch
from gpt import GPT

torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.SGD(model.parameters(), lr=300.0)
for _ in range(100):
    tokens = torch.randint(0, 512, (8, 65))
    _, loss = model(tokens[:, :-1], tokens[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
