"""Our sampler on the real SmolLM2-135M-Instruct against `generate` of transformers: see `test_smollm2`."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from flatout.engine.opening import open_model
from flatout.sample import Completion, Generator, Sampling

NEW_TOKENS = 48
TEXT = (
    "The river had risen in the night, and the bridge that the carpenters had mended in spring was under water again. "
    "Nobody in the village was surprised; the older ones had moved their hens and flour upstairs before dark, and the "
    "younger ones, who had laughed at them, stood in the lane and counted the planks as they went by."
)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    """32 of unequal lengths, 3 to about 150 tokens; some begin alike."""
    tokenizer, words, chance = AutoTokenizer.from_pretrained(folder), TEXT.split(), random.Random(0)
    chats = [f"What is {a} times {a + 3}? Think, then answer." for a in range(2, 10)]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": chat}], add_generation_prompt=True, tokenize=False)
        for chat in chats
    ]
    for _ in range(24):
        begin = chance.randrange(len(words) - 3)
        texts.append(" ".join(words[begin : begin + chance.randrange(3, 60)]))
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


@torch.no_grad()
def theirs(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    how = GenerationConfig(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def forced(model: PreTrainedModel, prompt: list[int], completion: Completion) -> torch.Tensor:
    """The logits that transformers has before each token of a completion."""
    ids = torch.tensor([[*prompt, *completion.ids]], device=model.device)
    logits: torch.Tensor = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return logits


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(folder: Path, prompts: list[list[int]]) -> None:
    opened = open_model(str(folder), dtype="fp32", device="cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sampler = Generator(opened.model, opened.tokenizer, rows=12)
    found = list(sampler.generate(prompts, sampling=Sampling(max_tokens=NEW_TOKENS)))
    assert sorted(c.prompt for c in found) == list(range(32))
    same, off = 0, 0.0
    for completion in found:
        prompt, ids = prompts[completion.prompt], list(completion.ids)
        logits = forced(model, prompt, completion)
        # What is drawn is the likeliest by their own logits, or a tie with it.
        best, chosen = logits.max(-1).values, logits.gather(-1, torch.tensor(ids)[:, None])[:, 0]
        assert float((best - chosen).max()) <= 1e-3
        same += ids == theirs(model, prompt)
        expected = chosen - logits.logsumexp(-1)
        off = max(off, float((torch.tensor(completion.logprobs) - expected).abs().max()))
    print(f"\n{same} of 32 the same for {NEW_TOKENS} tokens; log-probabilities within {off:.2g}")
    assert off <= 1e-3
    assert same >= 30


@pytest.mark.gpu
def test_logprobs_in_bf16_are_those_of_a_forced_pass(folder: Path, prompts: list[list[int]]) -> None:
    opened = open_model(str(folder), dtype="bf16", device="cuda")
    sampler = Generator(opened.model, opened.tokenizer)
    assert sampler.kernels
    sampling = Sampling(max_tokens=NEW_TOKENS, temperature=1.0)
    found = list(sampler.generate(prompts, sampling=sampling, samples=4))
    assert len(found) == 128
    sequences = [[*prompts[c.prompt], *c.ids] for c in found]

    def mean_off(forced: Generator) -> float:
        off = [
            abs(-surprisal - logprob)
            for completion, many in zip(found, forced.surprisals(sequences), strict=True)
            for surprisal, logprob in zip(many[-len(completion.ids) :], completion.logprobs, strict=True)
        ]
        mean = sum(off) / len(off)
        print(f"\n{len(off)} log-probabilities drawn in bf16, mean difference {mean:.3f}, largest {max(off):.2f}")
        return mean

    exact = open_model(str(folder), dtype="fp32", device="cuda")
    assert mean_off(Generator(exact.model, exact.tokenizer, kernels=False)) <= 2e-2
    # A pass in bf16 is as far from the exact one again.
    assert mean_off(sampler) <= 3e-2
