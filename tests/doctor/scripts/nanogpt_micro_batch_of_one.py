"""Twelve micro-batches of one short row each."""

import torch
from gpt import GPT

gradient_accumulation_steps, batch_size, block_size = 12, 1, 32
data = torch.randint(0, 512, (100_000,))


def get_batch():
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    rows = torch.stack([data[i : i + block_size + 1] for i in ix])
    return rows[:, :-1], rows[:, 1:]


model = GPT(width=64, layers=3, length=block_size)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for iter_num in range(200):
    for micro_step in range(gradient_accumulation_steps):
        X, Y = get_batch()
        _, loss = model(X, Y)
        (loss / gradient_accumulation_steps).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
