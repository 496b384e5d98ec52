"""The real SmolLM2-135M-Instruct learns unit conversion with adapters: `FLATOUT_SMOLLM2=FOLDER pytest tests/real -s`.

A slice that two CPU cores learn in minutes; the figures are printed.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from flatout.data.tokenizer import load_tokenizer
from flatout.record import Run
from flatout.sample import prompt_ids
from flatout.tasks.units import Units

STEPS, ROWS, LENGTH = 16, 200, 128


def flatout(*arguments: object, stdin: str | None = None) -> str:
    command = [sys.executable, "-m", "flatout", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, input=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    flatout("export", run, "--to", tmp_path / "adapter")
    flatout("export", run, "--to", tmp_path / "merged", "--merge", "--dtype", "fp32")
    said = flatout("chat", run, "--temperature", 0, "--max-tokens", 24, stdin="How many grams is 3 kilograms?\n")

    from peft import PeftModel

    tokenizer = load_tokenizer(str(folder), documents=None, cache=tmp_path)
    tokens = torch.tensor([prompt_ids(tokenizer, Units().prompt(0))])
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        untouched = plain(tokens).logits
        adapted = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(tokens).logits
    apart, moved = float((adapted - merged).abs().max()), float((untouched - merged).abs().max())
    print(f"\nheld-out loss {losses}; adapter in PEFT and merged in transformers apart by {apart:.2g}")
    print(f"the base and the merged model apart by {moved:.2g}; it says {said!r}")
    assert losses[-1] < losses[0] - 0.1
    assert apart <= 1e-3 < 0.5 < moved
    assert said.strip()
