"""Frees memory after every step, to be safe."""

import gc

import torch
from gpt import GPT

vocabulary = [{"id": i, "text": str(i), "merges": [str(i), str(i + 1)]} for i in range(200_000)]
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for _ in range(100):
    tokens = torch.randint(0, 512, (8, 65))
    _, loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
