"""The objective of recipe rl: what a step on generated tokens minimises and reports."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flatout import policy
from flatout.config.settings import RlSettings
from flatout.data.stream import NOT_TRAINED, Batch
from flatout.engine.objective import LOSS, Head, Rule
from flatout.recipes.experience import ADVANTAGE, OLD_LOGP, OLD_VALUE, REFERENCE_LOGP, RETURN, SAMPLER_LOGP, WEIGHT


class PolicyGradient:
    """The clipped policy-gradient loss of generated tokens, with the losses of a critic and of a reference if any."""

    def __init__(self, rl: RlSettings, *, temperature: float) -> None:
        self.rl, self.method, self.temperature = rl, policy.ALGORITHMS[rl.algorithm], temperature
        self.metrics: dict[str, Rule] = dict.fromkeys(("entropy", "nll", "clipped", "policy_kl", "mismatch"), "mean")
        self.metrics |= {"reference_kl": "mean"} if rl.kl else {}
        self.metrics |= {"value_loss": "mean"} if self.method.estimator is None else {}

    def __call__(self, batch: Batch, head: Head) -> Mapping[str, Tensor]:
        rows, targets = batch.rows, batch.targets if batch.row_targets is None else batch.row_targets
        logp, entropy = head.log_probs(targets, rows=rows, temperature=self.temperature)
        columns = {name: c if rows is None else c.index_select(0, rows) for name, c in batch.columns.items()}
        trained = (targets != NOT_TRAINED).float()
        old = columns.get(OLD_LOGP, logp.detach())
        ratio = policy.log_ratio(logp, old)
        if self.method.by_sequence:
            ratio = self._by_sequence(ratio, batch, trained)
        losses, clipped = policy.policy_loss(
            ratio,
            columns[ADVANTAGE],
            clip_low=self.rl.clip_low or self.method.clip_low,
            clip_high=self.rl.clip_high or self.rl.clip_low or self.method.clip_high,
            dual_clip=self.rl.dual_clip,
        )
        sampled = columns.get(SAMPLER_LOGP, old)
        if self.rl.correction is not None:
            losses = losses * policy.importance_weights(old, sampled, limit=self.rl.correction)
        found = {
            "entropy": entropy.sum(),
            "nll": -logp.detach().sum(),
            "clipped": (clipped * trained).sum(),
            "policy_kl": (policy.kl(old, logp.detach(), estimator="k3") * trained).sum(),
            "mismatch": ((logp.detach() - sampled).abs() * trained).sum(),
        }
        if self.rl.kl:
            kl = policy.kl(logp, columns.get(REFERENCE_LOGP, logp.detach()), estimator=self.rl.kl_estimator)
            losses = losses + self.rl.kl * kl
            found["reference_kl"] = (kl.detach() * trained).sum()
        loss = (losses * columns[WEIGHT] * trained).sum()
        if self.method.estimator is None:
            # While only the critic learns, a shared trunk must stay as it is: it is the policy.
            values = head.values(rows=rows, into_policy_N=batch.columns[WEIGHT] != 0)
            errors = policy.value_loss(values, columns[OLD_VALUE], columns[RETURN], clip=self.rl.value_clip) * trained
            loss = loss + self.rl.value_weight * errors.sum()
            found["value_loss"] = errors.detach().sum()
        return {LOSS: loss, **found}

    @staticmethod
    def _by_sequence(ratio: Tensor, batch: Batch, trained: Tensor) -> Tensor:
        assert batch.cu_seqlens is not None
        place = torch.arange(batch.tokens.numel(), device=ratio.device) if batch.rows is None else batch.rows
        sequence = torch.searchsorted(batch.cu_seqlens, place.int(), right=True) - 1
        return policy.sequence_log_ratio(ratio, sequence, trained_N=trained, num_sequences=len(batch.cu_seqlens))
