"""A plain loop: rows of one length, one optimizer."""

import torch
from counted import saw, stepped
from gpt import GPT

torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def main():
    for _ in range(60):
        ids = torch.randint(0, 512, (8, 129))
        _, loss = model(ids[:, :-1], ids[:, 1:])
        saw(8 * 128)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stepped()


if __name__ == "__main__":
    main()
