"""The real SmolLM2-135M-Instruct learns unit conversion with adapters: `FLATOUT_SMOLLM2=FOLDER pytest tests/real -s`.

A slice that two CPU cores learn in minutes; the figures are printed.
"""

import json
from pathlib import Path

import pytest
import yaml
from benchmarks.sft import TALKED, elsewhere, flatout, talked

from flatout.record import Run
from flatout.tasks.units import Units

STEPS, ROWS, LENGTH = 16, 200, 128


def write_rows(path: Path) -> Path:
    """Questions to train on, none of which is held out, each with the number in the form asked for."""
    units = Units(split="train")
    with path.open("w") as file:
        for i in range(ROWS):
            asked = units.question(i)
            answer = {"role": "assistant", "content": f"<answer>{asked.answer:.5g}</answer>"}
            file.write(json.dumps({"messages": [{"role": "user", "content": asked.text}, answer]}) + "\n")
    return path


@pytest.mark.slow
def test_adapters_on_real_weights(folder: Path, tmp_path: Path) -> None:
    settings = {
        "recipe": "sft",
        "model": str(folder),
        "data": {
            "source": "jsonl", "path": str(write_rows(tmp_path / "rows.jsonl")), "sequence_length": LENGTH,
            "valid_share": 0.1,
        },
        "train": {
            "batch_tokens": 3 * LENGTH, "steps": STEPS, "lr": 1e-3, "warmup_steps": 2, "weight_decay": 0.0,
            "beta2": 0.99,
        },
        "lora": {"rank": 8, "alpha": 16},
        "eval": {"every": 8, "tokens": 4 * LENGTH},
        "plan": {"precision": "fp32"},
    }  # fmt: skip
    config, run = tmp_path / "sft.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(settings))
    flatout("train", config, "--run", run)
    losses = [event.data["val_loss"] for event in Run.open(run).events() if event.kind == "eval"]
    found = elsewhere(str(folder), run, "units", scratch=tmp_path)
    right, said = talked(run, "units")
    print(f"\nheld-out loss {losses}; logits of 20 questions apart from ours by {found}; {right} right in {said}")
    assert losses[-1] < losses[0] - 0.1
    assert max(found["in_peft"], found["merged"]) <= 1e-3 < 0.5 < found["untrained"]
    assert sum(map(bool, said)) >= TALKED
