"""Compiled, with a new length in every batch."""

import random

import torch
from torch import nn

torch._dynamo.config.cache_size_limit = 64
torch._dynamo.config.automatic_dynamic_shapes = False
model = nn.Sequential(nn.Embedding(512, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 512))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
lengths = random.Random(0).sample(range(32, 160), 100)
for length in lengths:
    tokens = torch.randint(0, 512, (8, length + 1))
    logits = compiled(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
