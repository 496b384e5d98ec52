"""A policy-gradient loop whose sampling computes every prefix again."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
policy = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=True)
for step in range(100):
    prompts = torch.randint(3, 128, (8, 32))
    with torch.no_grad():
        texts = policy.generate(prompts, do_sample=True, max_new_tokens=16, min_new_tokens=16, use_cache=False)
    rewards = (texts[:, 32:] % 2).float().mean(1)
    logits = policy(texts[:, :-1]).logits[:, 31:]
    logp = logits.log_softmax(-1).gather(-1, texts[:, 32:, None]).squeeze(-1).sum(1)
    loss = -((rewards - rewards.mean()) * logp).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
