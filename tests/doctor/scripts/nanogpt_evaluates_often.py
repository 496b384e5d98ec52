"""eval_interval = 2, left over from debugging."""

import torch
from gpt import GPT

eval_interval, eval_iters, batch_size, block_size = 2, 5, 8, 64
data = torch.randint(0, 512, (100_000,))


def get_batch():
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    rows = torch.stack([data[i : i + block_size + 1] for i in ix])
    return rows[:, :-1], rows[:, 1:]


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(eval_iters)
    for k in range(eval_iters):
        _, loss = model(*get_batch())
        losses[k] = loss.item()
    model.train()
    return losses.mean()


for iter_num in range(100):
    if iter_num % eval_interval == 0:
        print(f"step {iter_num}: val loss {estimate_loss():.4f}")
    _, loss = model(*get_batch())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
