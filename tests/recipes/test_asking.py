"""`eval` and `chat` take whatever this project trains, writes or can load: runs, adapters, exports, foreign models."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.data.talks import question, tokenizer_folder
from typer.testing import CliRunner

from flatout.cli import app
from flatout.engine.opening import open_model
from flatout.errors import UsageError
from flatout.model import Decoder, Foreign
from flatout.model.nf4 import Nf4
from flatout.record import Run
from flatout.sample import Sampling, prompt_ids, sampler_of

Call = Callable[..., subprocess.CompletedProcess[str]]
ASKED = [[{"role": "user", "content": question(i)[0]}] for i in range(4)]


def answers(name: Path, backend: str = "auto") -> list[tuple[int, ...]]:
    """Greedy ids, in the order of the questions."""
    opened = open_model(str(name))
    sampler = sampler_of(opened, backend=backend)  # type: ignore[arg-type]
    prompts = [prompt_ids(opened.tokenizer, messages) for messages in ASKED]
    sampling = Sampling(max_tokens=12, stop_ids=opened.stop_ids)
    return [c.ids for c in sorted(sampler.generate(prompts, sampling=sampling), key=lambda c: c.prompt)]


def asked(name: Path, tmp_path: Path) -> None:
    """Both verbs, as a user calls them."""
    text = tmp_path / "text.txt"
    text.write_text("How many grams are there in 2 kilograms? 2000 grams. " * 4)
    runner = CliRunner()
    tasks = ["--tasks", f"units,perplexity:{text}", "--limit", "2", "--max-tokens", "6"]
    done = runner.invoke(app, ["eval", str(name), *tasks])
    assert done.exit_code == 0, done.output
    assert "accuracy" in done.output
    assert "perplexity" in done.output
    said = runner.invoke(app, ["chat", str(name), "--max-tokens", "6", "--temperature", "0"], input="2 kilograms?\n")
    assert said.exit_code == 0, said.output
    assert said.stdout.strip(), "an answer"


def test_a_run_of_adapters_and_what_is_exported_of_it(flatout: Call, sft: Path, base: Path, tmp_path: Path) -> None:
    run, adapter, merged = tmp_path / "run", tmp_path / "adapter", tmp_path / "merged"
    assert flatout("train", sft, "--run", run).returncode == 0
    assert flatout("export", run, "--to", adapter).returncode == 0
    assert flatout("export", run, "--to", merged, "--merge", "--dtype", "fp32").returncode == 0
    learnt = answers(run)
    assert learnt == answers(adapter) == answers(merged), "three ways to one model"
    assert learnt == answers(run, "hf") == answers(merged, "hf"), "and by transformers"
    assert learnt != answers(base), "it did learn"
    for name in (run, adapter):
        asked(name, tmp_path)
    [found] = [event for event in Run.open(run).events() if event.kind == "tasks"]
    assert found.step == 16

    other = tmp_path / "other"
    other.mkdir()
    for file in base.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-4:] = b"\x00\x00\x00\x40"
    (other / "model.safetensors").write_bytes(bytes(content))
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(other)}))
    with pytest.raises(UsageError, match="adapter of another base"):
        open_model(str(adapter))
    config.write_text(config.read_text().replace(f'"{other}"', "null"))
    with pytest.raises(UsageError, match="names no base_model_name_or_path"):
        open_model(str(adapter))


def test_a_run_on_four_bits_is_asked_on_four_bits(flatout: Call, sft: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert flatout("train", sft, "lora.base=4-bit", "--run", run).returncode == 0
    opened = open_model(str(run))
    assert isinstance(opened.model, Decoder)
    assert isinstance(opened.model.blocks[0].qkv, Nf4)
    asked(run, tmp_path)


def test_a_full_run(flatout: Call, sft: Path, tmp_path: Path) -> None:
    run, written = tmp_path / "run", tmp_path / "written"
    done = flatout("train", sft, "lora.rank=null", "lora.alpha=null", "train.lr=3e-3", "train.steps=4", "--run", run)
    assert done.returncode == 0, done.stderr
    assert flatout("export", run, "--to", written, "--dtype", "fp32").returncode == 0
    assert answers(run) == answers(written)
    asked(run, tmp_path)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Phi, whose head has a bias: it cannot be trained here, and can be asked."""
    from transformers import PhiConfig, PhiForCausalLM

    folder = tokenizer_folder(tmp_path_factory.mktemp("foreign"))
    torch.manual_seed(0)
    config = PhiConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=320,
        max_position_embeddings=1024, initializer_range=0.3, bos_token_id=0, eos_token_id=[2, 9], pad_token_id=0,
    )  # fmt: skip
    model = PhiForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(folder)
    return folder


def test_a_foreign_model(foreign: Path, tmp_path: Path) -> None:
    opened = open_model(str(foreign))
    assert isinstance(opened.model, Foreign)
    assert opened.stop_ids == {2, 9}
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(foreign)
    prompt = prompt_ids(opened.tokenizer, ASKED[0])
    wanted = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    assert list(answers(foreign)[0]) == wanted
    asked(foreign, tmp_path)
    with pytest.raises(UsageError, match="--backend flatout runs only flatout's own decoder, use hf"):
        sampler_of(opened, backend="flatout")
    lacks = CliRunner().invoke(app, ["chat", str(foreign), "--backend", "vllm"])
    assert lacks.exception is not None
    assert "vLLM is not installed" in str(lacks.exception)


def test_a_run_of_a_foreign_model(flatout: Call, config: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=257, n_positions=512, initializer_range=0.2)
    GPT2LMHeadModel(shape).save_pretrained(tmp_path / "gpt2")
    run = tmp_path / "run"
    done = flatout("train", config, f"model={tmp_path / 'gpt2'}", "train.steps=3", "--run", run)
    assert done.returncode == 0, done.stderr
    asked(run, tmp_path)
