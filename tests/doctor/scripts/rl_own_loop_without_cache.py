"""REINFORCE with a sampling loop of its own, in which the model reads the whole text again for every token."""

import torch
import torch.nn.functional as F
from gpt import GPT

prompt_length, new_tokens, batch_size = 48, 16, 8
torch.manual_seed(0)
policy = GPT(length=prompt_length + new_tokens)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, fused=True)


@torch.no_grad()
def continued(text):
    while text.shape[1] < prompt_length + new_tokens:
        logits, _ = policy(text)
        following = torch.multinomial(logits[:, -1].softmax(-1), 1)
        text = torch.cat((text, following), dim=1)
    return text


baseline = 0.5
for _ in range(200):
    text = continued(torch.randint(0, 512, (batch_size, prompt_length)))
    rewards = (text[:, prompt_length:] < 256).float().mean(1)
    logits, _ = policy(text[:, :-1])
    nll = F.cross_entropy(logits.transpose(1, 2), text[:, 1:], reduction="none")[:, prompt_length - 1 :]
    loss = ((rewards - baseline)[:, None] * nll).mean()
    baseline = 0.9 * baseline + 0.1 * rewards.mean().item()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
