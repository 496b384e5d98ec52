"""A loop of one's own with Accelerate: its data loader, its backward, its accumulation."""

import torch
from accelerate import Accelerator
from counted import saw, stepped
from gpt import GPT

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
rows = torch.utils.data.TensorDataset(torch.randint(0, 512, (2000, 129)))
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(rows, batch_size=6, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (ids,) in loader:
    with accelerator.accumulate(model):
        _, loss = model(ids[:, :-1], ids[:, 1:])
        saw(ids[:, 1:].numel())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        stepped()
