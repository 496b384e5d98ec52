"""Accelerate with a pass over the validation rows after every second step."""

import torch
from accelerate import Accelerator
from gpt import GPT
from torch.utils.data import DataLoader, TensorDataset

tokens = torch.randint(0, 512, (2064, 129))
accelerator = Accelerator(cpu=True)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
training = DataLoader(TensorDataset(tokens[64:]), batch_size=8, shuffle=True)
validation = DataLoader(TensorDataset(tokens[:64]), batch_size=8)
model, optimizer, training, validation = accelerator.prepare(model, optimizer, training, validation)


def evaluate():
    model.eval()
    losses = []
    with torch.no_grad():
        for (rows,) in validation:
            _, loss = model(rows[:, :-1], rows[:, 1:])
            losses.append(accelerator.gather_for_metrics(loss))
    model.train()
    return torch.stack(losses).mean()


best = float("inf")
for step, (rows,) in enumerate(training):
    _, loss = model(rows[:, :-1], rows[:, 1:])
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 2 == 0:
        best = min(best, evaluate().item())
