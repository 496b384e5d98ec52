"""A nanoGPT-style loop: micro-batches, autocast, a GradScaler, clipping."""

import torch
from counted import saw, stepped
from gpt import GPT

torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu")
data = torch.randint(0, 512, (100_000,))


def batch():
    # Small: a CPU without bf16 takes seconds for each thousand tokens.
    at = torch.randint(len(data) - 33, (2,))
    return torch.stack([data[i : i + 32] for i in at]), torch.stack([data[i + 1 : i + 33] for i in at])


for _ in range(60):
    for _ in range(4):
        x, y = batch()
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            _, loss = model(x, y)
        saw(x.numel())
        scaler.scale(loss / 4).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    stepped()
