"""PCGrad, CAGrad and MGDA by coefficients against the methods written out, and inside a training step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.test_objective import TASKS, engine_of, trained
from tests.warm import two_ranks

from flatout.engine import conflicts
from flatout.engine.ranks import from_environment


def projected(gradients: list[torch.Tensor], order: list[list[int]]) -> torch.Tensor:
    """The method as it is published, one gradient after the other."""
    total = torch.zeros_like(gradients[0])
    for i, own in enumerate(gradients):
        changed = own.clone()
        for j in order[i]:
            overlap = changed @ gradients[j]
            if j != i and overlap < 0:
                changed = changed - overlap / (gradients[j] @ gradients[j]) * gradients[j]
        total += changed
    return total


@pytest.mark.parametrize("tasks", [2, 3, 4, 5, 6])
def test_pcgrad_by_coefficients_equals_the_projections(tasks: int) -> None:
    generator = np.random.default_rng(tasks)
    conflicting = 0
    for _ in range(50):
        gradients = [torch.from_numpy(generator.normal(size=40) + generator.normal()) for _ in range(tasks)]
        order = [generator.permutation(tasks).tolist() for _ in range(tasks)]
        products = conflicts.gram([[gradient[:7], gradient[7:]] for gradient in gradients])
        conflicting += int((products < 0).any())
        weights = conflicts.pcgrad_weights(products, order=order)
        parts = conflicts.combined([[gradient[:7], gradient[7:]] for gradient in gradients], weights)
        torch.testing.assert_close(torch.cat(parts), projected(gradients, order), rtol=1e-10, atol=1e-10)
    assert conflicting > 10


def test_a_task_without_a_gradient_changes_nothing() -> None:
    gradients = [torch.tensor([1.0, -2.0]).double(), torch.zeros(2).double()]
    weights = conflicts.pcgrad_weights(conflicts.gram([[g] for g in gradients]), order=[[1], [0]])
    assert weights.tolist() == [1.0, 1.0]


def test_cosines_say_which_tasks_conflict() -> None:
    gradients = [[torch.tensor([1.0, 0.0])], [torch.tensor([-2.0, 0.0])], [torch.zeros(2)]]
    found = conflicts.cosines(conflicts.gram(gradients))
    assert found.tolist() == [[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


def test_the_order_depends_on_seed_and_step_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = {name: [torch.randn(9, generator=generator).double()] for name in "abcd"}
    gradients["b"] = [-gradients["a"][0] + 0.3 * gradients["b"][0]]
    method = conflicts.Combined(tasks=tuple("abcd"), seed=3)
    first = method(gradients, step=5)[0][0]
    assert torch.equal(first, method(dict(reversed(gradients.items())), step=5)[0][0])
    assert any(not torch.equal(first, method(gradients, step=step)[0][0]) for step in range(20))


def simplex(count: int) -> torch.Tensor:
    """A grid on the simplex of three weights."""
    steps = [(i, j) for i in range(count + 1) for j in range(count + 1 - i)]
    return torch.tensor([[i, j, count - i - j] for i, j in steps]).double() / count


@pytest.mark.parametrize("seed", range(5))
def test_mgda_finds_the_shortest_convex_combination(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(3, 6, generator=generator).double()
    weights = conflicts.mgda_weights(gradients @ gradients.T) / 3
    assert weights.min() >= 0
    assert float(weights.sum()) == pytest.approx(1.0)
    shortest = (simplex(200) @ gradients).norm(dim=1).min()
    assert float((weights @ gradients).norm()) <= float(shortest) + 1e-3


@pytest.mark.parametrize("seed", range(5))
def test_cagrad_helps_the_worst_task_most(seed: int) -> None:
    """Near the mean gradient no update has a larger least inner product with the tasks' gradients."""
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(3, 4, generator=generator).double()
    mean = gradients.mean(0)
    update = conflicts.cagrad_weights(gradients @ gradients.T) @ gradients / 3
    radius = conflicts.CAGRAD_C * mean.norm()
    assert float((update - mean).norm()) <= float(radius) * 1.0001
    others = torch.randn(20000, 4, generator=generator).double()
    others = mean + radius * others / others.norm(dim=1, keepdim=True)
    best = (others @ gradients.T).min(dim=1).values.max()
    assert float((gradients @ update).min()) >= float(best) - 0.02 * float(mean.norm() ** 2)


def test_a_step_applies_the_combined_gradient_and_tells_the_cosines() -> None:
    engine, applied, cosines = engine_of(), [], []

    class Seen(conflicts.Combined):
        def __call__(
            self,
            gradients: Mapping[str, Sequence[torch.Tensor]],
            *,
            step: int,
            products: conflicts.Products | None = None,
        ) -> tuple[list[torch.Tensor], torch.Tensor]:
            merged, measured = super().__call__(gradients, step=step, products=products)
            flat = [torch.cat([part.flatten() for part in gradients[task]]).double() for task in TASKS]
            order = [[1], [0]]  # of two tasks there is only one
            expected = projected(flat, order)
            torch.testing.assert_close(
                torch.cat([p.flatten() for p in merged]).double(), expected, rtol=1e-4, atol=1e-7
            )
            applied.append(float(expected.norm()))
            cosines.append(float(torch.nn.functional.cosine_similarity(*flat, dim=0)))
            return merged, measured

    engine.combine = Seen(tasks=TASKS, seed=0)
    facts = trained(engine, size=2, steps=3)
    assert [fact.grad_norm for fact in facts] == pytest.approx(applied, rel=1e-5)
    assert [fact.metrics["cosine/even/odd"] for fact in facts] == pytest.approx(cosines, abs=1e-6)
    assert [fact.metrics["conflicts"] for fact in facts] == [float(cosine < 0) for cosine in cosines]


def test_two_ranks_combine_like_one(tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.engine import test_conflicts\n"
        "test_conflicts.one_rank(sys.argv[1])\n"
    )
    two_ranks(str(tmp_path), cwd=tmp_path, script=script)
    told = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    engine = engine_of()
    engine.combine = conflicts.Combined(tasks=TASKS, seed=0)
    alone = [[fact.loss, fact.grad_norm, *fact.metrics.values()] for fact in trained(engine, size=2, steps=3)]
    assert told[0] == told[1]
    for ours, theirs in zip(told[0], alone, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def one_rank(folder: str) -> None:
    """The body of one of two processes."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    ranks = from_environment()
    dist.init_process_group("gloo")
    engine = engine_of(ranks=ranks)
    engine.combine = conflicts.Combined(tasks=TASKS, seed=0)
    found = [[fact.loss, fact.grad_norm, *fact.metrics.values()] for fact in trained(engine, size=2, steps=3)]
    (Path(folder) / f"rank{ranks.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
