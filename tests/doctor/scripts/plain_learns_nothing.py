"""A learning rate with three zeros too many."""

import torch
from gpt import GPT

torch.manual_seed(0)
model = GPT(width=128, layers=3)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-7, fused=True)
for _ in range(100):
    start = torch.randint(0, 512, (12, 1))
    tokens = (start + torch.arange(129)) % 512
    _, loss = model(tokens[:, :-1], tokens[:, 1:])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
