"""A collate function that does what should have been done once."""

import random
import re

import torch
from accelerate import Accelerator
from gpt import GPT
from torch.utils.data import DataLoader

sentences = [" ".join(random.Random(i).choices(["alpha", "beta", "gamma", "delta", "42"], k=3000)) for i in range(500)]


def collate(batch):
    rows = []
    for text in batch:
        for _ in range(4):
            words = re.findall(r"\w+|\s", text.lower())
        rows.append(torch.tensor([hash(word) % 512 for word in words[:129]]))
    return torch.stack(rows)


accelerator = Accelerator(cpu=True)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
loader = DataLoader(sentences * 10, batch_size=8, collate_fn=collate, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    _, loss = model(batch[:, :-1], batch[:, 1:].contiguous())
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
