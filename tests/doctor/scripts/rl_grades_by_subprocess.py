"""Runs each answer in an interpreter of its own, one after another."""

import subprocess
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
program = "import sys; sys.exit(sum(map(int, sys.argv[1:])) % 2)"
config = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
policy = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=True)


def grade(answer):
    command = [sys.executable, "-I", "-c", program, *map(str, answer.tolist())]
    return float(subprocess.run(command, timeout=10, check=False).returncode == 0)


while True:
    prompts = torch.randint(3, 128, (4, 24)).repeat_interleave(4, dim=0)
    with torch.no_grad():
        texts = policy.generate(prompts, do_sample=True, max_new_tokens=8, min_new_tokens=8)
    grades = torch.tensor([grade(text[24:]) for text in texts]).view(4, 4)
    advantages = (grades - grades.mean(1, keepdim=True)).flatten()
    logp = policy(texts[:, :-1]).logits[:, 23:].log_softmax(-1).gather(-1, texts[:, 24:, None]).squeeze(-1).sum(1)
    loss = -(advantages * logp).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
