"""One way to a model, whatever it is made of."""

import subprocess
import sys

import pytest
import torch

from flatout.config.settings import ModelSettings
from flatout.cost import ModelShape
from flatout.errors import UsageError
from flatout.model import Decoder, load_model

SHAPE = ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=90, positions=48)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_stand_in_the_type_asked_for(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    model = load_model(ModelSettings(layers=2, hidden=64, heads=4), shape=SHAPE, dtype=dtype, seed=3)
    assert torch.get_default_dtype() == before
    assert isinstance(model, Decoder)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.frequencies.dtype == torch.float32
    assert model.embedding.float().std().item() == pytest.approx(0.02, rel=0.05)


def test_random_weights_are_those_of_the_decoder_itself() -> None:
    model, plain = load_model(ModelSettings(), shape=SHAPE, seed=3), Decoder(SHAPE)
    plain.initialise(3)
    for (name, one), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_model_needs_a_name_or_a_shape() -> None:
    with pytest.raises(UsageError, match=r"model\.name is missing"):
        load_model(ModelSettings())


def test_a_model_without_memory_is_built_without_torchs_compiler() -> None:
    script = """
import sys, torch
from flatout.cost import ModelShape, RopeScaling
from flatout.model.lora import meta_decoder
yarn = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=12)
for scaling in (None, yarn):
    shape = ModelShape(
        layers=1, hidden=8, heads=2, kv_heads=2, head_dim=4, intermediate=8, vocab=9, positions=48, rope_scaling=scaling
    )
    model = meta_decoder(shape, compute_dtype=torch.float32)
    assert model.embedding.is_meta and not model.frequencies.is_meta
print(sorted({"sympy", "torch._dynamo"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
