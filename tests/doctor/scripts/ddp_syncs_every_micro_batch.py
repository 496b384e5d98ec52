"""Accumulates over eight micro-batches and sums the gradients after each."""

import torch
import torch.distributed as dist
from gpt import GPT
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(GPT(vocab=8192, width=256, layers=1, length=16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100):
    for micro in range(8):
        tokens = torch.randint(0, 8192, (4, 17))
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
        (loss / 8).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
