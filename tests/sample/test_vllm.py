"""What vLLM is asked and how its answer is read, against a stand-in: vLLM itself has not been run here."""

from __future__ import annotations

import copy
import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from flatout.cost import Adapters, ModelShape
from flatout.data.tokenizer import ByteTokenizer
from flatout.errors import EnvironmentLacks, UsageError
from flatout.model import Decoder, lora, weights
from flatout.sample import Sampling, backend_of, sampler_of
from flatout.sample.vllm import Vllm

TOKENIZER = ByteTokenizer()


@dataclass
class Logprob:
    logprob: float


class FakeLLM:
    """Answers every prompt with its own reverse; the log-probability of token t is minus t."""

    made: ClassVar[list[FakeLLM]] = []

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.asked: list[tuple[Any, Any, Any]] = []
        self.loaded: list[dict[str, torch.Tensor]] = []
        self.forgotten = 0
        model = types.SimpleNamespace(load_weights=lambda named: self.loaded.append({k: v.clone() for k, v in named}))
        runner = types.SimpleNamespace(model_runner=types.SimpleNamespace(model=model))
        self.llm_engine = types.SimpleNamespace(model_executor=types.SimpleNamespace(driver_worker=runner))
        FakeLLM.made.append(self)

    def reset_prefix_cache(self) -> None:
        self.forgotten += 1

    def generate(self, prompts: Any, params: Any, *, use_tqdm: bool, lora_request: Any) -> list[Any]:
        self.asked.append((prompts, params, lora_request))
        assert not use_tqdm
        answers = []
        for prompt, param in zip(prompts, params, strict=True):
            ids = prompt["prompt_token_ids"]
            said = [*reversed(ids)][: param["max_tokens"]]
            output = types.SimpleNamespace(
                token_ids=said,
                logprobs=[{token: Logprob(-float(token)), 999: Logprob(0.0)} for token in said],
                finish_reason="stop" if said[-1] in param.get("stop_token_ids", []) else "length",
            )
            places = [None, *({token: Logprob(-float(token))} for token in ids[1:])]
            answers.append(types.SimpleNamespace(outputs=[output], prompt_logprobs=places))
        return answers


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    request = types.ModuleType("vllm.lora.request")
    request.LoRARequest = lambda *values: values  # type: ignore[attr-defined]
    module = types.ModuleType("vllm")
    module.LLM, module.SamplingParams = FakeLLM, dict  # type: ignore[attr-defined]
    for name, fake in {"vllm": module, "vllm.lora": types.ModuleType("vllm.lora"), request.__name__: request}.items():
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(FakeLLM, "made", [])


def made(**options: Any) -> Vllm:
    return Vllm(Path("folder"), TOKENIZER, window=34, vocab=257, **options)


def test_what_is_asked_and_how_the_answer_is_read() -> None:
    sampler = made(dtype="bfloat16", rows=8)
    [llm] = FakeLLM.made
    assert llm.options == {
        "model": "folder", "tokenizer": "folder", "dtype": "bfloat16", "max_model_len": 34,
        "logprobs_mode": "raw_logprobs", "max_num_seqs": 8,
    }  # fmt: skip
    assert sampler.window == 32
    sampling = Sampling(
        max_tokens=6, min_tokens=2, temperature=0.5, top_p=0.9, top_k=5, stop_ids=frozenset({3, 1}), stop_texts=("x",)
    )
    found = list(sampler.generate([[1, 2], [5] * 40, [4] * 29], sampling=sampling, samples=2, first=3, keys=[7, 8, 9]))
    places = sorted((c.prompt, c.sample, c.status, c.ids) for c in found)
    assert places == [
        (0, 3, "stopped", (2, 1)),
        (0, 4, "stopped", (2, 1)),
        (1, 3, "too_long", ()),
        (1, 4, "too_long", ()),
        (2, 3, "length", (4, 4, 4)),
        (2, 4, "length", (4, 4, 4)),
    ]
    assert next(c for c in found if c.prompt == 0).logprobs == (-2.0, -1.0)
    [(prompts, params, request)] = llm.asked
    assert prompts[0] == {"prompt_token_ids": [1, 2]}
    assert request is None
    assert len({param["seed"] for param in params}) == 4, "each completion has draws of its own"
    assert all(0 <= param["seed"] < 2**63 for param in params)
    first = {key: value for key, value in params[0].items() if key != "seed"}
    assert first == {
        "n": 1, "max_tokens": 6, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "ignore_eos": True,
        "stop_token_ids": [1, 3], "stop": ["x"], "include_stop_str_in_output": True, "skip_special_tokens": False,
        "logprobs": 0, "allowed_token_ids": None,
    }  # fmt: skip
    assert params[-1]["max_tokens"] == 3, "the window ends it"
    assert list(sampler.stream([1, 2], sampling=sampling)) == [2, 1]


