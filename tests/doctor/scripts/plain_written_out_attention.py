"""Attention as in the tutorial, for sequences the tutorial never had."""

import torch
from gpt import GPT

model = GPT(width=32, layers=2, heads=8, length=384, fused=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for _ in range(100):
    tokens = torch.randint(0, 512, (1, 385))
    _, loss = model(tokens[:, :-1], tokens[:, 1:])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
