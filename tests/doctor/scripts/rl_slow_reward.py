"""Checks each answer with a slow verifier, one by one."""

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
policy = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=True)


def reward(text):
    time.sleep(0.03)  # a checker in another process
    return float(sum(text.tolist()) % 2)


for step in range(100):
    prompts = torch.randint(3, 128, (8, 16))
    with torch.no_grad():
        texts = policy.generate(prompts, do_sample=True, max_new_tokens=4, min_new_tokens=4)
    rewards = torch.tensor([reward(text) for text in texts])
    logp = policy(texts[:, :-1]).logits[:, 15:].log_softmax(-1).gather(-1, texts[:, 16:, None]).squeeze(-1).sum(1)
    loss = -((rewards - rewards.mean()) * logp).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