def test_likelihoods_are_read_from_the_prompt() -> None:
    sampler = made()
    assert sampler.likelihoods([([9, 8], [[1], [2, 3]]), ([9], [[4]])]) == [[-1.0, -5.0], [-4.0]]
    assert list(sampler.surprisals([[9, 1, 2]])) == [[1.0, 2.0]]
    asked = FakeLLM.made[0].asked[0][1][0]
    assert (asked["max_tokens"], asked["prompt_logprobs"]) == (1, 0)
    assert sampler.likelihoods([]) == []


def test_what_has_no_text_is_never_drawn() -> None:
    sampler = Vllm(Path("folder"), TOKENIZER, window=34, vocab=272)
    list(sampler.generate([[1]], sampling=Sampling(max_tokens=1)))
    assert FakeLLM.made[0].asked[0][1][0]["allowed_token_ids"] == list(range(257))


class Asked:
    tokenizer = TOKENIZER

    def __init__(self, model: Decoder, folder: Path | None = None, adapters: Adapters | None = None) -> None:
        self.model, self.folder, self.adapters = model, folder, adapters


@pytest.fixture
def decoder() -> Decoder:
    shape = ModelShape(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=64, vocab=257, positions=64)
    model = Decoder(shape)
    model.initialise(0)
    return model


def test_weights_without_a_folder_are_written_to_one(decoder: Decoder) -> None:
    sampler_of(Asked(decoder), backend="vllm")
    folder = Path(FakeLLM.made[0].options["model"])
    assert (folder / "tokenizer.json").is_file()
    again = weights.load(folder)
    assert torch.equal(again.embedding, decoder.embedding)


def test_adapters_go_as_peft_files_on_their_base(decoder: Decoder, tmp_path: Path) -> None:
    spec = Adapters(rank=4, alpha=8.0)
    lora.freeze(decoder, device=torch.device("cpu"), base_bits=16, seed=0)
    lora.attach(decoder, spec, seed=0)
    sampler = sampler_of(Asked(decoder, tmp_path, spec), backend="vllm")
    [llm] = FakeLLM.made
    assert (llm.options["model"], llm.options["enable_lora"], llm.options["max_lora_rank"]) == (str(tmp_path), True, 4)
    list(sampler.generate([[1]], sampling=Sampling(max_tokens=1)))
    name, number, path = llm.asked[0][2]
    assert (name, number) == ("adapter", 1)
    assert json.loads((Path(path) / "adapter_config.json").read_text())["r"] == 4


@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_in_training_is_followed(decoder: Decoder, *, adapted: bool) -> None:
    spec = Adapters(rank=4, alpha=8.0)
    if adapted:
        lora.freeze(decoder, device=torch.device("cpu"), base_bits=16, seed=0)
        lora.attach(decoder, spec, seed=0)
    sampler = sampler_of(Asked(decoder), backend="vllm", memory=0.25)
    [llm] = FakeLLM.made
    assert llm.options["gpu_memory_utilization"] == 0.25
    for step in range(2):
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.add_(0.01 * (step + 1))
        list(sampler.generate([[1]], sampling=Sampling(max_tokens=1)))
        expected = copy.deepcopy(decoder)
        lora.merge(expected)
        named = dict(weights.to_hf(expected.state_dict(), expected.shape))
        assert llm.loaded[step].keys() == named.keys()
        for name, tensor in llm.loaded[step].items():
            torch.testing.assert_close(tensor.float(), named[name].float())
    assert llm.forgotten == 2


def test_without_vllm_the_way_out_is_told(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EnvironmentLacks, match="vLLM is not installed"):
        sampler_of(Asked(decoder, Path("folder")), backend="vllm")
    with pytest.raises(EnvironmentLacks, match="vLLM is not installed"):
        backend_of("vllm")
    with pytest.raises(UsageError, match="'vlm' must be one of auto, flatout, hf, vllm"):
        backend_of("vlm")
