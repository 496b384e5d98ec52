"""GRPO in TRL whose reward compares each completion with all known answers, letter by letter."""

import random
import tempfile
from difflib import SequenceMatcher

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

words = [f"w{i}" for i in range(500)]
known = {word: i for i, word in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *words])}
backend = Tokenizer(models.WordLevel(known, "<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
)
pick = random.Random(0)
prompts = Dataset.from_list([{"prompt": " ".join(pick.choices(words, k=12))} for _ in range(200)])
answers = [" ".join(pick.choices(words, k=12)) for _ in range(500)]


def closeness(completions, **_):
    return [max(SequenceMatcher(None, text, answer).ratio() for answer in answers) for text in completions]


config = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
)
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
    GRPOTrainer(
        LlamaForCausalLM(config), closeness, args=arguments, train_dataset=prompts, processing_class=tokenizer
    ).train()
