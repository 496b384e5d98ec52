"""A run as the model of another: what the next run would learn is shown before it starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_data_show_reads_the_rows_with_the_tokenizer_of_a_run(
    flatout: Callable[..., Any], config: Path, tmp_path: Path
) -> None:
    trained = flatout("train", config, "--run", "runs/first", "train.steps=3", "data.tokenizer=bpe:300")
    assert trained.returncode == 0, trained.stderr
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ask", "completion": "say"}\n' * 20)
    (tmp_path / "next.yaml").write_text(
        json.dumps(
            {
                "recipe": "sft",
                "model": "runs/first",
                "data": {"path": "rows.jsonl", "sequence_length": 64},
                "train": {"steps": 1, "batch_tokens": 64},
            }
        )
    )
    shown = flatout("data", "show", "next.yaml", "--json")
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["examples"][0]["pieces"] == [["ask", False], ["say<|endoftext|>", True]]
    done = flatout("train", "next.yaml", "--run", "runs/next")
    assert done.returncode == 0, done.stderr
    plan = flatout("train", "next.yaml", "--run", "runs/other", "--dry-run")
    assert plan.returncode == 0, plan.stderr
