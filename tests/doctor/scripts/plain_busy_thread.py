"""A thread that sums up every token it has seen, in plain Python, while the model trains."""

import threading

import torch
from gpt import GPT

length, batch_size = 128, 8
torch.manual_seed(0)
model = GPT(length=length)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
tokens = torch.randint(0, 512, (4096, length + 1))
seen, counts = tokens[:64].flatten().tolist(), [0] * 512


def count():
    while True:
        for token in seen:
            counts[token] += 1


threading.Thread(target=count, daemon=True).start()
for step in range(300):
    rows = tokens[step * batch_size % 4096 :][:batch_size]
    _, loss = model(rows[:, :-1], rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
