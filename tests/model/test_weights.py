"""Our decoder against transformers' own classes, weights going both ways."""

import json
from pathlib import Path

import pytest
import torch
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

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
FAMILIES = {
    "llama": LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=4)),
    "llama-gqa-tied": LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True)),
    "llama-theta": LlamaForCausalLM(
        LlamaConfig(**SMALL, num_key_value_heads=1, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    ),
    "mistral": MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=None)),
    "qwen2": Qwen2ForCausalLM(Qwen2Config(**SMALL, num_key_value_heads=2)),
    "qwen3": Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=32)),
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
        flat = model(tokens_BT.flatten(), positions, Rectangular(batch=batch), lambda h, w: h @ w.t())
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
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding-window"),
    ],
)
def test_what_the_decoder_lacks_is_refused_by_name(change: dict[str, object], words: str) -> None:
    config = json.loads(LlamaConfig(**SMALL).to_json_string()) | {"rope_parameters": None} | change
    with pytest.raises(UsageError, match=words):
        ModelShape.from_hf(config)


def test_broken_folders_are_said_clearly(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json is missing"):
        weights.load(tmp_path)
    ours = Decoder(ModelShape.from_hf(FAMILIES["llama"].config.to_dict()))
    ours.initialise(0)
    weights.export(ours, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(UsageError, match=r"model\.safetensors is no readable safetensors file"):
        weights.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UsageError, match="pickled weights are not read"):
        weights.load(tmp_path)
