"""Training goes on from a folder's weights, ours or transformers' own architecture, and exports what it came to."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from flatout.engine.trained import open_trained
from flatout.model import Decoder, Foreign
from flatout.model.attention import over_sequences
from flatout.record import Run

Call = Callable[..., subprocess.CompletedProcess[str]]

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 257,
    "max_position_embeddings": 64,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=257, n_positions=64)),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, rope_parameters=LLAMA3 | {"original_max_position_embeddings": 32})
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=16)),
}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    MODELS[request.param]().save_pretrained(tmp_path / request.param)
    return tmp_path / request.param


# What the shared configuration says of a shape is of no use beside a name.
NAMED = ["model.layers=null", "model.hidden=null", "model.heads=null"]


def named(folder: Path) -> list[str]:
    return [*NAMED, f"model.name={folder}"]


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("gpt2", Foreign), ("mistral", Decoder), ("llama", Decoder)],
    indirect=["folder"],
    ids=["gpt2", "mistral-window", "llama3"],
)
def test_trained_resumed_and_exported(folder: Path, kind: type, flatout: Call, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = flatout("train", config, *named(folder), "train.steps=12", "save.every=6", "--run", run)
    assert done.returncode == 0, done.stderr
    more = flatout("train", config, *named(folder), "train.steps=18", "--run", run, "--resume")
    assert more.returncode == 0, more.stderr
    losses = [record.loss or 0.0 for record in Run.open(run).latest_steps()]
    assert len(losses) == 18
    assert losses[-1] < losses[0] - 0.3
    facts = next(dict(e.data) for e in Run.open(run).events() if e.kind == "active")
    assert ("model" in facts) == (kind is Foreign)

    trained = open_trained(Run.open(run))
    assert isinstance(trained.model, kind)
    assert trained.step == 18
    exported = flatout("export", run, "--to", tmp_path / "hf", "--dtype", "fp32")
    assert exported.returncode == 0, exported.stderr
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    before = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(theirs) is type(before)
    tokens = torch.randint(0, 257, (1, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        attend = over_sequences(trained.model.shape, batch=1)
        ours = trained.model(tokens[0], torch.arange(48), attend, lambda h, w: h @ w.t())
        assert (theirs(tokens).logits[0] - ours).abs().max() < 1e-4
        assert (before(tokens).logits[0] - ours).abs().max() > 1e-2, "it did learn something"


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
def test_recomputation_of_a_foreign_model_changes_no_loss(
    folder: Path, flatout: Call, config: Path, tmp_path: Path
) -> None:
    losses = []
    for mode in ("none", "full"):
        run = tmp_path / mode
        done = flatout("train", config, *named(folder), f"plan.recompute={mode}", "train.steps=4", "--run", run)
        assert done.returncode == 0, done.stderr
        losses.append([record.loss for record in Run.open(run).latest_steps()])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


# Refusals, with exit codes


def refused(done: subprocess.CompletedProcess[str], *, code: int, words: list[str]) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, f"{word!r} is not in: {done.stderr}"


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
def test_what_the_adapter_lacks_is_refused_by_name_all_at_once(folder: Path, flatout: Call, config: Path) -> None:
    asked = ["data.packing=documents", "plan.fp8=true", "plan.fused_qkv=true", "plan.compile=default"]
    done = flatout("train", config, *named(folder), *asked, "plan.recompute=selective")
    words = ["plan.fused_qkv, plan.fp8, plan.compile default, plan.recompute selective"]
    refused(done, code=2, words=[*words, "model_type 'gpt2'", "transformers runs it"])


@pytest.mark.parametrize("folder", ["llama", "gpt2"], indirect=True)
def test_weights_that_cannot_be_read(folder: Path, flatout: Call, config: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    done = flatout("train", config, *named(folder))
    refused(done, code=2, words=["model.safetensors is not a readable safetensors file", str(len(content) - 100)])
    file.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    refused(flatout("train", config, *named(folder)), code=2, words=["only pytorch_model.bin", "pickled"])


def test_names_of_the_hub(flatout: Call, config: Path, tmp_path: Path) -> None:
    offline = flatout("train", config, *NAMED, "model.name=gpt2")
    refused(offline, code=3, words=["'gpt2' is not a local folder", "hub cannot be reached"])
    unpinned = flatout("train", config, *NAMED, "model.name=owner/model", "--trust-remote-code", "main")
    refused(unpinned, code=2, words=["--trust-remote-code", "40 hexadecimal digits"])
    without = flatout("train", config, "model.revision=main")
    refused(without, code=2, words=["model.revision: main works only with model.name"])


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_padded_vocabulary_is_told(folder: Path, flatout: Call, config: Path, tmp_path: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"vocab_size": 320}))
    done = flatout("train", config, *named(folder), "train.steps=3", "--run", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    notices = [str(e.data["text"]) for e in Run.open(tmp_path / "run").events() if e.kind == "notice"]
    assert any("has 257 rows, but config.json a vocabulary of 320: 63 are the mean" in text for text in notices)
