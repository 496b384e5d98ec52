"""Reinforcement learning from verifiable rewards: `flatout train` with `recipe: rl`.

The weights that are being trained answer questions, the answers are graded, each is compared with the other answers to
its question, and what was better than they is made more likely. Phases of rollouts are in `rollouts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from flatout import policy
from flatout.config.settings import RlSettings, Settings
from flatout.data.stream import NOT_TRAINED, Batch
from flatout.data.tokenizer import Tokenizer, load_tokenizer
from flatout.engine.conflicts import PCGrad
from flatout.engine.objective import LOSS, Head, Rule
from flatout.errors import UsageError
from flatout.recipes.loop import train
from flatout.recipes.material import Material
from flatout.recipes.rollouts import ADVANTAGE, OLD_LOGP, WEIGHT, Rollouts
from flatout.recipes.session import identity_of
from flatout.recipes.sft import tokenizer_of
from flatout.record import Outcome, Sink


def run(settings: Settings, *, folder: Path, resume: bool = False, sinks: Sequence[Sink] = ()) -> Outcome:
    return train(settings, rollouts, folder=folder, resume=resume, sinks=sinks)


@contextmanager
def rollouts(settings: Settings) -> Iterator[Material]:
    tokenizer = load_tokenizer(tokenizer_of(settings), documents=None, cache=Path())
    source = Rollouts(settings, tokenizer)
    yield Material(
        facts=Asked(settings=settings, tokenizer=tokenizer),
        source=source,
        held_out=lambda ranks, micro_batch: [],
        objective=PolicyGradient(settings.rl, temperature=settings.sample.temperature),
        combine=PCGrad(tasks=settings.rl.tasks, seed=settings.seed) if settings.rl.method == "pcgrad" else None,
        longest=settings.data.sequence_length,
    )


class PolicyGradient:
    """The clipped policy-gradient loss of the tokens that were generated."""

    metrics: Mapping[str, Rule] = {"entropy": "mean", "clipped": "mean", "kl": "mean"}

    def __init__(self, rl: RlSettings, *, temperature: float) -> None:
        self.rl, self.temperature = rl, temperature

    def __call__(self, batch: Batch, head: Head) -> Mapping[str, Tensor]:
        rows, targets = batch.rows, batch.targets if batch.row_targets is None else batch.row_targets
        logp, entropy = head.log_probs(targets, rows=rows, temperature=self.temperature)
        advantage, weight = self._column(batch, ADVANTAGE), self._column(batch, WEIGHT)
        trained = (targets != NOT_TRAINED).float()
        old = self._column(batch, OLD_LOGP) if OLD_LOGP in batch.columns else logp.detach()
        ratio = policy.log_ratio(logp, old)
        loss, clipped = policy.policy_loss(
            ratio,
            advantage,
            clip_low=self.rl.clip_low,
            clip_high=self.rl.clip_low if self.rl.clip_high is None else self.rl.clip_high,
            dual_clip=self.rl.dual_clip,
        )
        return {
            LOSS: (loss * weight * trained).sum(),
            "entropy": entropy.sum(),
            "clipped": (clipped * trained).sum(),
            "kl": (policy.kl(old, logp, estimator="k3") * trained).sum(),
        }

    @staticmethod
    def _column(batch: Batch, name: str) -> Tensor:
        column = batch.columns[name]
        return column if batch.rows is None else column.index_select(0, batch.rows)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a run by rollouts learns from: the questions of its tasks."""

    settings: Settings
    tokenizer: Tokenizer

    @property
    def fingerprint(self) -> str:
        rl = self.settings.rl
        return identity_of(tasks=rl.tasks, prompts=rl.prompts, samples=rl.samples, tokenizer=self.tokenizer.fingerprint)

    @property
    def valid(self) -> Asked:
        return self

    def describe(self) -> dict[str, Any]:
        rl = self.settings.rl
        return {
            "source": f"{', '.join(rl.tasks)}: {rl.prompts} prompts x {rl.samples} samples a phase",
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
