"""What vLLM is asked and how its answer is read, against a stand-in with the limits of vLLM 0.24."""

from __future__ import annotations

import copy
import gc
import json
import os
import random
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.command import Command, flatout
from torch import distributed

from flatout.cost import Adapters, ModelShape
from flatout.data.tokenizer import ByteTokenizer
from flatout.errors import EnvironmentLacks, RunFailed, UsageError
from flatout.model import Decoder, lora, weights
from flatout.recipes.sampling import Fitting
from flatout.sample import Sampling, backend_of, sampler_of
from flatout.sample.vllm import Vllm

__all__ = ["flatout"]

TOKENIZER = ByteTokenizer()


@dataclass
class Logprob:
    logprob: float


@dataclass
class FlatLogprobs:
    """Only the token itself at each position, except the first of a prompt, which has nothing."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    start_indices: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, tokens: Sequence[int], *, prompt: bool = False) -> FlatLogprobs:
        scored = [*tokens[prompt:]]
        return cls(scored, [-float(t) for t in scored], [0] * prompt + [*range(len(scored))])


@dataclass
class SamplingParams:
    """The parameters that flatout gives, checked as vLLM checks them when they are made."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 2.0:
            raise ValueError(f"temperature must be in [0, 2], got {self.temperature}.")
        if self.n < 1 or (self.temperature == 0 and self.n > 1):
            raise ValueError(f"n must be 1 when using greedy sampling, got {self.n}.")
        if self.min_tokens > self.max_tokens:
            raise ValueError("min_tokens must be less than or equal to max_tokens")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are only supported when detokenize is True.")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63 - self.n:
            raise ValueError("the seed does not fit 64 bits")


def check_request(params: SamplingParams, *, vocab: int) -> None:
    """What vLLM's workers refuse when a request arrives."""
    if params.allowed_token_ids is not None and len(params.allowed_token_ids) > 1024:
        raise ValueError(f"Too many allowed token IDs: {len(params.allowed_token_ids)}. The max size is 1024.")
    if len(params.logit_bias or ()) > 1024:
        raise ValueError(f"Too many logit bias tokens: {len(params.logit_bias or ())}. The max size is 1024.")
    if any(not 0 <= token < vocab for token in params.logit_bias or ()):
        raise ValueError("token_id(s) in logit_bias contain out-of-vocab token ids")
    stops = {*params.stop_token_ids, 256}  # vLLM adds the tokenizer's EOS
    if params.min_tokens > 0 and len(stops) > 128:
        raise ValueError(f"Too many stop tokens: {len(stops)}. The max size is 128.")


class FakeLLM:
    """Answers every prompt with its own reverse; the log-probability of token t is minus t.

    Like vLLM in the caller's process, it seeds all generators when it starts, opens a process group where there is
    none, and destroys any when it ends.
    """

    made: ClassVar[list[FakeLLM]] = []
    vocab: ClassVar[int] = 257
    reason: ClassVar[str | None] = None

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.asked: list[tuple[Any, Any, Any]] = []
        self.loaded: list[dict[str, torch.Tensor]] = []
        self.forgotten = self.ended = 0
        self.draws: list[int] = []  # a seed for each answer
        self.environment = dict(os.environ)
        FakeLLM.made.append(self)
        print("INFO engine is starting")
        os.write(1, b"[Gloo] Rank 0 is connected\n")
        _bar()
        self.in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
        core = types.SimpleNamespace(shutdown=self._shutdown)
        self.llm_engine = types.SimpleNamespace(engine_core=core)
        if self.in_process:
            random.seed(0), np.random.seed(0), torch.manual_seed(0)
            if not distributed.is_initialized():
                distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
            runner = types.SimpleNamespace(model=types.SimpleNamespace(load_weights=self._load))
            self.llm_engine.model_executor = types.SimpleNamespace(
                driver_worker=types.SimpleNamespace(model_runner=runner)
            )

    def _load(self, named: Any) -> None:
        self.loaded.append({name: tensor.clone() for name, tensor in named})

    def _shutdown(self) -> None:
        self.ended += 1
        if self.in_process and distributed.is_initialized():
            distributed.destroy_process_group()

    def reset_prefix_cache(self) -> None:
        self.forgotten += 1

    def generate(self, prompts: Any, params: Any, *, use_tqdm: bool, lora_request: Any) -> list[Any]:
        self.asked.append((prompts, params, lora_request))
        assert not use_tqdm
        return [self._answer(prompt["prompt_token_ids"], param) for prompt, param in zip(prompts, params, strict=True)]

    def _answer(self, ids: list[int], param: SamplingParams) -> Any:
        check_request(param, vocab=self.vocab)
        if param.seed is None:
            np.random.randint(2**31)  # so vLLM takes a seed of its own
        tokens = [*reversed(ids)][: param.max_tokens]
        ended = "stop" if tokens[-1] in param.stop_token_ids else "length"
        self.draws += [(param.seed or 0) + number for number in range(param.n)]
        scored = None if param.logprobs is None else _scored(tokens, param)
        output = types.SimpleNamespace(token_ids=tokens, logprobs=scored, finish_reason=self.reason or ended)
        places = None if param.prompt_logprobs is None else _scored(ids, param, prompt=True)
        return types.SimpleNamespace(outputs=[output] * param.n, prompt_logprobs=places)


