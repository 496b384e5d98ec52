"""An actor and a critic, each with an optimizer; a step is one of each."""

import torch
from counted import saw, stepped
from gpt import GPT
from torch import nn

torch.manual_seed(0)
actor, critic = GPT(), GPT(vocab=512)
value = nn.Linear(512, 1)
of_actor = torch.optim.AdamW(actor.parameters(), lr=1e-4)
of_critic = torch.optim.AdamW([*critic.parameters(), *value.parameters()], lr=1e-4)
for _ in range(60):
    ids = torch.randint(0, 512, (6, 128))
    logits, _ = actor(ids)
    saw(ids.numel())
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    of_actor.step()
    of_actor.zero_grad()
    hidden, _ = critic(ids)
    saw(ids.numel())
    (value(hidden).mean() ** 2).backward()
    of_critic.step()
    of_critic.zero_grad()
    stepped()
