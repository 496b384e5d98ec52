"""padding='max_length', because the collator complained."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def tokenize(i):
    length = 24 + i % 16
    ids = torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(i))
    padded = torch.nn.functional.pad(ids, (0, 192 - length), value=0)
    mask = (torch.arange(192) < length).long()
    return {"input_ids": padded, "attention_mask": mask, "labels": padded.masked_fill(mask == 0, -100)}


config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=8,
        max_steps=100,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(LlamaForCausalLM(config), arguments, train_dataset=[tokenize(i) for i in range(1000)]).train()
