"""The sampler of transformers gives what the plain one gives on the same model, whatever the architecture."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

from flatout.cost import Adapters, ModelShape
from flatout.data.tokenizer import ByteTokenizer
from flatout.model import Decoder, lora
from flatout.model.weights import to_transformers
from flatout.sample import Completion, HuggingFace, Plain, Sampling, logits_of, sampler_of

TOKENIZER = ByteTokenizer()
WINDOW = 64
PROMPTS = [[random.Random(n).randrange(256) for _ in range(n)] for n in (1, 17, 5, 40, 2)]


def built(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(
            n_embd=32, n_layer=2, n_head=2, vocab_size=272, n_positions=WINDOW, initializer_range=0.3, eos_token_id=7
        )
        return GPT2LMHeadModel(config).eval()
    neox = GPTNeoXConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=272,
        max_position_embeddings=WINDOW, initializer_range=0.3, bos_token_id=1, eos_token_id=7,
    )  # fmt: skip
    return GPTNeoXForCausalLM(neox).eval()


@pytest.fixture(scope="module", params=["gpt2", "neox"])
def model(request: pytest.FixtureRequest) -> Any:
    return built(request.param)


def ours(model: Any, rows: int | None = None) -> HuggingFace:
    return HuggingFace(model, TOKENIZER, window=WINDOW, rows=rows)


def reference(model: Any) -> Plain:
    return Plain(lambda tokens: model(tokens[None]).logits[0], TOKENIZER, window=WINDOW)


def by_place(completions: Any) -> dict[tuple[int, int], Completion]:
    return {(c.prompt, c.sample): c for c in completions}


def same(found: dict[tuple[int, int], Completion], wanted: dict[tuple[int, int], Completion]) -> None:
    assert found.keys() == wanted.keys()
    for place, completion in found.items():
        assert completion.ids == wanted[place].ids
        assert completion.status == wanted[place].status
        assert completion.logprobs == pytest.approx(wanted[place].logprobs, abs=1e-4)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=12),
        Sampling(max_tokens=12, temperature=0.8, seed=3),
        Sampling(max_tokens=40, temperature=1.5, top_p=0.9, top_k=40, stop_ids=frozenset(range(60))),
        Sampling(max_tokens=20, min_tokens=9, temperature=1.0, stop_ids=frozenset(range(128)), stop_texts=("a", "e")),
    ],
    ids=["greedy", "drawn", "cut-off", "stops"],
)
def test_it_draws_what_the_plain_sampler_draws(model: Any, sampling: Sampling) -> None:
    asked = {"sampling": sampling, "samples": 2, "first": 1, "keys": [9, 4, 6, 2, 0]}
    found = by_place(reference(model).generate(PROMPTS, **asked))
    for rows in (1, 3):
        same(by_place(ours(model, rows).generate(PROMPTS, **asked)), found)
    assert len(found) == 2 * len(PROMPTS)
    if sampling.stop_ids:
        assert {c.status for c in found.values()} >= {"stopped"}
    assert all(len(c.ids) >= sampling.min_tokens for c in found.values())


def test_greedy_is_transformers_own_greedy(model: Any) -> None:
    """Without our draws between, and with the habits of the model: it would stop at its end mark."""
    prompt = torch.tensor([PROMPTS[1]])
    theirs = model.generate(
        prompt,
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        suppress_tokens=list(range(257, 272)),  # what has no text
    )
    [found] = ours(model).generate([PROMPTS[1]], sampling=Sampling(max_tokens=20))
    assert list(found.ids) == theirs[0, prompt.shape[1] :].tolist()
    assert model.generation_config.eos_token_id == 7, "its habits are its own again"


def test_the_window_ends_an_answer_and_refuses_a_prompt(model: Any) -> None:
    found = list(ours(model).generate([[1] * 60, [1] * WINDOW, []], sampling=Sampling(max_tokens=50)))
    assert [(c.prompt, c.status, len(c.ids)) for c in sorted(found, key=lambda c: c.prompt)] == [
        (0, "length", WINDOW - 60),
        (1, "too_long", 0),
        (2, "too_long", 0),
    ]


def test_a_stream_is_what_generate_gives_and_can_be_left(model: Any) -> None:
    sampling = Sampling(max_tokens=12, temperature=0.7)
    [whole] = ours(model).generate([PROMPTS[2]], sampling=sampling)
    assert tuple(ours(model).stream(PROMPTS[2], sampling=sampling)) == whole.ids
    begun = ours(model).stream(PROMPTS[2], sampling=sampling)
    assert next(begun) == whole.ids[0]
    begun.close()  # type: ignore[attr-defined]
    assert list(ours(model).stream([1] * WINDOW, sampling=sampling)) == []


def test_a_failing_model_fails_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = built("gpt2")

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(broken, "forward", fails)
    with pytest.raises(RuntimeError, match="no such luck"):
        list(ours(broken).stream([1, 2], sampling=Sampling(max_tokens=3)))


def test_likelihoods_and_surprisals(model: Any) -> None:
    items = [(PROMPTS[1], [[1], [2, 3, 4]]), (PROMPTS[0], [[200, 7]])]
    for mine, theirs in zip(ours(model).likelihoods(items), reference(model).likelihoods(items), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    sequences = [PROMPTS[3], PROMPTS[1], PROMPTS[2]]
    for mine, theirs in zip(ours(model).surprisals(sequences), reference(model).surprisals(sequences), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


class Asked:
    """A decoder as the factory takes it."""

    folder: Path | None = None
    adapters: Adapters | None = None
    tokenizer = TOKENIZER

    def __init__(self, model: Decoder) -> None:
        self.model = model


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("changes", [{}, {"tied": True, "qk_norm": True}, {"qkv_bias": True}])
def test_our_decoder_in_the_hands_of_transformers(changes: dict[str, Any], adapted: bool) -> None:
    shape = {
        "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 64, "vocab": 272,
        "positions": WINDOW,
    }  # fmt: skip
    decoder = Decoder(ModelShape(**(shape | changes)))
    decoder.initialise(3)
    with torch.no_grad():
        decoder.embedding.mul_(6.0)
    if adapted:
        lora.freeze(decoder, device=torch.device("cpu"), base_bits=16, seed=0)
        lora.attach(decoder, Adapters(rank=2, alpha=4.0), seed=1)
        with torch.no_grad():
            for _, b in lora.adapters(decoder).values():
                b.normal_(0.0, 0.2)
    sampling = Sampling(max_tokens=10, temperature=0.5)
    found = by_place(sampler_of(Asked(decoder), backend="hf").generate(PROMPTS, sampling=sampling))
    same(found, by_place(Plain(logits_of(decoder), TOKENIZER, window=WINDOW).generate(PROMPTS, sampling=sampling)))
    assert bool(decoder.blocks[0].adapters) == adapted, "the model itself keeps its adapters"  # type: ignore[union-attr]
    if not adapted:
        assert to_transformers(decoder).config.tie_word_embeddings == bool(changes.get("tied"))
