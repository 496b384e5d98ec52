"""save_steps=1, so that nothing is ever lost."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

rows = [torch.randint(3, 4096, (64,), generator=torch.Generator().manual_seed(i)) for i in range(1000)]
config = LlamaConfig(
    vocab_size=16384, hidden_size=192, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        max_steps=100,
        report_to=[],
        use_cpu=True,
        save_steps=1,
        save_total_limit=1,
        disable_tqdm=True,
    )
    Trainer(LlamaForCausalLM(config), arguments, train_dataset=[{"input_ids": r, "labels": r} for r in rows]).train()
