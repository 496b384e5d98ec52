"""Models of other architectures, as transformers builds them, behind what the step asks of a model."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from flatout import hub
from flatout.config.settings import ModelSettings
from flatout.cost import Adapters, ModelShape
from flatout.data.tokenizer import ByteTokenizer
from flatout.errors import EnvironmentLacks, UsageError
from flatout.losses import linear_cross_entropy
from flatout.model import Foreign, Masked, Padded, Rectangular, load_model
from flatout.model.loading import empty_model, export_model, load_adapted
from flatout.plan import named_shape
from flatout.sample import HuggingFace

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT = {key: value for key, value in SMALL.items() if key not in ("intermediate_size", "num_key_value_heads")}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 96, "n_positions": 64, "initializer_range": 0.2}


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    models = {
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
        "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SMALL, head_dim=16)),
        "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL, attention_dropout=0.1, hidden_dropout=0.1)),
        "opt": lambda: OPTForCausalLM(OPTConfig(**OPT, ffn_dim=64, word_embed_proj_dim=32, dropout=0.1)),
        "cohere": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
        "llama-mlp-bias": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, mlp_bias=True)),
        "llama-dynamic": lambda: LlamaForCausalLM(
            LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
        ),
        "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=3.0)),
        "phi": lambda: PhiForCausalLM(PhiConfig(**SMALL)),
    }
    return models[kind]().eval()


TRAINABLE = ["gpt2", "gemma", "neox", "opt", "cohere", "llama-mlp-bias", "llama-dynamic"]
TOKENS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(0))


def save(kind: str, folder: Path) -> PreTrainedModel:
    theirs = build(kind)
    theirs.save_pretrained(folder)
    return theirs


def opened(folder: Path, **settings: object) -> Foreign:
    model = ModelSettings(name=str(folder), **settings)
    found = load_model(model, shape=named_shape(model))
    assert isinstance(found, Foreign)
    return found


def positions(tokens_BT: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens_BT.shape[1]).repeat(tokens_BT.shape[0])


def logits(model: Foreign, tokens_BT: torch.Tensor) -> torch.Tensor:
    attend = Rectangular(batch=len(tokens_BT))
    flat = model(tokens_BT.flatten(), positions(tokens_BT), attend, lambda h, w: h @ w.t())
    return flat.view(*tokens_BT.shape, -1)


@pytest.mark.parametrize("kind", TRAINABLE)
def test_logits_and_gradients_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = save(kind, tmp_path)
    ours = opened(tmp_path)
    assert ours.shape.foreign, "our own decoder must not have taken it"
    targets = TOKENS.roll(-1, dims=1)
    targets[:, -1] = -100
    expected = theirs(TOKENS).logits
    with torch.no_grad():
        assert (logits(ours, TOKENS) - expected).abs().max() < 1e-4

    F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    loss = ours(
        TOKENS.flatten(),
        positions(TOKENS),
        Rectangular(batch=2),
        lambda h, w: linear_cross_entropy(h, w, targets.flatten(), chunk=16),
    )
    loss.backward()
    for (name, parameter), other in zip(ours.inner.named_parameters(), theirs.parameters(), strict=True):
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, other.grad, atol=1e-3, rtol=1e-3, msg=name)


def test_padding_on_the_right_changes_nothing_before_it(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    ours = opened(tmp_path)
    padded = F.pad(TOKENS[:, :10], (0, 14), value=0)
    with torch.no_grad():
        assert (logits(ours, padded)[:, :10] - logits(ours, TOKENS[:, :10])).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_dropout_is_off_and_recomputation_changes_nothing(kind: str, tmp_path: Path) -> None:
    theirs = save(kind, tmp_path)
    assert max(v for k, v in theirs.config.to_dict().items() if "drop" in k and isinstance(v, float)) == 0.1
    gradients = []
    for mode in ("none", "full"):
        ours = opened(tmp_path)
        ours.recompute(mode)
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        inside = next(part for part in ours.blocks[0].modules() if isinstance(part, torch.nn.LayerNorm))
        inside.register_forward_pre_hook(count)  # a hook on the block itself may stand outside the checkpoint
        assert len(ours.blocks) == 2
        logits(ours, TOKENS).square().mean().backward()
        assert calls == (1 if mode == "none" else 2), "a block runs twice where it is recomputed"
        gradients.append([p.grad for p in ours.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


@pytest.mark.parametrize("kind", TRAINABLE)
def test_an_export_opens_with_equal_logits_and_its_own_configuration(kind: str, tmp_path: Path) -> None:
    theirs = save(kind, tmp_path / "in")
    ours = opened(tmp_path / "in")
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.01
        expected = logits(ours, TOKENS)
    export_model(ours, tmp_path / "out", dtype=torch.float32, eos_token_id=2)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert (again(TOKENS).logits - expected).abs().max() < 1e-4
    differing = {k for k, v in theirs.config.to_dict().items() if again.config.to_dict()[k] != v}
    assert differing <= {"_name_or_path", "transformers_version", "dtype", "architectures", "eos_token_id"}
    assert {p.dtype for p in ours.parameters()} == {torch.float32}


def test_random_weights_are_seeded_and_leave_the_generator_alone(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    shape = named_shape(ModelSettings(name=str(tmp_path)))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    models = [load_model(ModelSettings(name=str(tmp_path), weights="random"), shape=shape, seed=s) for s in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    one, same, other = (model.head_weight for model in models)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert isinstance(empty_model(ModelSettings(name=str(tmp_path)), shape=shape), Foreign)


def test_the_compute_type_is_not_the_one_weights_are_kept_in(tmp_path: Path) -> None:
    theirs = save("gpt2", tmp_path)
    model = ModelSettings(name=str(tmp_path))
    ours = load_model(model, compute_dtype=torch.bfloat16)
    assert isinstance(ours, Foreign)
    hidden = ours.hidden(TOKENS.flatten(), positions(TOKENS), Rectangular(batch=2))
    assert hidden.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    with torch.no_grad():
        found, expected = (hidden.float() @ ours.head_weight.t()).flatten(), theirs(TOKENS).logits.flatten()
    assert torch.cosine_similarity(found, expected, dim=0) > 0.999
    hidden.float().square().mean().backward()
    assert {p.grad.dtype for p in ours.parameters() if p.grad is not None} == {torch.float32}


def test_inputs_of_adapters_are_not_widened_and_their_outputs_are_the_same(tmp_path: Path) -> None:
    save("gemma", tmp_path)
    shape = named_shape(ModelSettings(name=str(tmp_path)))
    spec, bf16 = Adapters(rank=4, alpha=8.0), torch.bfloat16
    ours = load_adapted(tmp_path, spec, shape=shape, device=torch.device("cpu"), compute_dtype=bf16)
    assert isinstance(ours, Foreign)
    layers: list[Any] = [module for module in ours.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    found = []
    for widened in (False, True):
        for layer in layers:
            assert widened or layer.cast_input_dtype_enabled is False
            layer.cast_input_dtype_enabled = widened
        hidden = ours.hidden(TOKENS.flatten(), positions(TOKENS), Rectangular(batch=2))
        trained = [weight for weight in ours.parameters() if weight.requires_grad]
        found.append([hidden, *torch.autograd.grad(hidden.float().square().mean(), trained)])
    assert len(layers) == 14
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)

    for layer in layers:
        layer.cast_input_dtype_enabled = False
    sampler = HuggingFace(ours.inner, ByteTokenizer(), window=64, compute_dtype=bf16)
    with torch.no_grad():
        logits_TV = ours(TOKENS[0], positions(TOKENS[:1]), Rectangular(batch=1), lambda h, w: h @ w.t()).float()
    expected = -logits_TV[:-1].log_softmax(-1).gather(-1, TOKENS[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(next(iter(sampler.surprisals([TOKENS[0].tolist()])))), expected)


# Refusals


def test_without_transformers_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("gpt2", tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EnvironmentLacks, match=r"pip install 'flatout\[hf\]'"):
        opened(tmp_path)


@pytest.mark.parametrize(("kind", "words"), [("phi", "a bias")])
def test_a_head_that_is_more_than_a_matmul_is_refused(kind: str, words: str, tmp_path: Path) -> None:
    theirs = build(kind)
    if kind == "phi":
        torch.nn.init.normal_(theirs.lm_head.bias)
    theirs.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=f"more than one matmul .*{words}"):
        opened(tmp_path)


@pytest.mark.parametrize("kind", [*TRAINABLE, "gemma2"])
def test_documents_of_a_packed_row_are_as_they_are_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(kind, tmp_path)
    ours = opened(tmp_path)
    assert ours.packs is (kind != "opt"), "OPT's mask does not know the positions"
    ends = torch.tensor([0, 9, 16, 24, 44, 48, 48], dtype=torch.int32)
    places = torch.cat([torch.arange(int(length)) for length in ends.diff()])
    rows: list[int] = []
    body = ours._body

    def counted(tokens_BT: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        rows.append(len(tokens_BT))
        return body(tokens_BT, *more)

    monkeypatch.setattr(ours, "_body", counted)

    def found(**packed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        attend = Padded.of(ends, tokens=48, longest=20, trim=True, **packed)
        loss_of = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
        hidden = ours.hidden(TOKENS.flatten(), places, attend)
        weights = [weight for weight in ours.parameters() if weight.requires_grad]
        gradients = torch.autograd.grad((hidden * loss_of).sum(), weights, allow_unused=True)
        return hidden.detach(), [gradient for gradient in gradients if gradient is not None]

    (expected, theirs), (packed, gradients) = found(), found(packed_rows=2)
    assert rows == [5, 2 if ours.packs else 5]
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-4)
    for one, other in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_rows_are_packed_where_that_is_less_work(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    ours = opened(tmp_path)

    def is_packed(lengths: list[int], *, rows: int) -> bool:
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        attend = Padded.of(ends, tokens=sum(lengths), longest=max(lengths), trim=True, packed_rows=rows)
        return ours._is_less_packed(attend, tokens=sum(lengths))

    assert is_packed([9, 7, 8, 20, 4], rows=2)
    assert not is_packed([24, 24], rows=2), "one document in each row needs no mask"
    assert not is_packed([990, 10, 990, 10], rows=2), "the mask would take more memory than padding"


@pytest.mark.parametrize(
    "changes", [{"attention_chunk_size": 8}, {"layer_types": ["full_attention", "compressed_sparse_attention"]}]
)
def test_layers_that_count_from_the_start_of_a_row_are_not_packed(changes: dict[str, Any], tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    ours = opened(tmp_path)
    for name, value in changes.items():
        setattr(ours.config, name, value)
    assert not ours.packs


def test_a_model_that_lets_documents_see_each_other_is_not_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only far within a document, and by little: its first tokens are as they are alone."""
    save("gpt2", tmp_path)
    ours = opened(tmp_path)
    body = ours._body

    def leaking(tokens_BT: torch.Tensor, *positions_BT: torch.Tensor) -> torch.Tensor:
        found = body(tokens_BT, *positions_BT)
        found[:, -1] += 1e-6 * found[:, 0]
        return found

    assert ours.packs
    del ours.__dict__["packs"]
    monkeypatch.setattr(ours, "_body", leaking)
    assert not ours.packs


