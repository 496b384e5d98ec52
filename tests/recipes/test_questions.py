"""Tasks asked during a run: the live weights score what their checkpoint scores, and the run can go by it."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from recipes_processes import events, trajectory
from tests.warm import two_ranks
from typer.testing import CliRunner

from flatout.cli import app
from flatout.cost import Adapters, ModelShape
from flatout.data.tokenizer import ByteTokenizer
from flatout.engine.prepare import unprepared
from flatout.errors import UsageError
from flatout.model import Decoder, lora
from flatout.record import Run
from flatout.sample import Generator, Sampling
from flatout.tasks import open_task

Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def quiz(tmp_path: Path) -> tuple[str, list[str]]:
    """A task whose answer is always 7, and the settings that train on just that."""
    path = tmp_path / "quiz.jsonl"
    path.write_text("".join(json.dumps({"question": f"Q{i}?", "answer": "7"}) + "\n" for i in range(12)))
    task = open_task(f"jsonl:{path}")
    rows = [
        {"messages": [*task.prompt(i % 12), {"role": "assistant", "content": "7"}]}  # type: ignore[union-attr]
        for i in range(60)
    ]
    (tmp_path / "quiz-rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [f"data.path={tmp_path / 'quiz-rows.jsonl'}", f"eval.tasks=[units, jsonl:{path}]", "eval.task_limit=6"]
    return f"jsonl:{path}", [*asked, "eval.task_tokens=4"]


def scores(run: Path, task: str) -> dict[int, float]:
    return {
        int(str(event["step"])): found["value"]
        for event in events(run, "tasks")
        for found in event["tasks"]  # type: ignore[attr-defined]
        if found["spec"] == task
    }


def test_live_scores_are_those_of_the_checkpoint(
    flatout: Call, sft: Path, quiz: tuple[str, list[str]], tmp_path: Path
) -> None:
    task, asked = quiz
    run = tmp_path / "run"
    chosen = [*asked, "eval.criterion=tasks", "eval.tasks_every=4", "eval.patience=3", "save.best=true"]
    done = flatout("train", sft, *chosen, "train.steps=40", "train.warmup_steps=0", "--run", run)
    assert done.returncode == 0, done.stderr
    found = scores(run, task)
    assert found[0] == 0.0
    assert max(found.values()) == 1.0, "it learns to say 7"
    steps = sorted(found)
    assert steps == list(range(0, steps[-1] + 1, 4))
    # Units stay at nothing, so the mean of both is half. It is best when it is first reached, and enough three later.
    best = [(e["step"], e["task_score"]) for e in events(run, "best")]
    first = next(step for step in steps if found[step] == 1.0)
    assert best[-1] == (first, 0.5)
    assert (run / "checkpoints" / "best").read_text().strip() == f"step-{first:08}"
    assert events(run, "end")[0]["outcome"]["stopped_by"] == "patience"  # type: ignore[index]
    assert steps[-1] == first + 12
    assert [e["step"] for e in events(run, "eval")] == [*range(0, steps[-1], 8), steps[-1]]
    assert "accuracy 100.0 %" in done.stdout
    assert "task score" in done.stdout

    again = flatout("eval", run, "--tasks", task, "--limit", 6, "--max-tokens", 4, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["tasks"][0]["value"] == found[steps[-1]]
    [report] = json.loads(flatout("report", run, "--json").stdout)
    assert {(s["task"], s["step"]) for s in report["tasks"]} >= {("jsonl", steps[-1]), ("units", 0)}


def test_asking_changes_nothing_of_the_training(
    flatout: Call, sft: Path, quiz: tuple[str, list[str]], tmp_path: Path
) -> None:
    task, asked = quiz
    for name, chosen in {"with": asked, "without": asked[:1]}.items():
        done = flatout(
            "train", sft, *chosen, "train.steps=6", "eval.every=3", "lora.dropout=0.1", "--run", tmp_path / name
        )
        assert done.returncode == 0, done.stderr
    assert trajectory(tmp_path / "with") == trajectory(tmp_path / "without")
    assert list(scores(tmp_path / "with", task)) == [0, 3, 6]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("eval.tasks=[unit]", "did you mean units?"),
        ("eval.tasks=gsm8k", "task gsm8k needs a JSON-lines file"),
        ("eval.tasks_every=5", "works only with eval.tasks"),
        ("eval.criterion=tasks", "works only with eval.tasks"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(sft: Path, tmp_path: Path, override: str, says: str) -> None:
    done = CliRunner().invoke(app, ["train", str(sft), override, "--run", str(tmp_path / "run")])
    assert isinstance(done.exception, UsageError)
    assert says in str(done.exception)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapters", "all weights"])
def test_two_ranks_equal_one(
    kind: str,
    flatout: Call,
    sft: Path,
    quiz: tuple[str, list[str]],
    tmp_path: Path,
) -> None:
    task, asked = quiz
    chosen = [*asked, "train.steps=8", "eval.every=4", "plan.micro_batch=1"]
    chosen += [] if kind == "adapters" else ["lora.rank=null", "lora.alpha=null", "train.lr=3e-3"]
    assert flatout("train", sft, *chosen, "--run", tmp_path / "one").returncode == 0
    two_ranks("train", sft, *chosen, "--run", tmp_path / "two", cwd=tmp_path)
    one, two = trajectory(tmp_path / "one"), trajectory(tmp_path / "two")
    assert len(one) == len(two) == 8
    for (_, loss, norm, _), (_, other_loss, other_norm, _) in zip(one, two, strict=True):
        assert other_loss == pytest.approx(loss, abs=1e-5)
        assert other_norm == pytest.approx(norm, rel=1e-4)
    assert Run.open(tmp_path / "two").ranks() == [0, 1]
    losses = [[e["val_loss"] for e in events(tmp_path / name, "eval")] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert scores(tmp_path / "one", task) == scores(tmp_path / "two", task)


def test_a_prepared_model_is_asked_without_what_was_prepared() -> None:
    shape = ModelShape(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=64, vocab=257, positions=64)
    model = Decoder(shape)
    model.initialise(1)
    lora.freeze(model, device=torch.device("cpu"), base_bits=16, seed=0)
    lora.attach(model, Adapters(rank=2, alpha=4.0), seed=1)
    sampling = Sampling(max_tokens=8, temperature=1.0)

    def answers(asked: Decoder) -> list[tuple[int, ...]]:
        return [c.ids for c in Generator(asked, ByteTokenizer()).generate([[1, 2, 3], [4]], sampling=sampling)]

    def refuses(*_: object, **__: object) -> None:
        raise AssertionError("only for training's shapes")

    plain = answers(model)
    model.norm_kernel = model.enter = model.leave = refuses  # type: ignore[assignment, method-assign]
    for block in model.blocks:
        block.qkv_kernel = block.mlp_kernel = refuses
        block.norm_mlp = block._compiled_call_impl = refuses
        block.recompute = "full"
    twin = unprepared(model)
    assert isinstance(twin, Decoder)
    assert answers(twin) == plain
    assert model.blocks[0].qkv_kernel is refuses
    assert model.norm_kernel is refuses
    with torch.no_grad():
        for _, b in lora.adapters(model).values():
            b.normal_(0.0, 1.0)
    assert answers(twin) != plain, "it is the same weights, as they are now"


@pytest.mark.gpu
def test_a_fused_and_compiled_run_is_asked_on_a_gpu(
    flatout: Call, sft: Path, quiz: tuple[str, list[str]], tmp_path: Path
) -> None:
    task, asked = quiz
    run = tmp_path / "run"
    fast = ["plan.precision=bf16", "plan.compile=default", "plan.micro_batch=2"]
    done = flatout("train", sft, *asked, *fast, "train.steps=24", "eval.every=8", "--run", run)
    assert done.returncode == 0, done.stderr
    found = scores(run, task)
    assert (found[0], found[24]) == (0.0, 1.0)
    graphs = [record.extra.graphs for record in Run.open(run).latest_steps()]
    assert len(set(graphs[2:])) == 1, "asking compiles nothing"
