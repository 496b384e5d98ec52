"""The real SmolLM2-135M-Instruct against transformers: `FLATOUT_SMOLLM2=FOLDER pytest tests/real -s`.

`benchmarks/smollm2.py` makes such a folder from a GGUF file.
"""

from pathlib import Path

import pytest
import torch
from benchmarks.logits import both, our_logits, prompts_of
from transformers import AutoModelForCausalLM

from flatout.config.settings import ModelSettings
from flatout.model import Decoder, load_model
from flatout.model.loading import export_model


@pytest.mark.slow
def test_logits_and_greedy_continuations_equal_transformers(folder: Path) -> None:
    found = both(folder, torch.float32, "cpu")
    print(f"\nfp32: {found}")
    assert found["largest_difference"] <= 1e-3
    assert found["same"] >= 18
    assert len(prompts_of(folder)) == 20


@pytest.mark.gpu
def test_logits_in_bf16_point_the_same_way(folder: Path) -> None:
    found = both(folder, torch.bfloat16, "cuda")
    print(f"\nbf16: {found}")
    assert found["least_cosine"] >= 0.999


@pytest.mark.slow
def test_an_export_has_the_same_logits(folder: Path, tmp_path: Path) -> None:
    ours = load_model(ModelSettings(name=str(folder)))
    assert isinstance(ours, Decoder)
    export_model(ours, tmp_path, dtype=torch.float32)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for prompt in prompts_of(folder)[::5]:
        tokens = torch.tensor(prompt)
        with torch.no_grad():
            assert (again(tokens[None]).logits[0] - our_logits(ours, tokens)).abs().max() <= 1e-3
