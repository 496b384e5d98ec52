"""The parts of recipe dpo: pairs in a batch, the reference's log-probabilities, and the objective.

A pair is two neighbouring examples, the chosen answer first, in one sequence. The unit of the loss is a pair, so a
batch counts its pairs where others count target tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from flatout.config.settings import DpoSettings, Settings
from flatout.data.examples import Examples
from flatout.data.packed import Packed
from flatout.data.stream import NOT_TRAINED, Batch, Steps
from flatout.engine.objective import LOSS, Head, Rule
from flatout.engine.ranks import Ranks
from flatout.engine.step import Engine
from flatout.model import Model
from flatout.plan import Plan
from flatout.recipes.experience import reference_of
from flatout.recipes.setup import build_model

# Columns of the examples: 1 for tokens of a chosen answer and -1 for those of a rejected one; 1 at one token of each
# pair; the log-probability of the initial model.
ANSWER, PAIR, REFERENCE = "answer", "pair", "reference"


class Preference:
    """DPO's loss of the pairs of a batch, or a variant of it."""

    metrics: Mapping[str, Rule] = dict.fromkeys(("accuracy", "margin", "chosen_logp", "rejected_logp"), "mean")

    def __init__(self, dpo: DpoSettings) -> None:
        self.dpo = dpo

    def __call__(self, batch: Batch, head: Head) -> Mapping[str, Tensor]:
        rows, targets = batch.rows, batch.targets if batch.row_targets is None else batch.row_targets
        logp, _ = head.log_probs(targets, rows=rows)
        columns = {name: c if rows is None else c.index_select(0, rows) for name, c in batch.columns.items()}
        assert batch.cu_seqlens is not None
        num_segments = len(batch.cu_seqlens)
        place = torch.arange(batch.tokens.numel(), device=logp.device) if rows is None else rows
        segment = torch.searchsorted(batch.cu_seqlens, place.int(), right=True) - 1
        trained = (targets != NOT_TRAINED).float()

        def total(values: Tensor) -> Tensor:
            """The sum over the trained tokens of each segment."""
            return values.new_zeros(num_segments).index_add(0, segment, values * trained)

        score = logp if self.dpo.loss == "simpo" else logp - columns[REFERENCE]
        sums, said = total(score), total(logp.detach())
        if self.dpo.loss != "sigmoid":
            sums = sums / total(torch.ones_like(trained)).clamp(min=1.0)
        # A chosen answer is followed by its rejected one; nothing else has both a sign above 0 and a neighbour.
        is_pair = (total(columns[ANSWER]) > 0)[:-1].float()
        ahead = sums[:-1] - sums[1:]
        losses = preference_loss(ahead, self.dpo)
        return {
            LOSS: (losses * is_pair).sum(),
            "accuracy": ((ahead.detach() > 0).float() * is_pair).sum(),
            "margin": (self.dpo.beta * ahead.detach() * is_pair).sum(),
            "chosen_logp": (said[:-1] * is_pair).sum(),
            "rejected_logp": (said[1:] * is_pair).sum(),
        }


def preference_loss(ahead: Tensor, dpo: DpoSettings) -> Tensor:
    """The loss of each pair, by how far the chosen answer is ahead of the rejected one."""
    if dpo.loss == "ipo":
        return (ahead - 1 / (2 * dpo.beta)) ** 2
    return -F.logsigmoid(dpo.beta * ahead - (dpo.margin if dpo.loss == "simpo" else 0.0))


@dataclass(frozen=True)
class Pairs:
    """A stream whose batches count pairs."""

    stream: Steps

    @property
    def steps_per_epoch(self) -> float:
        steps = self.stream.steps_per_epoch
        assert steps is not None
        return steps

    def micro_batches(self, step: int, *, rank: int = 0, world: int = 1, micro_batch: int) -> list[Batch]:
        found = self.stream.micro_batches(step, rank=rank, world=world, micro_batch=micro_batch)
        return [replace(batch, num_target_tokens=int(batch.columns[PAIR].sum())) for batch in found]


def with_columns(examples: Examples) -> Examples:
    """Pairs with the columns of this recipe; the reference's are zero until they are known."""
    sign = np.repeat(np.tile(np.array([1.0, -1.0], np.float32), len(examples) // 2), examples.lengths)
    pair = np.zeros(len(examples.tokens), np.float32)
    pair[examples.ends[::2] - 1] = 1.0  # the last token of a chosen answer
    return replace(examples, columns={ANSWER: sign, PAIR: pair, REFERENCE: np.zeros_like(pair)})


def with_reference(
    settings: Settings, plan: Plan, engine: Engine, ranks: Ranks, **parts: Examples
) -> dict[str, Examples]:
    """The examples with the log-probabilities of the initial model, each rank computing its share of them."""
    model = _initial(settings, plan, engine)
    found = {}
    for name, examples in parts.items():
        values = _log_probs(examples, settings, engine, ranks, model, micro_batch=plan.decisions.micro_batch)
        found[name] = replace(examples, columns={**examples.columns, REFERENCE: values})
    return found


def _initial(settings: Settings, plan: Plan, engine: Engine) -> Model:
    if plan.job.adapters is not None and settings.lora.adapter is None and not plan.job.shape.foreign:
        return reference_of(settings, plan, engine)
    # It is needed only before the first step, when the optimizer's state takes no memory yet.
    return build_model(settings, plan, engine.active, note=lambda _: None).requires_grad_(False)


def _log_probs(
    examples: Examples, settings: Settings, engine: Engine, ranks: Ranks, model: Model, *, micro_batch: int
) -> NDArray[np.float32]:
    """One for each token; 0 where a token is not learnt."""
    place = np.arange(len(examples.tokens), dtype=np.int64)
    packed = Packed(
        replace(examples, columns={"place": place}),
        sequence_length=settings.data.sequence_length,
        batch_sequences=1,
        seed=settings.seed,
        shuffle=False,
        unit=2,
    )
    found = torch.zeros(len(place), dtype=torch.float32)
    for number, batch in enumerate(packed.batches(micro_batch)):
        if number % ranks.world != ranks.rank:
            continue
        logp = engine.measure(batch, lambda batch, head: head.log_probs(batch.targets)[0], model=model).cpu()
        learnt = batch.targets != NOT_TRAINED
        found[batch.columns["place"][learnt]] = logp[learnt]
    return ranks.sum_(found.to(engine.active.device)).cpu().numpy()
