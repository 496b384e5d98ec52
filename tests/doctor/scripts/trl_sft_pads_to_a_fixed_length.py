"""Supervised fine-tuning in TRL, every batch padded to 256 tokens so that all have one shape."""

import random
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = [f"w{i}" for i in range(500)]
known = {word: i for i, word in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *words])}
backend = Tokenizer(models.WordLevel(known, "<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
)
pick = random.Random(0)
rows = Dataset.from_list([{"text": " ".join(pick.choices(words, k=pick.randint(24, 40)))} for _ in range(600)])
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
    SFTTrainer(LlamaForCausalLM(config), arguments, train_dataset=rows, processing_class=tokenizer).train()
