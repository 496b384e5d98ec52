"""Data parallel by torchrun."""

import torch
import torch.distributed as dist
from counted import saw, stepped
from gpt import GPT
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(60):
    ids = torch.randint(0, 512, (8, 129))
    _, loss = model(ids[:, :-1], ids[:, 1:])
    saw(dist.get_world_size() * 8 * 128)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    stepped()
dist.destroy_process_group()
