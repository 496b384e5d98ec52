"""A small Llama and a tokenizer of whole words, as people keep them in a file of their own."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = [f"w{i}" for i in range(500)]
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}


def tokenizer():
    known = {word: i for i, word in enumerate([*SPECIAL.values(), *words])}
    backend = Tokenizer(models.WordLevel(known, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


def llama(**shape):
    given = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, **shape}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, pad_token_id=0, eos_token_id=1, bos_token_id=2, **given))
