"""GRPO in TRL whose reward compares each completion with all known answers, letter by letter."""

import random
import tempfile
from difflib import SequenceMatcher

from datasets import Dataset
from small_llama import llama, tokenizer, words
from trl import GRPOConfig, GRPOTrainer

pick = random.Random(0)
prompts = Dataset.from_list([{"prompt": " ".join(pick.choices(words, k=12))} for _ in range(200)])
answers = [" ".join(pick.choices(words, k=12)) for _ in range(500)]


def closeness(completions, **_):
    return [max(SequenceMatcher(None, text, answer).ratio() for answer in answers) for text in completions]


with tempfile.TemporaryDirectory() as folder:
    arguments = GRPOConfig(
        folder,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        max_steps=100,
        gradient_checkpointing=False,
        bf16=False,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_steps=50,
        disable_tqdm=True,
    )
    GRPOTrainer(llama(), closeness, args=arguments, train_dataset=prompts, processing_class=tokenizer()).train()
