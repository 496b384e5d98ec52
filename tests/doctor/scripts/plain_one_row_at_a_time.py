"""Rows differ in length, so each goes through the model alone."""

import random

import torch
from gpt import GPT

pick = random.Random(0)
documents = [torch.randint(0, 512, (pick.randint(24, 40),)) for _ in range(2000)]
model = GPT(width=64, layers=4, length=40)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for _ in range(200):
    batch = pick.sample(documents, 8)
    for document in batch:
        row = document[None]
        _, loss = model(row[:, :-1], row[:, 1:])
        (loss / len(batch)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
