"""Compares our logits of real weights with those of transformers, over 20 prompts and their 64 likeliest next tokens.

python -m benchmarks.logits FOLDER                       # fp32, and bf16 where there is a GPU
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.results import FOLDER, Call, git_commit, table, write
from flatout.config.settings import ModelSettings
from flatout.model import Decoder, Model, Rectangular, load_model

NEW_TOKENS = 64
QUESTIONS = [
    "How many grams are 2 kilograms?",
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "Is 91 a prime number? Explain.",
    "Translate 'good morning' into Spanish.",
    "Write a Python function that reverses a string.",
    "Who wrote Romeo and Juliet?",
    "List three uses of copper.",
    "What causes the tides?",
]
BEGINNINGS = [
    "Once upon a time, in a small village by the river,",
    "The three laws of motion are",
    "def fibonacci(n):\n",
    "In 1969, for the first time,",
    "Ingredients: flour, sugar, butter. Method:",
    "Dear Sir or Madam,\n\n",
    "1, 1, 2, 3, 5, 8,",
    "The mitochondria",
    "Zwei Dinge sind unendlich:",
    "SELECT name, COUNT(*) FROM",
]
UNITS = {"largest_difference": "", "least_cosine": "", "same": "continuations of 20"}


def prompts_of(folder: Path | str) -> list[list[int]]:
    """Questions in the tokenizer's chat template, and beginnings of texts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False)
        for q in QUESTIONS
    ]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in [*chats, *BEGINNINGS]]


@torch.no_grad()
def continued(model: PreTrainedModel, prompt: Sequence[int]) -> Tensor:
    """The prompt and the likeliest token after it, 64 times, by transformers with its own cache."""
    ids = torch.tensor([prompt], device=model.device)
    step, cache, out = ids, None, [ids]
    for _ in range(NEW_TOKENS):
        answer = model(step, past_key_values=cache, use_cache=True)
        cache, step = answer.past_key_values, answer.logits[:, -1:].argmax(-1)
        out.append(step)
    return torch.cat(out, dim=1)[0]


@torch.no_grad()
def our_logits(model: Model, tokens_T: Tensor) -> Tensor:
    positions = torch.arange(len(tokens_T), device=tokens_T.device)
    logits: Tensor = model(tokens_T, positions, Rectangular(batch=1), lambda h, w: h @ w.to(h.dtype).t())
    return logits.float()


def compared(theirs: PreTrainedModel, ours: Model, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """The largest difference and the least cosine of a text's logits, and how many continuations are the same.

    A continuation is the same if at each of its positions our likeliest token is the one that follows.
    """
    differences, cosines, same = [], [], 0
    for prompt in prompts:
        tokens = continued(theirs, prompt)
        with torch.no_grad():
            expected = theirs(tokens[None]).logits[0].float()
        found = our_logits(ours, tokens)
        differences.append(float((found - expected).abs().max()))
        cosines.append(float(torch.cosine_similarity(found.double().flatten(), expected.double().flatten(), dim=0)))
        same += torch.equal(found[len(prompt) - 1 : -1].argmax(-1), tokens[len(prompt) :])
    return {"largest_difference": max(differences), "least_cosine": min(cosines), "same": same}


def both(folder: Path | str, dtype: torch.dtype, device: str) -> dict[str, float]:
    """The weights in a folder, loaded by transformers and by us."""
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    ours = load_model(ModelSettings(name=str(folder)), device=device, dtype=dtype, compute_dtype=dtype)
    assert isinstance(ours, Decoder), "our own decoder, not transformers' behind an adapter"
    return compared(theirs, ours, prompts_of(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "logits.jsonl")
    options = parser.parse_args()
    call = Call(benchmark="logits", commit=options.commit or git_commit())
    on_gpu = torch.cuda.is_available()
    variants = {"fp32": torch.float32, "bf16": torch.bfloat16} if on_gpu else {"fp32": torch.float32}
    for variant, dtype in variants.items():
        found = both(options.model, dtype, "cuda" if on_gpu else "cpu")
        rows = [call.result(variant=variant, metric=m, unit=unit, values=[found[m]]) for m, unit in UNITS.items()]
        write(rows, options.to)
        print(table(rows), flush=True)


if __name__ == "__main__":
    main()
