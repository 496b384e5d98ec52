"""DPO of adapters in TRL, which recomputes activations unless told otherwise: here of a model that fits many times."""

import random
import tempfile

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

words = [f"w{i}" for i in range(500)]
known = {word: i for i, word in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *words])}
backend = Tokenizer(models.WordLevel(known, "<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
)
pick = random.Random(0)


def text(count):
    return " ".join(pick.choices(words, k=count))


pairs = Dataset.from_list(
    [{"prompt": text(16), "chosen": f" {text(111)}", "rejected": f" {text(111)}"} for _ in range(60)]
)
config = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
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
        LlamaForCausalLM(config),
        args=arguments,
        train_dataset=pairs,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"),
    ).train()