def _scored(tokens: list[int], param: SamplingParams, *, prompt: bool = False) -> Any:
    if param.flat_logprobs:
        return FlatLogprobs.of(tokens, prompt=prompt)
    return [*[None] * prompt, *({token: Logprob(-float(token))} for token in tokens[prompt:])]


def _bar() -> None:
    from tqdm import tqdm

    list(tqdm(range(2), desc="Capturing"))


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    request = types.ModuleType("vllm.lora.request")
    request.LoRARequest = lambda *values: values  # type: ignore[attr-defined]
    module = types.ModuleType("vllm")
    module.LLM, module.SamplingParams = FakeLLM, SamplingParams  # type: ignore[attr-defined]
    for name, fake in {"vllm": module, "vllm.lora": types.ModuleType("vllm.lora"), request.__name__: request}.items():
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(FakeLLM, "made", [])
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    environment = dict(os.environ)
    yield
    for sampler in FakeLLM.made:
        sampler._shutdown()
    os.environ.clear()
    os.environ.update(environment)


def made(*, vocab: int = 257, tokenizer: Any = TOKENIZER, **options: Any) -> Vllm:
    return Vllm(Path("folder"), tokenizer, window=34, vocab=vocab, **options)


def followed(decoder: Decoder) -> Any:
    return sampler_of(Asked(decoder), backend="vllm", memory=0.25)


def test_what_is_asked_and_how_the_answer_is_read() -> None:
    sampler = made(dtype="bfloat16", rows=8)
    [llm] = FakeLLM.made
    assert llm.options == {
        "model": "folder", "tokenizer": "folder", "dtype": "bfloat16", "max_model_len": 34,
        "logprobs_mode": "raw_logprobs", "max_num_seqs": 8, "generation_config": "vllm", "use_tqdm_on_load": False,
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
    assert prompts == [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [4] * 29}], "each prompt is asked once"
    assert request is None
    assert len(set(llm.draws)) == 4, "each completion has draws of its own"
    assert replace(params[0], seed=None) == SamplingParams(
        n=2, max_tokens=6, min_tokens=2, temperature=0.5, top_p=0.9, top_k=5, ignore_eos=True, stop_token_ids=[1, 3],
        stop=["x"], include_stop_str_in_output=True, skip_special_tokens=False, logprobs=0, flat_logprobs=True,
    )  # fmt: skip
    assert params[-1].max_tokens == 3, "the window ends it"
    assert list(sampler.stream([1, 2], sampling=sampling)) == [2, 1]


def test_later_samples_of_a_prompt_continue_its_first_ones() -> None:
    sampler = made()
    [llm] = FakeLLM.made
    warm = Sampling(max_tokens=2, temperature=1.0, seed=5)
    list(sampler.generate([[1], [2]], sampling=warm, samples=4))
    first = llm.draws[:4]
    llm.draws.clear()
    list(sampler.generate([[1]], sampling=warm, samples=2, first=2))
    assert llm.draws == first[2:]
    llm.draws.clear()
    list(sampler.generate([[1]], sampling=warm, keys=[1]))
    assert llm.draws[0] not in first


