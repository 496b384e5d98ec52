"""`flatout.Meter` and `flatout.hf.Callback`: other loops write run folders that `report`, `doctor` and `watch` read."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.command import Command
from tests.command import flatout as command
from torch import nn

import flatout
from flatout.errors import UsageError
from flatout.insight.story import tell
from flatout.meter import flops_of
from flatout.record import Run, events

__all__ = ["command"]


def loop(folder: Path, *, steps: int = 8, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 50))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randint(0, 50, (4, 9)) for _ in range(steps)]
    with flatout.Meter(folder, model, steps=steps, sequence_length=8, **options) as meter:
        for batch in meter.batches(batches):
            meter.phase("forward")
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            meter.phase("backward")
            loss.backward()
            meter.phase("optimize")
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            meter.step(loss=loss, tokens=32, lr=0.1, grad_norm=norm)
        meter.phase("eval")
        meter.evaluated(3.5)
        meter.saved("weights.pt")
    return model


def test_a_plain_loop_is_recorded(tmp_path: Path, command: Command) -> None:
    model = loop(tmp_path / "run", config={"lr": 0.1})
    run = Run.open(tmp_path / "run")
    steps = list(run.steps())
    assert [step.step for step in steps] == list(range(8))
    assert {tuple(step.phases) for step in steps} == {("data", "compute", "forward", "backward", "optimize")}
    assert all(step.tokens == step.padded_tokens == 32 and step.loss and step.extra.grad_norm for step in steps)
    assert all(step.memory["peak_gib"] > 0 for step in steps)
    story = tell(run)
    assert story.state.kind == "finished"
    assert story.speed.tokens_per_s
    assert story.speed.mfu
    assert story.rates is not None
    assert story.rates.flops.done == 3 * 2 * (16 * 32 + 32 * 50), "the embedding does not multiply"
    assert story.plan["job"]["trained_parameters"] == sum(p.numel() for p in model.parameters())
    assert [one.val_loss for one in story.evaluations] == [3.5]

    done = command("report", str(tmp_path / "run"))
    assert done.code == 0, done.err
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    examined = command("doctor", str(tmp_path / "run"))
    assert examined.code == 0, examined.err
    seen = command("watch", str(tmp_path / "run"), "--once")
    assert seen.code == 0, seen.err
    assert "Finished" in seen.out


def test_a_loop_that_fails_and_one_that_goes_on(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)

    def fails() -> None:
        with flatout.Meter(tmp_path / "run", model) as meter:
            meter.step(tokens=1, loss=1.0)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fails()
    assert tell(Run.open(tmp_path / "run")).state.sentence == "Stopped by ValueError"
    with pytest.raises(UsageError, match="already holds a run"), flatout.Meter(tmp_path / "run", model):
        pass
    with flatout.Meter(tmp_path / "run", model, start=1, resume=True) as meter:
        meter.step(tokens=torch.tensor(3), loss=torch.tensor(0.5))
        meter.amend(grad_norm=2.0)
    steps = list(Run.open(tmp_path / "run").latest_steps())
    assert [(step.attempt, step.step, step.tokens) for step in steps] == [(1, 0, 1), (2, 1, 3)]
    assert steps[1].extra.grad_norm == 2.0
    assert meter.close() is None
    with pytest.raises(UsageError, match="not running"):
        meter.step(tokens=1)


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no parameters"):
        flatout.Meter(tmp_path, nn.ReLU())
    with flatout.Meter(tmp_path / "run", nn.Linear(2, 2)) as meter, pytest.raises(UsageError, match="not one number"):
        meter.step(tokens=1, loss=torch.zeros(3))


def test_flops_of_adapters_and_of_experts() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    from flatout.cost import ModelShape, flops_per_token

    expected = flops_per_token(ModelShape.from_hf(config.to_dict()), sequence_length=32)
    assert flops_of(model, sequence_length=32) == (expected, None)
    model.requires_grad_(False)
    frozen, _ = flops_of(model, sequence_length=32)
    assert frozen.backward == expected.backward - expected.forward + expected.attention / 3
    model.config.num_experts = 8
    assert "experts" in str(flops_of(model, sequence_length=32)[1])


def trainer(folder: Path, *, steps: int, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    ids = [torch.randint(1, 64, (8,), generator=torch.Generator().manual_seed(i)) for i in range(64)]
    rows = [
        {"input_ids": row, "labels": row, "attention_mask": torch.tensor([1] * 6 + [0] * 2)}
        for row in itertools.islice(ids, 64)
    ]
    args = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=steps, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        gradient_accumulation_steps=2, logging_steps=1, disable_tqdm=True, eval_strategy="steps", eval_steps=4,
        save_strategy="steps", save_steps=4, learning_rate=1e-3, **options,
    )  # fmt: skip
    return transformers.Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=args,
        train_dataset=rows,
        eval_dataset=rows[:8],
        callbacks=[flatout.hf.Callback(folder / "run")],
    )


def test_the_trainer_is_recorded_and_resumed(tmp_path: Path, command: Command) -> None:
    made = trainer(tmp_path, steps=8)
    made.train()
    run = Run.open(tmp_path / "run")
    steps = list(run.steps())
    assert [step.step for step in steps] == list(range(8))
    assert all((step.tokens, step.padded_tokens) == (24, 32) for step in steps), "2 x 2 rows of 6 tokens and 2 padded"
    logged = [line for line in made.state.log_history if "grad_norm" in line]
    assert [step.loss for step in steps] == pytest.approx([line["loss"] for line in logged], abs=1e-3)
    assert [step.extra.grad_norm for step in steps] == pytest.approx([line["grad_norm"] for line in logged])
    assert steps[0].extra.lr == pytest.approx(1e-3)
    assert {"data", "forward", "backward", "optimize"} <= steps[1].phases.keys()
    assert {"eval", "save"} <= steps[4].phases.keys(), "between two steps"
    assert not {"eval", "save"} & steps[2].phases.keys()
    story = tell(run)
    assert (story.state.kind, story.recipe, story.total_steps) == ("finished", "trainer", 8)
    assert story.speed.mfu
    assert len(story.evaluations) == 2
    assert sum(isinstance(event, events.Saved) for event in story.events) == 2
    assert not made.model._forward_hooks, "the model is as it was"
    done = command("report", str(tmp_path / "run"))
    assert done.code == 0, done.err

    with pytest.raises(UsageError, match="already holds a run"):
        trainer(tmp_path, steps=8).train()
    trainer(tmp_path, steps=10).train(resume_from_checkpoint=True)
    assert [step.step for step in Run.open(tmp_path / "run").latest_steps()] == list(range(10))
    assert tell(Run.open(tmp_path / "run")).num_attempts == 2
