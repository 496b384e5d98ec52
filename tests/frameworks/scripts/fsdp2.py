"""FSDP2 by torchrun: sharded blocks and a sharded root."""

import torch
import torch.distributed as dist
from counted import saw, stepped
from gpt import GPT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = GPT()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
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
