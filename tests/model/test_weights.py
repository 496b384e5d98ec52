"""Our decoder against transformers' own classes, weights going both ways."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from flatout.cost import ModelShape
from flatout.errors import UsageError
from flatout.model import Decoder, Rectangular, weights
from flatout.model.attention import over_sequences

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def scaled(kind: str, **values: float) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **values}}


LLAMA3 = scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = scaled("yarn", original_max_position_embeddings=16)
FAMILIES = {
    "llama": LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=4)),
    "llama-gqa-tied": LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True)),
    "llama-theta": LlamaForCausalLM(
        LlamaConfig(**SMALL, num_key_value_heads=1, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    ),
    "llama-bias": LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, attention_bias=True)),
    "llama-llama3": LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, **LLAMA3)),
    "llama-linear": LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, **scaled("linear"))),
    "llama-yarn": LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, **YARN)),
    "mistral": MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=None)),
    "mistral-window": MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=16)),
    "qwen2": Qwen2ForCausalLM(Qwen2Config(**SMALL, num_key_value_heads=2)),
    "qwen2-yarn": Qwen2ForCausalLM(
        Qwen2Config(
            **SMALL,
            num_key_value_heads=2,
            **scaled("yarn", original_max_position_embeddings=16, mscale=1.3, mscale_all_dim=0.7, beta_fast=8),
        )
    ),
    "qwen2-window": Qwen2ForCausalLM(
        Qwen2Config(**SMALL, num_key_value_heads=2, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    ),
    "qwen3-window": Qwen3ForCausalLM(
        Qwen3Config(
            **SMALL, num_key_value_heads=2, head_dim=32, use_sliding_window=True, sliding_window=7, max_window_layers=0
        )
    ),
    "qwen3": Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=32)),
    "qwen3-bias-tied": Qwen3ForCausalLM(
        Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=32, attention_bias=True, tie_word_embeddings=True)
    ),
}


def randomise(model: PreTrainedModel) -> PreTrainedModel:
    """Gains and biases away from one and zero, so that a missing one shows."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def our_logits(model: Decoder, tokens_BT: torch.Tensor) -> torch.Tensor:
    batch, length = tokens_BT.shape
    positions = torch.arange(length).repeat(batch)
    with torch.no_grad():
        flat = model(tokens_BT.flatten(), positions, over_sequences(model.shape, batch=batch), lambda h, w: h @ w.t())
    return flat.view(batch, length, -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_both_ways(family: str, tmp_path: Path) -> None:
    theirs = randomise(FAMILIES[family])
    tokens = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(tokens).logits
    assert expected.std() > 0.1, "the comparison needs logits that vary"

    theirs.save_pretrained(tmp_path / "in")
    ours = weights.load(tmp_path / "in")
    assert (our_logits(ours, tokens) - expected).abs().max() < 1e-4
    assert ours.shape.num_parameters == theirs.num_parameters()

    weights.export(ours, tmp_path / "out", dtype=torch.float32)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        assert (again(tokens).logits - expected).abs().max() < 1e-4
    assert again.config.max_position_embeddings == theirs.config.max_position_embeddings
    assert getattr(again.config, "sliding_window", None) == getattr(theirs.config, "sliding_window", None)


@pytest.mark.parametrize("family", ["llama-llama3", "llama-linear", "llama-yarn"])
def test_stretched_frequencies_matter(family: str, tmp_path: Path) -> None:
    """The comparison above could not tell a scaling that is ignored if it changed nothing."""
    randomise(FAMILIES[family]).save_pretrained(tmp_path)
    ours = weights.load(tmp_path)
    plain = Decoder(replace(ours.shape, rope_scaling=None))
    plain.load_state_dict(ours.state_dict())
    tokens = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(0))
    assert (our_logits(ours, tokens) - our_logits(plain, tokens)).abs().max() > 1e-2


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_fused_projection_rotates_by_stretched_frequencies(qk_norm: bool) -> None:
    """The kernel takes cosine and sine as they are, YaRN's larger ones too, and its gradient follows."""
    from functools import partial

    from flatout.kernels import segments

    shape = replace(ModelShape.from_hf(FAMILIES["llama-yarn"].config.to_dict()), qk_norm=qk_norm)
    model = Decoder(shape)
    model.initialise(2)
    assert model.amplitude > 1.1
    tokens = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(0))
    found = []
    for fused in (False, True):
        for block in model.blocks:
            kernel = partial(
                segments.norm_qkv_rope, eps=shape.norm_eps, heads=shape.heads, groups=shape.kv_heads, scales=None
            )
            block.qkv_kernel = kernel if fused else None
        model.zero_grad()
        out = model(tokens, torch.arange(40), Rectangular(batch=1), lambda h, w: h @ w.t())
        out.square().mean().backward()
        found.append((out.detach(), model.blocks[0].qkv.grad))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)


