"""DPO of adapters in TRL, which recomputes activations unless told otherwise: here of a model that fits many times."""

import random
import tempfile

from datasets import Dataset
from peft import LoraConfig
from small_llama import llama, tokenizer, words
from trl import DPOConfig, DPOTrainer

pick = random.Random(0)


def text(count):
    return " ".join(pick.choices(words, k=count))


pairs = Dataset.from_list(
    [{"prompt": text(16), "chosen": f" {text(111)}", "rejected": f" {text(111)}"} for _ in range(60)]
)
with tempfile.TemporaryDirectory() as folder:
    arguments = DPOConfig(
        folder,
        per_device_train_batch_size=6,
        max_steps=100,
        max_length=128,
        gradient_checkpointing=True,
        precompute_ref_log_probs=True,
        bf16=False,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_steps=50,
        disable_tqdm=True,
    )
    DPOTrainer(
        llama(intermediate_size=384, num_hidden_layers=4),
        args=arguments,
        train_dataset=pairs,
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"),
    ).train()
