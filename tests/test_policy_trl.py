"""The arithmetic of policy gradients against TRL's own functions, where TRL is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from flatout import policy
from flatout.config.settings import Aggregation
from flatout.losses import linear_log_probs

trl = pytest.importorskip("trl")

SEQUENCES, LONGEST, LIMIT = 6, 9, 12


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    lengths = torch.tensor([9, 1, 4, 7, 2, 9])
    logp = -2.0 + 0.5 * normal(SEQUENCES, LONGEST)
    return {
        "lengths": lengths,
        "mask": (torch.arange(LONGEST) < lengths[:, None]).double(),
        "logp": logp,
        "old": logp + 0.4 * normal(SEQUENCES, LONGEST),  # some ratios are clipped, some are not
        "reference": logp + 0.3 * normal(SEQUENCES, LONGEST),
        "advantages": normal(SEQUENCES),
    }


def theirs(given: dict[str, torch.Tensor], logp: torch.Tensor, **asked: Any) -> torch.Tensor:
    """The loss of TRL's trainer on log-probabilities that are given instead of computed by a model."""
    from trl import GRPOTrainer

    trainer = MagicMock(
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.28,
        max_completion_length=LIMIT,
        current_gradient_accumulation_steps=1,
        args=SimpleNamespace(delta=asked.pop("delta", None), use_bias_correction_kl=False, steps_per_generation=1),
        **{"importance_sampling_level": "token", "beta": 0.0, "loss_type": "dapo", **asked},
    )
    trainer._get_per_token_logps_and_entropies.return_value = (logp, torch.zeros_like(logp), None)
    trainer.accelerator.num_processes = 1
    trainer.accelerator.gather.side_effect = lambda tensor: tensor
    nothing = torch.zeros((SEQUENCES, 1), dtype=torch.long)
    batch = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros((SEQUENCES, LONGEST), dtype=torch.long),
        "completion_mask": given["mask"],
        "advantages": given["advantages"],
        "old_per_token_logps": given["old"],
        "ref_per_token_logps": given["reference"],
        "num_items_in_batch": given["mask"].sum(),
    }
    loss: torch.Tensor = GRPOTrainer._compute_loss(trainer, None, batch)
    return loss


def ours(
    given: dict[str, torch.Tensor],
    logp: torch.Tensor,
    *,
    aggregation: Aggregation,
    by_sequence: bool = False,
    kl: float = 0.0,
    dual_clip: float | None = None,
) -> torch.Tensor:
    trained = given["mask"].bool()
    sequence = torch.arange(SEQUENCES)[:, None].expand_as(trained)[trained]
    ratio = policy.log_ratio(logp[trained], given["old"][trained])
    if by_sequence:
        every = torch.ones_like(sequence, dtype=torch.bool)
        ratio = policy.sequence_log_ratio(ratio, sequence, trained_N=every, num_sequences=SEQUENCES)
    advantage = given["advantages"][sequence]
    losses, _ = policy.policy_loss(ratio, advantage, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)
    if kl:
        losses = losses + kl * policy.kl(logp[trained], given["reference"][trained], estimator="k3")
    lengths = given["lengths"].numpy()
    weights = torch.from_numpy(policy.token_weights(lengths, aggregation=aggregation, max_length=LIMIT))
    return (weights[sequence] * losses).sum() / trained.sum()


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({"aggregation": "token-mean"}, {"loss_type": "dapo"}),
        ({"aggregation": "token-mean"}, {"loss_type": "bnpo"}),
        ({"aggregation": "seq-mean-token-mean"}, {"loss_type": "grpo"}),
        ({"aggregation": "seq-mean-token-sum-norm"}, {"loss_type": "dr_grpo"}),
        ({"aggregation": "token-mean", "kl": 0.1}, {"beta": 0.1}),
        ({"aggregation": "token-mean", "dual_clip": 1.5}, {"delta": 1.5}),
        (
            {"aggregation": "seq-mean-token-mean", "by_sequence": True},
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        ),
    ],
    ids=str,
)
def test_losses_and_gradients_are_those_of_trl(here: dict[str, Any], there: dict[str, Any]) -> None:
    given = inputs()
    found = []
    for loss_of, asked in ((ours, here), (theirs, there)):
        logp = given["logp"].clone().requires_grad_()
        loss = loss_of(given, logp, **asked)
        (gradient,) = torch.autograd.grad(loss, logp)
        found.append((float(loss.detach()), gradient * given["mask"]))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-9)
    assert float((found[0][1] - found[1][1]).abs().max()) < 1e-9
    assert float(found[0][1].abs().max()) > 0


def test_advantages_are_those_of_trl_but_for_the_constant_that_guards_the_division() -> None:
    from trl.trainer.utils import nanstd

    rewards = np.random.default_rng(0).integers(0, 2, (16, 8)).astype(float)
    rewards[0] = 1.0
    spread = nanstd(torch.from_numpy(rewards), dim=1).numpy()[:, None]
    expected = (rewards - rewards.mean(1, keepdims=True)) / (spread + 1e-4)
    found = policy.group_advantages(rewards, estimator="group") * (spread + policy.STD_EPS) / (spread + 1e-4)
    assert found == pytest.approx(expected, abs=1e-5)


def test_the_overlong_penalty_is_that_of_trl() -> None:
    from trl.rewards import get_soft_overlong_punishment

    penalty = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    expected = penalty(completion_ids=[[1] * length for length in range(130)])
    assert [policy.overlong_penalty(n, limit=100, buffer=20) for n in range(130)] == pytest.approx(expected)


def test_log_probabilities_and_entropy_are_those_of_trl() -> None:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn((rows, 16), generator=generator) for rows in (50, 33))
    targets = torch.randint(0, 33, (50,), generator=generator)
    logp, entropy = linear_log_probs(hidden, weight, targets, temperature=0.7, chunk=16)
    logits = hidden @ weight.T / 0.7
    assert torch.allclose(logp, selective_log_softmax(logits[None], targets[None])[0], atol=1e-5)
    assert torch.allclose(entropy, entropy_from_logits(logits), atol=1e-5)