def test_the_likeliest_answer_is_computed_once() -> None:
    found = list(made().generate([[1, 2]], sampling=Sampling(max_tokens=2), samples=3))
    assert [(c.sample, c.ids) for c in found] == [(0, (2, 1)), (1, (2, 1)), (2, (2, 1))]
    assert len(FakeLLM.made[0].draws) == 1


def test_text_and_logprobs_are_made_only_where_they_are_needed() -> None:
    sampler = made()
    [done] = sampler.generate([[1, 2]], sampling=Sampling(max_tokens=2, logprobs=False))
    assert (done.ids, done.logprobs) == ((2, 1), ())
    list(sampler.generate([[1, 2]], sampling=Sampling(max_tokens=2, stop_texts=("x",))))
    asked = [params[0] for _, params, _ in FakeLLM.made[0].asked]
    assert [(one.detokenize, one.logprobs) for one in asked] == [(False, None), (True, 0)]


def test_likelihoods_are_read_from_the_prompt() -> None:
    sampler = made()
    assert sampler.likelihoods([([9, 8], [[1], [2, 3]]), ([9], [[4]])]) == [[-1.0, -5.0], [-4.0]]
    assert list(sampler.surprisals([[9, 1, 2]])) == [[1.0, 2.0]]
    asked = FakeLLM.made[0].asked[0][1][0]
    assert (asked.max_tokens, asked.prompt_logprobs, asked.detokenize) == (1, 0, False)
    assert sampler.likelihoods([]) == []


class Sized(ByteTokenizer):
    """As many ids as Qwen3's tokenizer."""

    vocab_size = 151_669


@pytest.mark.parametrize(("tokenizer", "head"), [(TOKENIZER, 272), (Sized(), 151_936), (TOKENIZER, 257 + 1024)])
def test_ids_without_text_are_never_sampled(
    tokenizer: ByteTokenizer, head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLLM, "vocab", head)
    sampler = made(tokenizer=tokenizer, vocab=head)
    assert len(list(sampler.generate([[1, 2]], sampling=Sampling(max_tokens=2, temperature=1.0), samples=2))) == 2
    asked = FakeLLM.made[0].asked[0][1][0]
    assert asked.logit_bias == {token: float("-inf") for token in range(tokenizer.vocab_size, head)}


def test_more_of_them_than_vllm_takes_are_refused_before_it_starts() -> None:
    with pytest.raises(
        UsageError, match=r"1,282 ids and its tokenizer 257: .* at most 1,024 .* not 1,025; use another"
    ):
        made(vocab=257 + 1025)
    assert not FakeLLM.made


def test_stop_ids_that_vllm_cannot_delay_are_refused() -> None:
    sampler = made()
    many = Sampling(max_tokens=9, min_tokens=2, stop_ids=frozenset(range(128)))
    with pytest.raises(UsageError, match="128 stop ids with a minimum length of 2 tokens: vLLM takes at most 127"):
        list(sampler.generate([[1, 200]], sampling=many))
    list(sampler.generate([[1, 200]], sampling=replace(many, stop_ids=frozenset(range(127)))))
    list(sampler.generate([[1, 200]], sampling=replace(many, min_tokens=0)))


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_temperatures_that_vllm_would_change_or_refuse(temperature: float) -> None:
    wrong = Sampling(max_tokens=9, temperature=temperature)
    with pytest.raises(UsageError, match=f"temperature {temperature:g}: vLLM takes 0, or 0.01 to 2; change it"):
        list(made().generate([[1]], sampling=wrong))
    with pytest.raises(UsageError, match="vLLM takes 0"):
        backend_of("vllm", sampling=wrong)
    assert backend_of("flatout", sampling=wrong) == "flatout"


def test_an_answer_that_vllm_gave_up_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "reason", "error")
    with pytest.raises(RunFailed, match="ended an answer by 'error'"):
        list(made().generate([[1]], sampling=Sampling(max_tokens=1)))


# -- what an engine leaves as it was


def states() -> list[Any]:
    name, keys, *rest = np.random.get_state()
    return [random.getstate(), name, keys.tolist(), *rest, torch.get_rng_state().tolist()]


