"""A typical Hugging Face Trainer script: defaults, rows padded to one length. For `benchmarks.doctor_gpu`.

python -m benchmarks.doctor_gpu --causes none --script 'trainer=python benchmarks/doctor_trainer.py'
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

on_gpu = torch.cuda.is_available()
layers, width, max_length = (12, 768, 512) if on_gpu else (2, 32, 64)


def tokenize(i):
    chance = torch.Generator().manual_seed(i)
    length = int(torch.randint(max_length // 8, max_length, (), generator=chance))
    ids = torch.randint(0, 50256, (length,), generator=chance)
    mask = (torch.arange(max_length) < length).long()
    ids = torch.nn.functional.pad(ids, (0, max_length - length), value=50256)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


model = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=12 if on_gpu else 2, pad_token_id=50256))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=8, learning_rate=5e-5, num_train_epochs=3, report_to=[]
    )
    Trainer(model=model, args=arguments, train_dataset=[tokenize(i) for i in range(2000)]).train()
