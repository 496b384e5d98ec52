"""Sound artefacts that the attacks spoil copies of: runs, an exported model, a tokenizer, rows, a log."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from tests import warm
from tests.data.talks import question, tokenizer_folder, write_rows

TINY = {
    "recipe": "pretrain",
    "model": {"layers": 1, "hidden": 32, "heads": 2},
    "data": {"source": "embedded", "embedded_mb": 0.05, "sequence_length": 32, "valid_share": 0.1},
    "train": {"batch_tokens": 128, "steps": 6},
    "eval": {"every": 2, "tokens": 128},
    "save": {"every": 2},
    "plan": {"precision": "fp32", "threads": 1, "workers": 0},
}
TUNED = {
    "recipe": "sft",
    "model": {"layers": 1, "hidden": 32, "heads": 2},
    "data": {"source": "jsonl", "path": "rows.jsonl", "tokenizer": "talk", "sequence_length": 128},
    "train": {"batch_tokens": 128, "steps": 2},
    "plan": {"precision": "fp32", "threads": 1, "workers": 0},
}


def build(folder: Path, *, runs: bool) -> Path:
    """The files and, if asked for, the runs and the model, once for all trials."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "train.log").exists():
        _write_files(folder)
    if runs and not (folder / "model").exists():
        _train(folder)
    return folder


def _write_files(folder: Path) -> None:
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    (folder / "tuned.yaml").write_text(yaml.safe_dump(TUNED))
    tokenizer_folder(folder / "talk")
    write_rows(folder / "rows.jsonl", count=40)
    (folder / "text.txt").write_text("\n".join(" ".join(question(i)) for i in range(50)))
    asked = [{"question": question(i)[0], "answer": question(i)[1]} for i in range(20)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    steps = [f"step {i} | loss {5 - i / 50:.3f} | lr 3e-4 | {1000 + i} tokens/s | 0.25 s/it\n" for i in range(1, 120)]
    (folder / "train.log").write_text("".join(steps))


def _train(folder: Path) -> None:
    environment = {"FLATOUT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for arguments in (
        ["train", "tiny.yaml", "--run", "run"],
        ["train", "tuned.yaml", "--run", "tuned"],
        ["export", "tuned", "--to", "model"],
    ):
        started = warm.Started(*arguments, cwd=folder, environment=environment)
        _, said = started.communicate()
        assert started.wait() == 0, said