def test_random_states_stay_as_they_were(decoder: Decoder) -> None:
    before = states()
    sampler = followed(decoder)
    list(sampler.generate([[1]], sampling=Sampling(max_tokens=1, temperature=1.0), samples=2))
    list(sampler.surprisals([[1, 2]]))
    assert states() == before


def test_an_engine_ends_with_what_it_opened(decoder: Decoder) -> None:
    sampler = followed(decoder)
    assert distributed.is_initialized()
    sampler.close()
    assert not distributed.is_initialized()
    sampler = followed(decoder)
    del sampler
    gc.collect()
    assert not distributed.is_initialized()
    assert [llm.ended for llm in FakeLLM.made] == [1, 1]


def test_a_process_group_that_was_open_stays_open(decoder: Decoder) -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    sampler = followed(decoder)
    sampler.close()
    assert FakeLLM.made[0].ended == 1
    assert distributed.is_initialized()
    distributed.destroy_process_group()
    assert not distributed.is_initialized()


def test_an_engine_that_ran_out_of_memory_ends_before_the_next_starts(decoder: Decoder) -> None:
    opened: list[int] = []

    def work(sampler: Any) -> str:
        opened.append(len([llm for llm in FakeLLM.made if not llm.ended]))
        if len(FakeLLM.made) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "done"

    fitting = Fitting(lambda rows: followed(decoder), rows=4)
    assert fitting.run(work) == "done"
    assert opened == [1, 1]
    fitting.close()
    assert [llm.ended for llm in FakeLLM.made] == [1, 1]


def test_an_engine_starts_quietly(decoder: Decoder, capfd: pytest.CaptureFixture[str]) -> None:
    followed(decoder)
    out, err = capfd.readouterr()
    assert out == "", "stdout belongs to the command"
    assert "Capturing" not in err
    seen = FakeLLM.made[0].environment
    assert (seen["VLLM_LOGGING_LEVEL"], seen["VLLM_LOGGING_STREAM"]) == ("ERROR", "ext://sys.stderr")
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ, "the next engine may have a process of its own"
    assert "TQDM_DISABLE" not in os.environ


def test_logs_can_be_turned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    made()
    assert FakeLLM.made[0].environment["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_an_engine_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> None:
        raise ValueError("Free memory on device is less than desired.\nMore lines.")

    monkeypatch.setattr(sys.modules["vllm"], "LLM", refuse)
    with pytest.raises(EnvironmentLacks, match=r"vLLM cannot start: Free memory .* desired\.; VLLM_LOGGING_LEVEL=INFO"):
        made()


# -- from the command line


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shape = ModelShape(
        layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=64, vocab=320, positions=2048
    )
    model = Decoder(shape)
    model.initialise(0)
    TOKENIZER.save(tmp_path / "model")
    weights.export(model, tmp_path / "model", dtype=torch.float32, eos_token_id=256)
    return tmp_path / "model"


def test_a_task_is_measured_without_a_line_of_vllm_in_the_output(
    folder: Path, flatout: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLLM, "vocab", 320)
    done = flatout("eval", str(folder), "--tasks", "units", "--limit", "2", "--backend", "vllm", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["tasks"][0]["n"] == 2
    assert FakeLLM.made[0].asked[0][1][0].logprobs is None, "scores need no log-probabilities"
    gc.collect()
    assert FakeLLM.made[0].ended == 1


@pytest.mark.parametrize("verb", [["eval", "--tasks", "units"], ["generate", "Hello"], ["chat"]], ids=" ".join)
def test_a_head_that_is_too_wide_is_refused_before_its_weights_are_read(
    folder: Path, verb: list[str], flatout: Command
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 9000}))
    (folder / "model.safetensors").write_bytes(b"nobody reads this")
    name, *options = verb
    done = flatout(name, str(folder), *options, "--backend", "vllm")
    assert done.code == 2, done.err
    assert "9,000 ids and its tokenizer 257" in done.err


def test_wrong_temperatures_are_refused_before_a_model_is_loaded(folder: Path, flatout: Command) -> None:
    (folder / "config.json").unlink()
    done = flatout("chat", str(folder), "--temperature", "3", "--backend", "vllm")
    assert (done.code, "vLLM takes 0, or 0.01 to 2" in done.err) == (2, True)


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
