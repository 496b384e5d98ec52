"""The real SmolLM2-135M-Instruct against transformers: `FLATOUT_SMOLLM2=FOLDER pytest tests/real -s`.

`benchmarks/smollm2.py` makes such a folder from a GGUF file.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from flatout.config.settings import ModelSettings
from flatout.model import Decoder, Rectangular, load_model
from flatout.model.loading import export_model

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


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False)
        for q in QUESTIONS
    ]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in [*chats, *BEGINNINGS]]


@torch.no_grad()
def continued(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """The prompt and the likeliest token after it, 64 times, by transformers with its own cache."""
    ids = torch.tensor([prompt], device=model.device)
    step, cache, out = ids, None, [ids]
    for _ in range(NEW_TOKENS):
        answer = model(step, past_key_values=cache, use_cache=True)
        cache, step = answer.past_key_values, answer.logits[:, -1:].argmax(-1)
        out.append(step)
    return torch.cat(out, dim=1)[0]


@torch.no_grad()
def our_logits(model: Decoder, tokens_T: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(tokens_T), device=tokens_T.device)
    return model(tokens_T, positions, Rectangular(batch=1), lambda h, w: h @ w.to(h.dtype).t()).float()


def compared(theirs: PreTrainedModel, ours: Decoder, prompts: list[list[int]]) -> tuple[list[float], list[float], int]:
    """Largest difference and cosine of the logits of each text, and how many continuations are the same.

    Ours is the same as theirs exactly if at each of its places our likeliest token is the one that follows.
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
    return differences, cosines, same


@pytest.mark.slow
def test_logits_and_greedy_continuations_equal_transformers(folder: Path, prompts: list[list[int]]) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load_model(ModelSettings(name=str(folder)))
    assert isinstance(ours, Decoder)
    differences, cosines, same = compared(theirs, ours, prompts)
    print(f"\nfp32: largest difference {max(differences):.2g}, least cosine {min(cosines):.9f}, same {same} of 20")
    assert len(differences) == 20
    assert max(differences) <= 1e-3
    assert same >= 18


@pytest.mark.gpu
def test_logits_in_bf16_point_the_same_way(folder: Path, prompts: list[list[int]]) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().cuda()
    ours = load_model(
        ModelSettings(name=str(folder)), device="cuda", dtype=torch.bfloat16, compute_dtype=torch.bfloat16
    )
    assert isinstance(ours, Decoder)
    differences, cosines, same = compared(theirs, ours, prompts)
    print(f"\nbf16: largest difference {max(differences):.2g}, least cosine {min(cosines):.6f}, same {same} of 20")
    assert min(cosines) >= 0.999


@pytest.mark.slow
def test_an_export_has_the_same_logits(folder: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    ours = load_model(ModelSettings(name=str(folder)))
    assert isinstance(ours, Decoder)
    export_model(ours, tmp_path, dtype=torch.float32)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for prompt in prompts[::5]:
        tokens = torch.tensor(prompt)
        with torch.no_grad():
            assert (again(tokens[None]).logits[0] - our_logits(ours, tokens)).abs().max() <= 1e-3
