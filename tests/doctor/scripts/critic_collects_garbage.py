"""An actor and a critic with an optimizer each, and a collection of garbage after every step."""

import gc

import torch
import torch.nn.functional as F
from gpt import GPT
from torch import nn

episodes = [{"number": i, "moves": [i, i + 1], "player": str(i)} for i in range(150_000)]  # for the final report
actor, critic = GPT(length=64), GPT(length=64)
critic.head = nn.Linear(128, 1)
of_actor = torch.optim.AdamW(actor.parameters(), lr=1e-4, fused=True)
of_critic = torch.optim.AdamW(critic.parameters(), lr=1e-4, fused=True)
for _ in range(200):
    moves = torch.randint(0, 512, (8, 65))
    gains = (moves[:, 1:] > moves[:, :-1]).float()
    values = critic(moves[:, :-1])[0].squeeze(-1)
    logp = actor(moves[:, :-1])[0].log_softmax(-1).gather(-1, moves[:, 1:, None]).squeeze(-1)
    of_critic.zero_grad()
    F.mse_loss(values, gains).backward()
    of_critic.step()
    of_actor.zero_grad()
    (-(gains - values.detach()) * logp).mean().backward()
    of_actor.step()
    gc.collect()
