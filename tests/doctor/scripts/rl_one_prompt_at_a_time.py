"""Samples its prompts one after another."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
policy = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=True)
for step in range(100):
    texts = []
    for prompt in torch.randint(3, 128, (6, 16)):
        with torch.no_grad():
            texts.append(policy.generate(prompt[None], do_sample=True, max_new_tokens=8, min_new_tokens=8))
    texts = torch.cat(texts)
    rewards = (texts[:, 16:] % 2).float().mean(1)
    logp = policy(texts[:, :-1]).logits[:, 15:].log_softmax(-1).gather(-1, texts[:, 16:, None]).squeeze(-1).sum(1)
    loss = -((rewards - rewards.mean()) * logp).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