def test_shapes_survive_a_run_folder_and_older_ones_open() -> None:
    for theirs in FAMILIES.values():
        shape = ModelShape.from_hf(theirs.config.to_dict())
        assert ModelShape.from_json(json.loads(json.dumps(shape.to_json())), source="plan.json") == shape
    older = {"layers": 2, "hidden": 8, "heads": 2, "kv_heads": 2, "head_dim": 4, "intermediate": 8, "vocab": 9}
    older |= {"positions": 4, "tied": False, "qk_norm": False, "qkv_bias": False, "rope_theta": 1e4, "norm_eps": 1e-5}
    assert ModelShape(**older).to_json() == older, "a checkpoint of before these fields keeps its identity"


def test_export_in_several_files_loads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SHARD_BYTES", 40_000)
    ours = Decoder(ModelShape.from_hf(FAMILIES["llama"].config.to_dict()))
    ours.initialise(3)
    weights.export(ours, tmp_path, dtype=torch.float32)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert (tmp_path / "model.safetensors.index.json").exists()
    back = weights.load(tmp_path)
    for (name, ours_p), (_, back_p) in zip(ours.named_parameters(), back.named_parameters(), strict=True):
        assert torch.equal(ours_p, back_p), name
    AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt_neox"}, "gpt_neox"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 rope scaling but lacks low_freq_factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 8.0}}, "dynamic rope scaling"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "longrope rope scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "sliding window before others without one",
        ),
    ],
)
def test_what_the_decoder_lacks_is_refused_by_name(change: dict[str, object], words: str) -> None:
    config = json.loads(LlamaConfig(**SMALL).to_json_string()) | {"rope_parameters": None} | change
    with pytest.raises(UsageError, match=words):
        ModelShape.from_hf(config)


@pytest.mark.parametrize("family", ["mistral-window", "qwen2-window", "qwen3-window"])
def test_a_window_matters(family: str, tmp_path: Path) -> None:
    """The comparison with transformers could not tell a window that is ignored if it changed nothing."""
    randomise(FAMILIES[family]).save_pretrained(tmp_path)
    ours = weights.load(tmp_path)
    everything = Decoder(replace(ours.shape, window=None, full_layers=0))
    everything.load_state_dict(ours.state_dict())
    tokens = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(0))
    apart = (our_logits(ours, tokens) - our_logits(everything, tokens)).abs().amax(-1).flatten()
    assert ours.shape.window is not None
    assert apart[: ours.shape.window].max() < 1e-5
    assert apart[ours.shape.window :].min() > 1e-3


def test_a_shape_recorded_with_positions_that_end_with_the_window() -> None:
    shape = ModelShape.from_hf(FAMILIES["mistral-window"].config.to_dict())
    assert (shape.foreign, shape.window, shape.full_layers, shape.positions) == ("", 16, 0, 64)
    told = shape.to_json()
    assert (told["positions"], told["max_positions"]) == (16, 64), "as version 0.1 wrote it"
    assert ModelShape.from_json(told, source="plan.json") == shape
    assert weights.hf_config(shape)["max_position_embeddings"] == 64


# Folders that are not quite as their config.json says


