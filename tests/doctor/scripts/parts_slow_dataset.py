"""A model in parts that are called one by one, and a dataset that unpacks a whole shard for each row."""

import random
import zlib

import torch
from gpt import Block
from torch import nn
from torch.utils.data import DataLoader, Dataset

words = [f"word{i}" for i in range(512)]
number = {word: i for i, word in enumerate(words)}


class Shard(Dataset):
    packed = zlib.compress(" ".join(random.Random(0).choices(words, k=150_000)).encode())

    def __len__(self):
        return 10_000

    def __getitem__(self, i):
        ids = [number[word] for word in zlib.decompress(self.packed).decode().split()]
        return torch.tensor(ids[i : i + 65])


embedding, position = nn.Embedding(512, 128), nn.Embedding(64, 128)
blocks = nn.ModuleList(Block(128, 4) for _ in range(2))
norm, head = nn.LayerNorm(128), nn.Linear(128, 512, bias=False)
parts = (embedding, position, blocks, norm, head)
optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=3e-4, fused=True)
for rows in DataLoader(Shard(), batch_size=8, shuffle=True):
    x = embedding(rows[:, :-1]) + position(torch.arange(64))
    for block in blocks:
        x = block(x)
    logits = head(norm(x))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
