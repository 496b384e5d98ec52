"""nanoGPT's loop as it should be: a memory map, accumulation, a fused optimizer."""

import os
import tempfile

import numpy as np
import torch
from gpt import GPT

gradient_accumulation_steps, batch_size, block_size = 2, 8, 128
path = os.path.join(tempfile.mkdtemp(), "train.bin")
np.random.default_rng(0).integers(0, 512, 200_000).astype(np.uint16).tofile(path)


def get_batch():
    data = np.memmap(path, dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


model = GPT(width=128, layers=3)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
X, Y = get_batch()
for iter_num in range(100):
    for micro_step in range(gradient_accumulation_steps):
        _, loss = model(X, Y)
        X, Y = get_batch()
        (loss / gradient_accumulation_steps).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % 10 == 0:
        print(f"iter {iter_num}: loss {loss.item():.4f}")
