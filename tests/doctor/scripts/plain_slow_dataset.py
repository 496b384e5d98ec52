"""A dataset that decodes its rows while the model waits."""

import time

import torch
import torch.nn.functional as F
from gpt import GPT
from torch.utils.data import DataLoader, Dataset


class Reviews(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, i):
        time.sleep(0.012)  # reading and decoding one file
        return torch.randint(0, 512, (65,), generator=torch.Generator().manual_seed(i))


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step, batch in enumerate(DataLoader(Reviews(), batch_size=8, shuffle=True)):
    logits, _ = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 100:
        break
