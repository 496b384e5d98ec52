"""No torch.optim: the updates are written out, over several micro-batches."""

import torch
from gpt import GPT

model = GPT(width=128, layers=3)
for _ in range(2000):
    for _ in range(2):
        tokens = torch.randint(0, 512, (12, 129))
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
        (loss / 2).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
