"""One loss a step: the mean over its micro-batches, however the script scales them before the backward pass."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doctoring import SRC, environment

PLAIN = """
import json, sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
means = []
for _ in range(6):
    losses = [model(torch.randn(4, 8)).pow(2).mean() for _ in range(4)]
    for loss in losses:
        (BACKWARD).backward()
    optimizer.step()
    optimizer.zero_grad()
    means.append(sum(loss.item() for loss in losses) / 4)
print(json.dumps(means))
"""
# Rows of different lengths, so that the mean over tokens is not the mean of the micro-batches' own means.
TRAINER = """
import json, tempfile, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
rows = [torch.arange(3, 3 + length) for length in (8, 40, 16, 24) * 6]
config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(config)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=4, logging_steps=1,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": r, "labels": r} for r in rows])
    trainer.train()
print(json.dumps([line["loss"] for line in trainer.state.log_history if "loss" in line]))
"""


def both(tmp_path: Path, text: str) -> tuple[list[float], list[Any]]:
    """The losses the script tells of itself, and those the agent wrote down."""
    told = {"out": str(tmp_path), "steps": 100, "seconds": 60.0, "stop": False, "look": False}
    env = environment(PYTHONPATH=str(SRC / "flatout" / "probe" / "inject"), FLATOUT_AGENT=json.dumps(told))
    done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, check=True)
    (steps,) = tmp_path.glob("steps-*.jsonl")
    return json.loads(done.stdout.splitlines()[-1]), [json.loads(line)["loss"] for line in steps.open()]


@pytest.mark.parametrize(
    "backward",
    [
        pytest.param("loss / 4", marks=pytest.mark.long),
        pytest.param("loss", marks=pytest.mark.long),
        "scaler.scale(0.25 * loss)",
    ],
)
def test_a_plain_loop_that_accumulates(tmp_path: Path, backward: str) -> None:
    own, seen = both(tmp_path, PLAIN.replace("BACKWARD", backward))
    assert seen == pytest.approx(own, rel=1e-5)


@pytest.mark.long
def test_a_trainer_that_accumulates(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    own, seen = both(tmp_path, TRAINER)
    assert len(own) == 4
    assert seen == pytest.approx(own, abs=1e-3)  # it logs four digits
