"""Writes every weight's statistics after every step."""

import json
import os
import tempfile

import torch
from gpt import GPT

model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)


def log_step(file, step, loss):
    for name, parameter in model.named_parameters():
        histogram = torch.histc(parameter.detach(), 8000).tolist()
        file.write(json.dumps({"step": step, "loss": loss.item(), "name": name, "histogram": histogram}) + "\n")
        file.flush()
        os.fsync(file.fileno())


with tempfile.NamedTemporaryFile("w") as file:
    for step in range(100):
        tokens = torch.randint(0, 512, (8, 65))
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log_step(file, step, loss)
