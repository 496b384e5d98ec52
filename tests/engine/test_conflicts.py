"""PCGrad by coefficients against the projections written out, in float64, and inside a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from tests.engine.test_objective import TASKS, engine_of, trained

from flatout.engine import conflicts


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
    method = conflicts.PCGrad(tasks=tuple("abcd"), seed=3)
    first = method(gradients, step=5)[0]
    assert torch.equal(first, method(dict(reversed(gradients.items())), step=5)[0])
    assert any(not torch.equal(first, method(gradients, step=step)[0]) for step in range(20))


def test_a_step_applies_the_combined_gradient() -> None:
    engine, applied = engine_of(), []

    class Seen(conflicts.PCGrad):
        def __call__(self, gradients: Mapping[str, Sequence[torch.Tensor]], *, step: int) -> list[torch.Tensor]:
            merged = super().__call__(gradients, step=step)
            flat = [torch.cat([part.flatten() for part in gradients[task]]).double() for task in TASKS]
            order = [[1], [0]]  # of two tasks there is only one
            expected = projected(flat, order)
            torch.testing.assert_close(
                torch.cat([p.flatten() for p in merged]).double(), expected, rtol=1e-4, atol=1e-7
            )
            applied.append(float(expected.norm()))
            return merged

    engine.combine = Seen(tasks=TASKS, seed=0)
    facts = trained(engine, size=2, steps=3)
    assert [fact.grad_norm for fact in facts] == pytest.approx(applied, rel=1e-5)
