"""Rows padded to the longest of all, and an evaluation every second step."""

import torch
import torch.nn.functional as F
from gpt import GPT

model = GPT(length=256)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)


def batch(rows=8):
    ids = torch.randint(1, 512, (rows, 257))
    lengths = torch.randint(20, 60, (rows, 1))
    return ids.masked_fill(torch.arange(257) >= lengths, 0)


@torch.no_grad()
def evaluate():
    model.eval()
    ids = batch(8)
    model(ids[:, :-1])
    model.train()


for step in range(100):
    ids = batch()
    logits, _ = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 2 == 0:
        evaluate()
