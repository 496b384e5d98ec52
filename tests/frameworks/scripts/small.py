"""What the scripts of transformers and TRL share: a small Llama, a tokenizer of words, rows, and a count of tokens."""

import tempfile

import torch
from counted import saw, stepped
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

torch.manual_seed(0)
WORDS = [f"w{i}" for i in range(500)]
SHAPE = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip


def tokenizer():
    backend = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *WORDS])}, "<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)


def model():
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def classifier():
    return LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1))


def words(seed, count):
    return " ".join(WORDS[(seed * 31 + i * i * 7) % len(WORDS)] for i in range(count))


def texts(count=400):
    return Dataset.from_list([{"text": words(i, 40 + i * 13 % 60)} for i in range(count)])


def pairs(count=400):
    rows = [
        {"prompt": words(i, 12), "chosen": " " + words(i + 1, 20 + i % 9), "rejected": " " + words(i + 2, 25 + i % 5)}
        for i in range(count)
    ]
    return Dataset.from_list(rows)


def prompts(count=200):
    return Dataset.from_list([{"prompt": words(i, 12)} for i in range(count)])


def arguments(kind, **more):
    given = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": 8, "max_steps": 60, "report_to": [],
        "use_cpu": True, "save_strategy": "no", "logging_steps": 1000, "disable_tqdm": True, "bf16": False,
    }  # fmt: skip
    return kind(**{**given, **more})


class Count(TrainerCallback):
    """Optimizer steps, as the trainer tells them."""

    def on_optimizer_step(self, *_, **__):
        stepped()


def train(trainer, model, **given):
    """Trains; tokens are counted where the trainer computes a loss, by the masks of its batches."""

    class Counting(trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if model.training:
                whole = "attention_mask" in inputs  # otherwise in two parts
                masks = ("attention_mask",) if whole else ("prompt_mask", "completion_mask")
                saw(sum(inputs[name].sum() for name in masks))
            return super().compute_loss(model, inputs, *args, **kwargs)

    Counting(model, processing_class=tokenizer(), callbacks=[Count()], **given).train()


def short(completions, **_):
    """A reward for short answers."""
    return [-float(len(text)) for text in completions]