def saved(folder: Path, family: str = "llama") -> dict[str, torch.Tensor]:
    randomise(FAMILIES[family]).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def reconfigure(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_type_goes_straight_into_the_one_it_is_kept_in(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = saved(tmp_path)
    write(tmp_path, {name: tensor.to(dtype) for name, tensor in tensors.items()})
    kept = weights.load(tmp_path)
    assert torch.equal(kept.embedding, tensors["model.embed_tokens.weight"].to(dtype).float())
    frozen = weights.load(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in frozen.parameters()} == {torch.bfloat16}
    assert frozen.frequencies.dtype == torch.float32, "positions are never rounded"
    assert torch.equal(frozen.blocks[1].out, kept.blocks[1].out.to(torch.bfloat16))


@pytest.mark.parametrize("rows", [128, 80])
def test_a_vocabulary_padded_on_one_side_only(rows: int, tmp_path: Path) -> None:
    tensors = saved(tmp_path)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    for name in names:
        padding = torch.randn(max(0, rows - 96), 64)
        tensors[name] = torch.cat([tensors[name][:rows], padding])
    write(tmp_path, tensors)
    said: list[str] = []
    ours = weights.load(tmp_path, note=said.append)
    assert [
        f"{name} has {rows} rows, but config.json a vocabulary of 96" in text
        for name, text in zip(names, said, strict=True)
    ] == [True] * 2
    tokens = torch.randint(0, 80, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = FAMILIES["llama"](tokens).logits
    found = our_logits(ours, tokens)
    both = min(rows, 96)
    assert (found[..., :both] - expected[..., :both]).abs().max() < 1e-4
    assert (found[..., both:] < found[..., :both].amax(-1, keepdim=True)).all(), (
        "an invented token is never the likeliest"
    )


def test_a_head_that_is_not_there_is_the_embedding(tmp_path: Path) -> None:
    tensors = saved(tmp_path)
    del tensors["lm_head.weight"]
    write(tmp_path, tensors)
    said: list[str] = []
    ours = weights.load(tmp_path, note=said.append)
    assert ours.head is not None
    assert torch.equal(ours.head, ours.embedding)
    assert "lm_head.weight is not in the files" in said[0]


def test_a_tied_head_in_the_file_must_be_the_embedding(tmp_path: Path) -> None:
    tensors = saved(tmp_path, "llama-gqa-tied")
    head = tensors["model.embed_tokens.weight"].clone()
    write(tmp_path, tensors | {"lm_head.weight": head})
    assert weights.load(tmp_path).head is None
    write(tmp_path, tensors | {"lm_head.weight": head + 1})
    with pytest.raises(UsageError, match=r"ties the head to the embedding, but lm_head\.weight differs"):
        weights.load(tmp_path)


def test_a_tensor_too_many_or_too_few_is_named(tmp_path: Path) -> None:
    tensors = saved(tmp_path, "llama-bias")
    reconfigure(tmp_path, attention_bias=False)
    with pytest.raises(UsageError, match=r"has the tensors model\.layers\.0\.self_attn\.k_proj\.bias, .* and 9 more"):
        weights.load(tmp_path)
    reconfigure(tmp_path, attention_bias=True)
    del tensors["model.layers.2.self_attn.o_proj.bias"]
    write(tmp_path, tensors)
    with pytest.raises(UsageError, match=r"lacks the tensor model\.layers\.2\.self_attn\.o_proj\.bias"):
        weights.load(tmp_path)
    write(tmp_path, tensors | {"model.layers.2.self_attn.o_proj.bias": torch.zeros(7)})
    with pytest.raises(UsageError, match=r"o_proj\.bias has shape \(7,\), but config\.json needs \(64,\)"):
        weights.load(tmp_path)


def test_shards_of_transformers_load_and_broken_ones_are_named(tmp_path: Path) -> None:
    randomise(FAMILIES["qwen2"]).save_pretrained(tmp_path, max_shard_size="50KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    tokens = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (our_logits(weights.load(tmp_path), tokens) - FAMILIES["qwen2"](tokens).logits).abs().max() < 1e-4
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[: len(content) // 2])
    with pytest.raises(
        UsageError, match=rf"{shards[1].name} is not a readable safetensors file \({len(content) // 2} bytes"
    ):
        weights.load(tmp_path)
    shards[1].unlink()
    with pytest.raises(UsageError, match=rf"lacks {shards[1].name}, which model\.safetensors\.index\.json names"):
        weights.load(tmp_path)


def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    saved(tmp_path / "elsewhere")
    tensors = saved(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(tensors, "../elsewhere/model.safetensors")}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"names '\.\./elsewhere/model\.safetensors', which is not a safetensors file"):
        weights.load(tmp_path / "model")


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    reconfigure(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UsageError, match="quantised by gptq"):
        weights.load(tmp_path)


def test_broken_folders_are_said_clearly(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json is missing"):
        weights.load(tmp_path)
    ours = Decoder(ModelShape.from_hf(FAMILIES["llama"].config.to_dict()))
    ours.initialise(0)
    weights.export(ours, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(UsageError, match=r"model\.safetensors is not a readable safetensors file"):
        weights.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UsageError, match="pickled weights are not read"):
        weights.load(tmp_path)
