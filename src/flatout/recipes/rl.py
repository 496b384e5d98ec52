"""Reinforcement learning from verifiable rewards: `flatout train` with `recipe: rl`.

The weights that are being trained answer questions, the answers are graded, and what did better than expected becomes
more likely: generate and grade in `rollouts`, compare in `experience`, update by the objective below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatout import policy
from flatout.config.settings import RlSettings, Settings
from flatout.data.stream import NOT_TRAINED, Batch
from flatout.data.tokenizer import Tokenizer, load_tokenizer
from flatout.engine.conflicts import Combined, is_method
from flatout.engine.objective import LOSS, Head, Rule
from flatout.errors import UsageError
from flatout.recipes.experience import ADVANTAGE, OLD_LOGP, OLD_VALUE, REFERENCE_LOGP, RETURN, SAMPLER_LOGP, WEIGHT
from flatout.recipes.loop import train
from flatout.recipes.material import Material
from flatout.recipes.rollouts import Rollouts
from flatout.recipes.session import identity_of
from flatout.recipes.sft import tokenizer_of
from flatout.record import Outcome, Sink


def run(settings: Settings, *, folder: Path, resume: bool = False, sinks: Sequence[Sink] = ()) -> Outcome:
    return train(settings, rollouts, folder=folder, resume=resume, sinks=sinks)


@contextmanager
def rollouts(settings: Settings) -> Iterator[Material]:
    tokenizer = load_tokenizer(tokenizer_of(settings), documents=None, cache=Path())
    method = settings.mtl.method
    yield Material(
        facts=Asked(settings=settings, tokenizer=tokenizer),
        source=Rollouts(settings, tokenizer),
        held_out=lambda ranks, micro_batch: [],
        objective=PolicyGradient(settings.rl, temperature=settings.sample.temperature),
        combine=Combined(tasks=settings.rl.tasks, seed=settings.seed, method=method) if is_method(method) else None,
        critic=settings.rl.critic if policy.ALGORITHMS[settings.rl.algorithm].estimator is None else None,
    )


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
            values = head.values(rows=rows)
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


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a run by rollouts learns from: the questions of its tasks."""

    settings: Settings
    tokenizer: Tokenizer

    @property
    def fingerprint(self) -> str:
        """Of everything that the rollouts of a phase depend on besides the weights."""
        settings = self.settings
        sections = {name: asdict(getattr(settings, name)) for name in ("rl", "mtl", "sample")}
        return identity_of(**sections, tokenizer=self.tokenizer.fingerprint, steps=settings.train.steps)

    @property
    def valid(self) -> Asked:
        return self

    def describe(self) -> dict[str, Any]:
        rl = self.settings.rl
        return {
            "source": f"{', '.join(rl.tasks)}: {rl.prompts} prompts x {rl.samples} completions a phase",
            "tokenizer": self.tokenizer.name,
            "vocab": self.tokenizer.vocab_size,
            "train_tokens": 0,
            "valid_tokens": 0,
            "left_out": "",
        }

    def summary(self) -> str:
        return ""

    def check_vocab(self, vocab: int) -> None:
        if self.tokenizer.vocab_size > vocab:
            raise UsageError(
                f"the tokenizer has {self.tokenizer.vocab_size} ids and the model {vocab}: use the model's tokenizer"
            )
