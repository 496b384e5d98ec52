"""An actor and a critic that learn from whole batches of moves, with an optimizer each."""

import torch
import torch.nn.functional as F
from gpt import GPT
from torch import nn

torch.manual_seed(0)
actor, critic = GPT(), GPT()
critic.head = nn.Linear(128, 1)
of_actor = torch.optim.AdamW(actor.parameters(), lr=3e-4, fused=True)
of_critic = torch.optim.AdamW(critic.parameters(), lr=3e-4, fused=True)
for _ in range(100):
    states = torch.randint(0, 512, (12, 128))
    logits, _ = actor(states)
    values = critic(states)[0].squeeze(-1)
    logp = logits.log_softmax(-1)
    moves = torch.multinomial(logp.detach().exp().flatten(0, 1), 1).view_as(states)
    gains = (moves > states).float()
    advantages = gains - values.detach()
    actor_loss = -(advantages * logp.gather(-1, moves[..., None]).squeeze(-1)).mean()
    critic_loss = F.mse_loss(values, gains)
    of_actor.zero_grad(set_to_none=True)
    of_critic.zero_grad(set_to_none=True)
    (actor_loss + critic_loss).backward()
    nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
    nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
    of_actor.step()
    of_critic.step()
