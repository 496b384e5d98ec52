"""The step with an objective of one's own: named metrics, gradients by task, columns, against a plain torch loop."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.engine.test_step import ACTIVE, T, build, micro_batches
from tests.warm import two_ranks
from torch import Tensor

from flatout.config.settings import TrainSettings
from flatout.data.stream import Batch
from flatout.engine.objective import Head, Rule
from flatout.engine.ranks import Ranks, from_environment
from flatout.engine.resolve import Active
from flatout.engine.step import Engine, StepFacts
from flatout.model import Decoder, Masked
from flatout.optim import adamw

STEPS, LR, PULL = 6, 1e-2, 0.1
TASKS = ("even", "odd")


class Weighted:
    """Cross-entropy weighted by a column, and a pull of the hidden states towards zero."""

    metrics: Mapping[str, Rule] = {"pull": "mean", "weight": "sum", "farthest": "max"}

    def __call__(self, batch: Batch, head: Head) -> Mapping[str, Tensor]:
        weight = batch.columns["weight"] * (batch.targets != -100)
        logits = (head.hidden_NC @ head.weight_VC.to(head.hidden_NC.dtype).t()).float()
        losses = F.cross_entropy(logits, batch.targets, reduction="none", ignore_index=-100)
        squares = head.hidden_NC.float().square().mean(-1) * (batch.targets != -100)
        return {
            "loss": (weight * losses).sum() + PULL * squares.sum(),
            "pull": squares.sum(),
            "weight": weight.sum(),
            "farthest": squares.max(),
        }


class Apart:
    """Keeps the gradients it is given, and applies their sum."""

    tasks = TASKS
    metrics = ()

    def __init__(self) -> None:
        self.seen: list[dict[str, list[Tensor]]] = []

    def __call__(
        self, gradients: Mapping[str, Sequence[Tensor]], *, step: int, products: object = None
    ) -> tuple[list[Tensor], None]:
        self.seen.append({task: [g.clone() for g in of_task] for task, of_task in gradients.items()})
        return [even + odd for even, odd in zip(gradients["even"], gradients["odd"], strict=True)], None


def weighted(step: int, size: int) -> list[Batch]:
    """Every batch has a weight for each token, drawn by its place in the step, and a task."""
    generator = torch.Generator().manual_seed(77 + step)
    weights = torch.rand(8 * T, generator=generator)
    parts = weights.split(size * T)
    batches = zip(micro_batches(step, size), parts, strict=True)
    return [replace(b, columns={"weight": w}, task=TASKS[i % 2]) for i, (b, w) in enumerate(batches)]


def engine_of(*, active: Active = ACTIVE, recompute: str = "none", ranks: Ranks | None = None) -> Engine:
    engine = build(active=active, recompute=recompute, lr=LR)
    engine.objective = Weighted()
    engine.ranks = ranks or engine.ranks
    return engine


def trained(engine: Engine, *, size: int, steps: int = STEPS) -> list[StepFacts]:
    """Each rank takes its share of the micro-batches."""
    facts: list[StepFacts] = []
    for step in range(steps):
        engine.begin_step(step)
        engine.step(step, weighted(step, size)[engine.ranks.rank :: engine.ranks.world])
        facts += engine.finished()
        engine.end_step()
    return facts + engine.finished(all=True)


def plain_loss(model: Decoder, step: int, task: str | None = None) -> tuple[Tensor, dict[str, float]]:
    """The same in plain torch: all sequences at once, with a mask."""
    (batch,) = weighted(step, 8)
    attend = Masked.of(batch.cu_seqlens, batch=8, length=T)  # type: ignore[arg-type]
    hidden = model.hidden(batch.tokens, batch.positions, attend)
    losses = F.cross_entropy(hidden @ model.head_weight.t(), batch.targets, reduction="none", ignore_index=-100)
    is_target = (batch.targets != -100).float()
    chosen = torch.ones(8 * T)
    if task is not None:  # in micro-batches of two sequences, of alternating tasks
        chosen = (torch.arange(8 * T) // (2 * T) % 2 == TASKS.index(task)).float()
    squares = hidden.square().mean(-1) * is_target
    weight = batch.columns["weight"] * is_target
    total = ((weight * losses + PULL * squares) * chosen).sum() / is_target.sum()
    metrics = {
        "pull": (squares.sum() / is_target.sum()).item(),
        "weight": weight.sum().item(),
        "farthest": squares.max().item(),
    }
    return total, metrics


def plain_loop() -> tuple[Decoder, list[float], list[float], list[dict[str, float]]]:
    model = build(lr=LR).model
    assert isinstance(model, Decoder)
    optimizer = adamw(model, TrainSettings(lr=LR, weight_decay=0.1), fused=False)
    assert isinstance(optimizer, torch.optim.AdamW)
    losses, norms, found = [], [], []
    for step in range(STEPS):
        loss, metrics = plain_loss(model, step)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        found.append(metrics)
    return model, losses, norms, found


def assert_same(facts: list[StepFacts], model: Decoder) -> None:
    reference, losses, norms, metrics = plain_loop()
    assert [f.loss for f in facts] == pytest.approx(losses, rel=1e-6)
    assert [f.grad_norm for f in facts] == pytest.approx(norms, rel=1e-5)
    for fact, expected in zip(facts, metrics, strict=True):
        assert fact.metrics == pytest.approx(expected, rel=1e-5)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        # AdamW divides by the root of the second moment, which enlarges rounding where a gradient is nearly zero.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("size", [8, 4, 1])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_two_part_objective_equals_a_plain_loop(size: int, recompute: str) -> None:
    engine = engine_of(recompute=recompute)
    facts = trained(engine, size=size)
    assert_same(facts, engine.model)


def test_two_ranks_report_and_learn_what_one_does(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        f"sys.path[:0] = {[str(Path.cwd())]!r}\n"
        "from tests.engine import test_objective\n"
        "test_objective.one_rank(sys.argv[1])\n"
    )
    two_ranks(str(tmp_path), cwd=tmp_path, script=script)
    told = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert told[0] == told[1], "both ranks know the same numbers"
    _, losses, norms, metrics = plain_loop()
    assert told[0]["losses"] == pytest.approx(losses, rel=1e-6)
    assert told[0]["norms"] == pytest.approx(norms, rel=1e-5)
    for found, expected in zip(told[0]["metrics"], metrics, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def one_rank(folder: str) -> None:
    """The body of one of two processes."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    ranks = from_environment()
    dist.init_process_group("gloo")
    facts = trained(engine_of(ranks=ranks), size=2)
    found = {
        "losses": [f.loss for f in facts],
        "norms": [f.grad_norm for f in facts],
        "metrics": [dict(f.metrics) for f in facts],
    }
    (Path(folder) / f"rank{ranks.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_gradients_of_each_task_arrive_unmixed() -> None:
    engine, combine = engine_of(), Apart()
    engine.combine = combine
    reference = build(lr=LR).model
    assert isinstance(reference, Decoder)
    expected = {}
    for task in TASKS:
        loss, _ = plain_loss(reference, 0, task)
        expected[task] = torch.autograd.grad(loss, list(reference.parameters()))
    trained(engine, size=2, steps=1)
    for task in TASKS:
        for ours, theirs in zip(combine.seen[0][task], expected[task], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_added_up_by_a_combine_the_step_is_the_same() -> None:
    engine = engine_of()
    engine.combine = Apart()
    assert_same(trained(engine, size=2), engine.model)


def test_a_task_that_nobody_combines_is_refused() -> None:
    engine = engine_of()
    engine.combine = Apart()
    strange = [replace(batch, task="other") for batch in weighted(0, 4)]
    engine.begin_step(0)
    with pytest.raises(ValueError, match="other"):
        engine.step(0, strange)


def test_a_task_without_a_batch_has_a_gradient_of_zero() -> None:
    engine, combine = engine_of(), Apart()
    engine.combine = combine
    engine.begin_step(0)
    engine.step(0, [replace(batch, task="even") for batch in weighted(0, 4)])
    engine.end_step()
    assert all(not g.any() for g in combine.seen[0]["odd"])
    assert any(g.any() for g in combine.seen[0]["even"])


@pytest.mark.gpu
@pytest.mark.parametrize("by_task", [False, True])
def test_recorded_passes_serve_any_objective(by_task: bool) -> None:
    """CUDA graphs: the same losses, metrics and weights as launched one by one, also with gradients by task."""
    active = replace(ACTIVE, device=torch.device("cuda"), varlen=False)
    results = []
    for graphs in (False, True):
        engine = engine_of(active=replace(active, graphs=graphs))
        if by_task:
            engine.combine = Apart()
        facts = trained(engine, size=2)
        assert bool(engine.replay) == graphs
        results.append((facts, [p.detach().cpu() for p in engine.model.parameters()]))
    (plain, plain_weights), (recorded, weights) = results
    assert [f.loss for f in recorded] == pytest.approx([f.loss for f in plain], rel=1e-5)
    for a, b in zip(recorded, plain, strict=True):
        assert a.metrics == pytest.approx(b.metrics, rel=1e-4)
    for a, b in zip(weights, plain_weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_columns_travel_with_a_batch() -> None:
    (batch,) = weighted(0, 8)
    moved = batch.to("cpu")
    assert torch.equal(moved.columns["weight"], batch.columns["weight"])
    assert "weight" in batch.tensors
    other = batch.with_tensors({name: tensor.clone() for name, tensor in batch.tensors.items()})
    assert other.columns["weight"] is not batch.columns["weight"]
    assert torch.equal(other.tokens, batch.tokens)
