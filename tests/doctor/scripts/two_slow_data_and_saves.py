"""Slow rows, and a checkpoint every second step."""

import os
import tempfile
import time

import torch
from gpt import GPT
from torch.utils.data import DataLoader, Dataset


class Files(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, i):
        time.sleep(0.02)
        return torch.randint(0, 8192, (65,))


model = GPT(vocab=8192)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
with tempfile.TemporaryDirectory() as folder:
    for step, batch in enumerate(DataLoader(Files(), batch_size=8)):
        _, loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        for name in ("last.pt", "best.pt", "backup.pt", "copy.pt"):
            torch.save(state, os.path.join(folder, name))
