"""One of two ranks reads its rows from a slower disk."""

import time

import torch
import torch.distributed as dist
from gpt import GPT
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Shard(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, i):
        if dist.get_rank() == 1:
            time.sleep(0.015)
        return torch.randint(0, 512, (33,))


dist.init_process_group("gloo")
model = DistributedDataParallel(GPT(width=64, layers=1, length=32))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for batch in DataLoader(Shard(), batch_size=8):
    _, loss = model(batch[:, :-1], batch[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
