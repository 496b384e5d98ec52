"""`flatout eval` and `flatout chat` on a model folder, as a user meets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests import warm

from flatout.cost import ModelShape
from flatout.data.tokenizer import ByteTokenizer
from flatout.engine.opening import open_model
from flatout.errors import UsageError
from flatout.model import Decoder, weights
from flatout.record import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = ModelShape(
        layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=64, vocab=257, positions=2048
    )
    model = Decoder(shape)
    model.initialise(0)
    made = tmp_path_factory.mktemp("model")
    ByteTokenizer().save(made)
    weights.export(model, made, dtype=torch.float32, eos_token_id=256)
    return made


def flatout(*arguments: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    if stdin is None:
        return warm.flatout(*arguments, cwd=Path.cwd())
    command = [sys.executable, "-m", "flatout", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, input=stdin)


def test_scores_as_json(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("a small text, and not much of it" * 10)
    choices = tmp_path / "c.jsonl"
    choices.write_text(json.dumps({"question": "Which?", "choices": ["this", "that"], "answer": 0}) + "\n")
    tasks = f"units,perplexity:{text}"
    done = flatout(
        "eval", folder, "--tasks", tasks, "--tasks", f"choice:{choices}", "--limit", 3, "--max-tokens", 8, "--json"
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    units, perplexity, choice = document["tasks"]
    assert (units["n"], units["of"], units["value"]) == (3, 1000, 0.0)
    assert units["high"] == pytest.approx(0.5615, abs=1e-3)  # Wilson's for 0 of 3
    assert units["details"]["cut_short"] + units["details"]["answered"] <= 3
    assert perplexity["n"] == len(text.read_text()) - 1
    assert perplexity["value"] == pytest.approx(257, rel=0.2), "an untrained model knows nothing"
    assert choice["value"] in (0.0, 1.0)
    assert (document["step"], document["template"], document["on"]) == (None, False, "cpu, fp32")


def test_generated_questions_are_scored(folder: Path) -> None:
    tasks = "math?level=1,logic,simulation:train,table,stem?prompt=bare"
    done = flatout("eval", folder, "--tasks", tasks, "--limit", 2, "--max-tokens", 4, "--json")
    assert done.returncode == 0, done.stderr
    found = [(score["task"], score["n"], score["of"]) for score in json.loads(done.stdout)["tasks"]]
    assert found == [
        ("math", 2, 200),
        ("logic", 2, 200),
        ("simulation", 2, None),
        ("table", 2, 200),
        ("stem", 2, 200),
    ]


def test_scores_as_a_table_and_beside_another_model(folder: Path) -> None:
    done = flatout("eval", folder, "--tasks", "units", "--limit", 2, "--max-tokens", 4, "--against", folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("0.0 % to 65.8 %") == 2
    assert "+0.0 points" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tasks", "unit"], "did you mean units?"),
        (["--tasks", ","], "--tasks is empty"),
        (["--tasks", "units", "--samples", "3", "--temperature", "0"], "would all be identical"),
        (["--tasks", "units:endless"], "is endless"),
        (["--tasks", "units", "--dtype", "fp99"], "must be one of"),
    ],
)
def test_mistakes(folder: Path, arguments: list[str], says: str) -> None:
    done = flatout("eval", folder, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_talk_through_a_pipe(folder: Path) -> None:
    asked = ("chat", folder, "--max-tokens", 5, "--temperature", 0)
    done = flatout(*asked, stdin="hello\n\n/reset\nagain\n")
    assert done.returncode == 0, done.stderr
    assert "no chat template" in done.stderr
    assert done.stdout.endswith("\n")
    assert not any(ord(c) < 32 and c not in "\n\t" for c in done.stdout)
    assert flatout(*asked, stdin="hello\n\n/reset\nagain\n").stdout == done.stdout


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run folder, and not a model folder"):
        open_model(str(tmp_path))
    with pytest.raises(UsageError, match="does not exist"):
        open_model(str(tmp_path / "nothing"))


@pytest.mark.parametrize("name", ["plan.json", "hardware.json", "env.json", "config.yaml", "config.json"])
@pytest.mark.parametrize("as_pipe", [False, True])
def test_a_damaged_run_is_not_taken_for_a_model(tmp_path: Path, name: str, *, as_pipe: bool) -> None:
    run = Run.create(tmp_path / "run", config_text="", config={}, plan={}, hardware={}, environment={})
    (run.path / "checkpoints").mkdir()
    (run.path / name).unlink()
    if as_pipe:
        os.mkfifo(run.path / name)
    with pytest.raises(UsageError, match=f"run folder: it lacks {name}"):
        open_model(str(run.path))


def test_all_that_ends_a_text_is_known(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert open_model(str(tmp_path)).stop_ids == {5, 7, 256}


def test_a_task_is_asked_as_the_run_measured_it(tmp_path: Path) -> None:
    from flatout.cli.evaluate import _as_in_the_run, _unfinished
    from flatout.evaluate import Score
    from flatout.record import Run

    config = {
        "rft": {"task": "units:train", "valid": None, "prompt": "a.txt", "student_prompt": "bare"},
        "eval": {"tasks": ["sums?form=short", "jsonl:q.jsonl"]},
        "rl": {"tasks": ["math:train?level=2"]},
    }
    run = Run.create(tmp_path / "run", config_text="", config=config, plan={}, hardware={}, environment={})
    asked, said = _as_in_the_run(["units", "sums", "math", "jsonl:q.jsonl", "units?prompt=c.txt", "logic"], run)
    assert asked[:3] == ["units?prompt=bare", "sums?form=short", "math?level=2"]
    assert asked[3:] == ["jsonl:q.jsonl", "units?prompt=c.txt", "logic"]
    assert len(said) == 3
    assert "units is evaluated as units?prompt=bare, as in the run; --own-prompt" in said[0]
    for option in ("reward=evil:grade", "judge=http://elsewhere", "prompt=/etc/passwd", "level=2&reward=evil:grade"):
        run.reconfigure(
            config_text="", config={"eval": {"tasks": [f"jsonl:q.jsonl?{option}", 5]}, "rl": 3, "rft": None}
        )
        asked, said = _as_in_the_run(["jsonl:q.jsonl"], run)
        assert asked == ["jsonl:q.jsonl"]  # what a run folder says is no reason to run or read anything
        assert "if you trust them, name that task" in said[0]
    score = Score(
        task="units", spec="units", metric="accuracy", value=0.5, low=None, high=None, n=10, of=10, samples=2,
        seconds=1.0, indices=(), rewards=(), details={"cut_short": 3, "too_long": 1},
    )  # fmt: skip
    first, second = _unfinished([score], max_tokens=8)
    assert "3 of 20 answers were cut off after 8 tokens" in first
    assert "1 of 20 did not fit the model's window and count as wrong" in second
