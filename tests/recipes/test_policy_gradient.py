"""The objective of reinforcement learning against the losses written out sequence by sequence, with gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flatout.config import from_mapping
from flatout.config.settings import Settings
from flatout.data.stream import Batch
from flatout.engine.objective import CrossEntropy, Head
from flatout.losses import linear_cross_entropy, row_loss
from flatout.recipes.experience import (
    ADVANTAGE,
    OLD_LOGP,
    OLD_VALUE,
    REFERENCE_LOGP,
    RETURN,
    SAMPLER_LOGP,
    WEIGHT,
    Row,
    examples_of,
    packed,
)
from flatout.recipes.policy_gradient import PolicyGradient

VOCAB, WIDTH = 17, 8
COLUMNS = (ADVANTAGE, WEIGHT, OLD_LOGP, SAMPLER_LOGP, REFERENCE_LOGP, OLD_VALUE, RETURN)


def settings(**rl: Any) -> Settings:
    return from_mapping(
        {
            "recipe": "rl",
            "model": {"layers": 1, "hidden": 8, "heads": 1, "positions": 64},
            "data": {"sequence_length": 32},
            "rl": {"tasks": ["sums:train"], "prompts": 4, "samples": 2, **rl},
            "sample": {"max_tokens": 12},
            "train": {"steps": 4},
        }
    )


def rows(generator: np.random.Generator, *, count: int = 8) -> list[Row]:
    found = []
    for i in range(count):
        prompt, length = int(generator.integers(2, 7)), int(generator.integers(1, 12))
        values = {name: generator.normal(size=length) for name in COLUMNS}
        # Near each other, so that some ratios are clipped and some are not.
        for name in (OLD_LOGP, SAMPLER_LOGP, REFERENCE_LOGP):
            values[name] = -np.log(VOCAB) + 0.3 * values[name]
        values[ADVANTAGE] = np.full(length, generator.normal())
        values[WEIGHT] = np.full(length, generator.uniform(0.5, 2.0))
        found.append(
            Row(
                slot=i // 2,
                task="sums:train",
                prompt=tuple(generator.integers(0, VOCAB, prompt).tolist()),
                ids=tuple(generator.integers(0, VOCAB, length).tolist()),
                reward=0.0,
                trained=i != 3,
                values=values,
            )
        )
    return found


def written_out(
    objective: PolicyGradient, batches: list[Batch], examples: list[Row], embedding: Tensor, head: Tensor, v: Tensor
) -> Tensor:
    """The loss, sequence by sequence: a token's hidden state is a function of the token before it alone."""
    rl, total = objective.rl, torch.zeros((), dtype=torch.float64)
    for row in examples:
        if not row.trained:
            continue
        before = torch.tensor([*row.prompt, *row.ids][len(row.prompt) - 1 : -1])
        hidden = embedding[before]
        logp = (hidden @ head.T).log_softmax(-1).gather(1, torch.tensor(row.ids)[:, None])[:, 0]
        column = {name: torch.tensor(row.values[name]) for name in COLUMNS}
        ratio = (logp - column[OLD_LOGP]).exp()
        if rl.algorithm == "gspo":
            mean = (logp - column[OLD_LOGP]).mean().detach()
            ratio = (mean + logp - logp.detach()).exp()
        low = objective.method.clip_low if rl.clip_low is None else rl.clip_low
        high = objective.method.clip_high if rl.clip_high is None else rl.clip_high
        a = column[ADVANTAGE]
        loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
        if rl.dual_clip is not None:
            loss = torch.where(a < 0, torch.minimum(loss, -a * rl.dual_clip), loss)
        if rl.correction is not None:
            loss = loss * (column[OLD_LOGP] - column[SAMPLER_LOGP]).exp().clamp(max=rl.correction)
        if rl.kl:
            gap = column[REFERENCE_LOGP] - logp
            kl = {"k1": -gap, "k2": gap.square() / 2, "k3": gap.exp() - gap - 1}[rl.kl_estimator]
            loss = loss + rl.kl * kl
        total = total + (loss * column[WEIGHT]).sum()
        if rl.algorithm == "ppo":
            value, old, target = hidden @ v, column[OLD_VALUE], column[RETURN]
            error = (value - target).square()
            if rl.value_clip is not None:
                near = old + (value - old).clamp(-rl.value_clip, rl.value_clip)
                error = torch.maximum(error, (near - target).square())
            total = total + rl.value_weight * 0.5 * error.sum()
    return total


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize(
    "rl",
    [
        {},
        {"algorithm": "dapo"},
        {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5},
        {"algorithm": "gspo"},
        {"algorithm": "gspo", "clip_low": 0.1, "clip_high": 0.1},
        {"correction": None, "kl": 0.1, "kl_estimator": "k1"},
        {"kl": 0.1, "kl_estimator": "k2"},
        {"kl": 0.1},
        {"algorithm": "ppo"},
        {"algorithm": "ppo", "value_clip": None, "value_weight": 1.5},
    ],
    ids=str,
)
def test_the_loss_and_its_gradient_are_those_of_the_formula(rl: dict[str, Any], micro_batch: int) -> None:
    chosen = settings(**rl)
    objective = PolicyGradient(chosen.rl, temperature=1.0)
    examples = rows(np.random.default_rng(3))
    generator = torch.Generator().manual_seed(1)
    embedding, head = (torch.randn(VOCAB, WIDTH, generator=generator).double().mul(0.3) for _ in range(2))
    v = torch.randn(WIDTH, generator=generator).double()
    ours, theirs = ([t.clone().requires_grad_() for t in (embedding, head, v)] for _ in range(2))

    batches = packed(examples_of(examples), chosen).batches(micro_batch)
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        hidden = ours[0][batch.tokens].float()
        values = ours[2].float()
        given = Head(
            hidden_NC=hidden,
            weight_VC=ours[1].float(),
            loss=lambda *_: torch.zeros(()),
            critic=lambda hidden, values=values: hidden @ values,
        )
        total = total + objective(batch, given)["loss"].double()
    expected = written_out(objective, batches, examples, *theirs)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
    total.backward()
    expected.backward()
    for mine, other in zip(ours, theirs, strict=True):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_a_solution_is_learnt_as_by_cross_entropy() -> None:
    chosen = settings()
    solutions = [
        replace(row, trained=True, values={ADVANTAGE: np.ones(len(row.ids)), WEIGHT: np.ones(len(row.ids))})
        for row in rows(np.random.default_rng(0))
    ]
    gradients = []
    for objective in (PolicyGradient(chosen.rl, temperature=1.0), CrossEntropy()):
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(4096, WIDTH, generator=generator).requires_grad_()
        head = torch.randn(VOCAB, WIDTH, generator=generator).requires_grad_()
        for batch in packed(examples_of(solutions), chosen).batches(2):

            def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
                return linear_cross_entropy(hidden, weight, targets, chunk=64, rows=row_loss)

            given = Head(hidden_NC=hidden[: batch.tokens.numel()], weight_VC=head, loss=loss)
            objective(batch, given)["loss"].backward()
        gradients.append((hidden.grad, head.grad))
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
