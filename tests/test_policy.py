"""Advantages, losses, KL and GAE against numbers worked out by hand and against plain loops."""

import math

import numpy as np
import pytest
import torch

from flatout import policy


def test_advantages_of_a_group_by_hand() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [0.3, 0.3, 0.3, 0.3], [2.0, 0.0, 1.0, 1.0]])
    one = 0.5 / (math.sqrt(1 / 3) + 1e-6)  # the deviation of 1, 0, 0, 1 with Bessel's correction
    grpo = policy.group_advantages(rewards, estimator="group")
    assert grpo[0] == pytest.approx([one, -one, -one, one])
    assert (grpo[1] == 0).all()
    assert policy.group_advantages(rewards, estimator="group_mean")[2] == pytest.approx([1, -1, 0, 0])
    # 2 against the mean of 0, 1, 1; 0 against the mean of 2, 1, 1.
    assert policy.group_advantages(rewards, estimator="leave_one_out")[2] == pytest.approx([4 / 3, -4 / 3, 0, 0])
    with pytest.raises(ValueError, match="at least 2"):
        policy.group_advantages(np.ones((3, 1)), estimator="group")


def test_equal_rewards_give_no_advantage_whatever_their_mean_rounds_to() -> None:
    rewards = np.full((1, 7), 0.1)  # their mean is not exactly 0.1
    for estimator in ("group", "group_mean", "leave_one_out"):
        assert (policy.group_advantages(rewards, estimator=estimator) == 0).all()


def test_overlong_penalty_falls_linearly_in_the_buffer() -> None:
    lengths = (10, 80, 90, 100, 120)
    assert [policy.overlong_penalty(n, limit=100, buffer=20) for n in lengths] == pytest.approx([0, 0, -0.5, -1, -1])
    assert policy.overlong_penalty(100, limit=100, buffer=0) == 0


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", (2 * 1.0 + 6 * 3.0) / 8),
        ("seq-mean-token-mean", (1.0 + 3.0) / 2),
        ("seq-mean-token-sum", (2.0 + 18.0) / 2),
        ("seq-mean-token-sum-norm", (2.0 + 18.0) / (2 * 10)),
    ],
)
def test_aggregations_are_weights_of_tokens(aggregation: policy.Aggregation, expected: float) -> None:
    """Two sequences of 2 and 6 tokens, with a loss of 1 and 3 at each token, under a limit of 10."""
    lengths = np.array([2, 6])
    weights = policy.token_weights(lengths, aggregation=aggregation, max_length=10)
    assert float((weights * lengths * [1.0, 3.0]).sum() / lengths.sum()) == pytest.approx(expected)


def test_gae_by_hand_and_by_its_definition() -> None:
    advantages, returns = policy.gae(np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.2, 0.4]), gamma=0.9, lam=0.5)
    deltas = [0.9 * 0.2 - 0.5, 0.9 * 0.4 - 0.2, 1.0 - 0.4]
    assert advantages == pytest.approx(
        [deltas[0] + 0.45 * deltas[1] + 0.45**2 * deltas[2], deltas[1] + 0.45 * deltas[2], deltas[2]]
    )
    assert returns == pytest.approx(advantages + np.array([0.5, 0.2, 0.4]))
    # With gamma and lambda 1 the return of every token is the reward that follows.
    assert policy.gae(np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.2, 0.4]), gamma=1.0, lam=1.0)[1] == pytest.approx(1.0)


def test_clipping_by_hand() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 5.0, 1.1])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0])
    loss, clipped = policy.policy_loss(ratio.log(), advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert loss.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, 3.0, -1.1])
    assert clipped.tolist() == [True, False, False, True, True, False]
    without, _ = policy.policy_loss(ratio.log(), advantage, clip_low=0.2, clip_high=0.28)
    assert without.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, 5.0, -1.1])


def test_what_is_clipped_has_no_gradient() -> None:
    logp = torch.tensor([math.log(1.5), math.log(0.9)], requires_grad=True)
    loss, _ = policy.policy_loss(policy.log_ratio(logp, torch.zeros(2)), torch.ones(2), clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.0, -0.9])


def test_ratios_of_sequences_are_means_and_pass_each_token_its_gradient() -> None:
    log_ratio = torch.tensor([0.1, 0.3, 9.0, -0.4], requires_grad=True)
    sequence, trained = torch.tensor([0, 0, 0, 1]), torch.tensor([True, True, False, True])
    found = policy.sequence_log_ratio(log_ratio, sequence, trained_N=trained, num_sequences=2)
    assert found.tolist() == pytest.approx([0.2, 0.2, 0.2, -0.4])
    found.exp()[:2].sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == pytest.approx([math.exp(0.2), math.exp(0.2), 0.0, 0.0])


def test_kl_estimators_agree_on_average() -> None:
    """Over all tokens of a small vocabulary, weighted by the policy: k1 and k3 are exact, k2 is near."""
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(50, generator=generator).mul(0.1).log_softmax(0) for _ in range(2))
    exact = float((one.exp() * (one - other)).sum())
    means = {name: float((one.exp() * policy.kl(one, other, estimator=name)).sum()) for name in ("k1", "k2", "k3")}
    assert means["k1"] == pytest.approx(exact, rel=1e-5)
    assert means["k3"] == pytest.approx(exact, rel=1e-4)
    assert means["k2"] == pytest.approx(exact, rel=0.2)
    assert (policy.kl(one, other, estimator="k3") >= 0).all()


def test_values_stay_near_the_old_ones_only_where_that_costs_more() -> None:
    value, old, target = torch.tensor([2.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])
    assert policy.value_loss(value, old, target, clip=0.5).tolist() == pytest.approx([0.5, 0.405])
    assert policy.value_loss(value, old, target, clip=None).tolist() == pytest.approx([0.5, 0.405])
    assert policy.value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]), clip=0.2).item() == (
        pytest.approx(0.32)
    )


def test_importance_weights_are_truncated_and_carry_no_gradient() -> None:
    logp = torch.tensor([0.0, 3.0, -40.0], requires_grad=True)
    weights = policy.importance_weights(logp, torch.zeros(3), limit=2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-20)])
    assert not weights.requires_grad
