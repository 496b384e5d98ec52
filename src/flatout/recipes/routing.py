"""What recipe router learns: given adapters in phase 1, chosen ones afterwards, and the losses of that choice.

Legend: N tokens, D documents, E adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.config.settings import RouterSettings
from flatout.data.stream import Batch
from flatout.engine.objective import LOSS, Head, Rule
from flatout.model import Attend, Decoder, Model, Routed, Router
from flatout.model.router import documents_of, mixed, prompt_states
from flatout.recipes.mixture import ADAPTER, NOISE, PER_DOCUMENT, PROMPT, SHARE, TEMPERATURE


class Oracle:
    """Each document goes through the adapter of its own task."""

    def __init__(self, num_adapters: int) -> None:
        self._num_adapters = num_adapters

    def __call__(self, model: Model, batch: Batch, attend: Attend) -> Routed:
        return Routed(mix_NE=F.one_hot(batch.columns[ADAPTER], self._num_adapters).float())


class ByRouter:
    """The router chooses, from the state of the prompt in the base model."""

    def __init__(self, router: RouterSettings) -> None:
        self._hard = router.mode == "hard"

    def __call__(self, model: Model, batch: Batch, attend: Attend) -> Routed:
        assert isinstance(model, Decoder)
        router, cu_seqlens = model.router, batch.cu_seqlens
        assert isinstance(router, Router)
        assert cu_seqlens is not None
        prompt_N = batch.columns[PROMPT]
        logits_DE = router(prompt_states(model, batch.tokens, batch.positions, attend, prompt_N, cu_seqlens))
        temperature = router.temperature if router.learned else batch.columns[TEMPERATURE]
        mix_DE = mixed(logits_DE, temperature, hard=self._hard, noise_DE=batch.columns[NOISE])
        return Routed(
            mix_NE=mix_DE.index_select(0, documents_of(cu_seqlens, batch.tokens.numel())),
            logits_DE=logits_DE,
            probabilities_DE=(logits_DE / temperature).softmax(-1),
            temperature=temperature,
        )


class RoutedLoss:
    """The loss of the answers under the chosen adapters, and the losses of the choice; each a mean over documents.

    Every document counts the same, whether its answer is a word or a page.
    """

    def __init__(self, router: RouterSettings, names: Sequence[str]) -> None:
        self.router, self.names = router, names
        parts = ("task", "balance", "sparsity", "consistency", "entropy", "routed_right", "confidence")
        self.metrics: dict[str, Rule] = dict.fromkeys(parts, "mean")
        self.metrics |= dict.fromkeys((f"load_{name}" for name in names), "mean")
        self.metrics["temperature"] = "max"

    def __call__(self, batch: Batch, head: Head) -> Mapping[str, Tensor]:
        routed, rows = head.routed, batch.rows
        assert routed is not None
        assert routed.probabilities_DE is not None
        assert routed.temperature is not None
        targets = batch.targets if batch.row_targets is None else batch.row_targets
        share = batch.columns[SHARE] if rows is None else batch.columns[SHARE].index_select(0, rows)
        logp, _ = head.log_probs(targets, rows=rows)
        real_D, own_DE = self._documents(batch)
        parts = choice_losses(routed.probabilities_DE, real_D, own_DE)
        weights = self.router
        loss = (
            -(logp * share).sum()
            + weights.balance * parts["balance"]
            + weights.sparsity * parts["sparsity"]
            + weights.consistency * parts["consistency"]
            - weights.entropy * parts["entropy"]
        )
        with torch.no_grad():
            chosen_DE = F.one_hot(routed.probabilities_DE.argmax(-1), len(self.names)) * real_D[:, None]
            found = {
                "task": -(logp * share).sum(),
                **parts,
                "routed_right": (chosen_DE * own_DE).sum(),
                "confidence": (routed.probabilities_DE.max(-1).values * real_D).sum(),
                **{f"load_{name}": load for name, load in zip(self.names, chosen_DE.sum(0), strict=True)},
            }
        # The step divides by its target tokens.
        scale = batch.columns[PER_DOCUMENT][0]
        return {
            LOSS: loss * scale,
            **{name: value * scale for name, value in found.items()},
            "temperature": routed.temperature[0],
        }

    def _documents(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Whether each document is one, and not padding; and its own adapter."""
        assert batch.cu_seqlens is not None
        begins = batch.cu_seqlens[:-1].long()
        inside = begins < batch.tokens.numel()
        begins = begins.clamp(max=batch.tokens.numel() - 1)
        real_D = (inside & (batch.columns[PROMPT][begins] > 0)).float()
        return real_D, F.one_hot(batch.columns[ADAPTER][begins], len(self.names)).float() * real_D[:, None]


def choice_losses(p_DE: Tensor, real_D: Tensor, own_DE: Tensor) -> dict[str, Tensor]:
    """The losses of the choice, each summed over documents; 0 is the lowest, except for balance, which is 1 each.

    balance: the number of adapters times the sum of (share of documents whose first choice it is x mean probability);
    0 in a batch of a single task, whose own adapter should get all of them.
    sparsity: 1 minus the sum of the squared probabilities. consistency: the squared distance from the mean of the
    documents of the same task in the batch. entropy: in nats; it is subtracted, as a bonus.
    """
    p_DE = p_DE * real_D[:, None]
    count = real_D.sum().clamp(min=1.0)
    first_E = (F.one_hot(p_DE.argmax(-1), p_DE.shape[1]) * real_D[:, None]).sum(0) / count
    mean_EE = (own_DE.t() @ p_DE) / own_DE.sum(0).clamp(min=1.0)[:, None]
    several = (own_DE.sum(0) > 0).sum() > 1
    return {
        "balance": several * p_DE.shape[1] * (first_E * p_DE.sum(0)).sum(),
        "sparsity": (real_D - p_DE.square().sum(-1)).sum(),
        "consistency": (p_DE - own_DE @ mean_EE).square().sum(),
        "entropy": -(p_DE * p_DE.clamp(min=1e-12).log()).sum(),  # finite gradients also where a probability is 0
    }
