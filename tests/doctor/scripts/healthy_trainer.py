"""The Trainer with rows that are full."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

rows = [torch.randint(3, 512, (128,), generator=torch.Generator().manual_seed(i)) for i in range(2000)]
config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4, pad_token_id=0
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=12,
        max_steps=100,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_steps=50,
        disable_tqdm=True,
    )
    Trainer(LlamaForCausalLM(config), arguments, train_dataset=[{"input_ids": r, "labels": r} for r in rows]).train()