def test_packed_documents_are_refused(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    ends = torch.tensor([0, 24, 48], dtype=torch.int32)
    attend = Masked.of(ends, batch=2, length=24)
    with pytest.raises(UsageError, match="Masked attention is not available: model_type 'gpt2'"):
        opened(tmp_path).hidden(TOKENS.flatten(), positions(TOKENS), attend)


def test_missing_weights_are_not_invented(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save("gpt2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if "h.1.mlp.c_fc.weight" in name)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"lacks .*h\.1\.mlp\.c_fc\.weight"):
        opened(tmp_path)


def test_truncated_and_pickled_weights_are_refused(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(UsageError, match=r"model\.safetensors is not a readable safetensors file \(5000 bytes\)"):
        opened(tmp_path)
    file.unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"only pytorch_model\.bin: pickled weights are not read"):
        opened(tmp_path)


def test_what_neither_we_nor_transformers_know_is_said(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "no-such-thing"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"'no-such-thing' .* is not a causal language model that transformers"):
        opened(tmp_path)


# Code that comes with a model

CODE = """
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel
Path(__file__).with_name("ran").write_text("it ran")
class OwnConfig(GPT2Config):
    model_type = "own"
class OwnModel(GPT2LMHeadModel):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import transformers.dynamic_module_utils

    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    save("gpt2", folder)
    (folder / "own.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    return folder


def ran(folder: Path) -> bool:
    return any(folder.parent.rglob("ran"))


def test_code_runs_only_where_it_is_trusted(with_code: Path) -> None:
    with pytest.raises(UsageError, match=r"comes with Python code \(own\.py\)\. Read it, and to run it say") as refused:
        opened(with_code)
    pin = str(refused.value).rpartition(" ")[2]
    for wrong in ("true", "0" * 40, "0" * 64, pin[:-1]):
        with pytest.raises(UsageError, match=f"which --trust-remote-code {wrong} does not stand for"):
            opened(with_code, trust=wrong)
    assert not ran(with_code)
    ours = opened(with_code, trust=pin)
    assert ran(with_code)
    assert type(ours.inner).__name__ == "OwnModel"
    export_model(ours, with_code.parent / "out", dtype=torch.float32)
    again = AutoModelForCausalLM.from_pretrained(with_code.parent / "out", trust_remote_code=True).eval()
    with torch.no_grad():
        assert (again(TOKENS).logits - logits(ours, TOKENS)).abs().max() < 1e-4


def test_code_of_another_repository_is_refused(with_code: Path) -> None:
    config = json.loads((with_code / "config.json").read_text())
    config["auto_map"]["AutoModelForCausalLM"] = "somebody/else--own.OwnModel"
    (with_code / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"somebody/else--own\.OwnModel', .* code of another repository"):
        opened(with_code, trust=hub.code_of(str(with_code), with_code).pin)
    assert not ran(with_code)


def test_the_code_that_runs_is_the_code_that_was_pinned(with_code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes after it was compared, generation code and an adapter beside the model have no effect."""
    pin = hub.code_of(str(with_code), with_code).pin
    (with_code / "custom_generate").mkdir()
    (with_code / "custom_generate" / "generate.py").write_text(CODE)
    elsewhere = {"peft_type": "LORA", "base_model_name_or_path": "/nonexistent", "auto_map": {}}
    (with_code / "adapter_config.json").write_text(json.dumps(elsewhere))
    read = hub.code_of

    def then_changed(name: str, found: Path) -> hub.Code:
        code = read(name, found)
        (with_code / "own.py").write_text("raise SystemExit('other code ran')")
        return code

    monkeypatch.setattr(hub, "code_of", then_changed)
    assert type(opened(with_code, trust=pin).inner).__name__ == "OwnModel"


def test_no_configuration_names_kernels_or_other_files(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    asked = {
        "attn_implementation": "somebody/kernel",
        "_attn_implementation": "somebody/kernel",
        "transformers_weights": "../other.safetensors",
        "_name_or_path": "/etc",
        "auto_map": {"AutoModelForCausalLM": "own.OwnModel"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config | asked))
    ours = opened(tmp_path)
    assert ours.inner.config._attn_implementation in ("sdpa", "eager")
    assert not hasattr(ours.inner.config, "auto_map")


@pytest.mark.parametrize(
    "changes",
    [
        {"n_layer": 10**9},
        {"n_head": 0},
        {"n_embd": -1},
        {"n_embd": "64"},
        {"n_embd": [64]},
        {"vocab_size": 10**12},
        {"vocab_size": 10**4000},
        {"n_inner": 2**40},
        {"n_positions": None},
        {"activation_function": 7},
        {"text_config": [1]},
        {"model_type": ["gpt2"]},
        {"model_type": None},
    ],
    ids=str,
)
def test_absurd_configurations_are_one_sentence(tmp_path: Path, changes: dict[str, Any]) -> None:
    save("gpt2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UsageError) as refused:
        opened(tmp_path)
    assert "\n" not in str(refused.value)


# The shape to plan with


def test_the_nearest_shape_reads_the_names_of_others(tmp_path: Path) -> None:
    shape = ModelShape.of_config(build("gpt2").config.to_dict())
    assert (shape.layers, shape.hidden, shape.heads, shape.head_dim) == (2, 32, 2, 16)
    assert (shape.intermediate, shape.vocab, shape.positions) == (128, 96, 64)
    with pytest.raises(UsageError, match=r"has no layers, no width, no heads, which the plan needs"):
        ModelShape.of_config({"model_type": "own", "vocab_size": 96})
