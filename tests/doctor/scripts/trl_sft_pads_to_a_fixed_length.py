"""Supervised fine-tuning in TRL, every batch padded to 256 tokens so that all have one shape."""

import random
import tempfile

from datasets import Dataset
from small_llama import llama, tokenizer, words
from trl import SFTConfig, SFTTrainer

pick = random.Random(0)
rows = Dataset.from_list([{"text": " ".join(pick.choices(words, k=pick.randint(24, 40)))} for _ in range(600)])
with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder,
        per_device_train_batch_size=8,
        max_steps=100,
        max_length=256,
        pad_to_multiple_of=256,
        gradient_checkpointing=False,
        bf16=False,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_steps=50,
        disable_tqdm=True,
    )
    SFTTrainer(llama(), arguments, train_dataset=rows, processing_class=tokenizer()).train()
