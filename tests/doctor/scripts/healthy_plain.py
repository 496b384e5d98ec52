"""Nothing to see here."""

import torch
from gpt import GPT
from torch.utils.data import DataLoader, TensorDataset

tokens = torch.randint(0, 512, (4096, 129))
model = GPT(width=128, layers=3)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for (batch,) in DataLoader(TensorDataset(tokens), batch_size=12, shuffle=True):
    _, loss = model(batch[:, :-1], batch[:, 1:])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
