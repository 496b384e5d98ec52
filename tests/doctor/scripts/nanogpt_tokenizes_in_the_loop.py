"""get_batch builds its rows from text, character by character, every time."""

import torch
from gpt import GPT

text = "the quick brown fox jumps over the lazy dog. " * 4000
stoi = {c: i for i, c in enumerate(sorted(set(text)))}
batch_size, block_size = 8, 64


def get_batch():
    data = torch.tensor([stoi[c] for c in text], dtype=torch.long)
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
X, Y = get_batch()
for iter_num in range(100):
    logits, loss = model(X, Y)
    X, Y = get_batch()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
