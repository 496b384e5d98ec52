"""Gradient checkpointing, as on the machine with the small GPU."""

import tempfile

import torch
from small_llama import llama
from transformers import Trainer, TrainingArguments

rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 512, (1000, 128))]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=8,
        max_steps=100,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=True,
    )
    Trainer(llama(num_hidden_layers=4), arguments, train_dataset=rows).train()
