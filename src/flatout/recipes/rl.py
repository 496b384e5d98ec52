"""Reinforcement learning from verifiable rewards: `flatout train` with `recipe: rl`.

The weights that are being trained answer questions, the answers are graded, and what did better than expected becomes
more likely: generate and grade in `rollouts`, compare in `experience`, update by the objective in `policy_gradient`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flatout import policy
from flatout.config.settings import Settings
from flatout.data.tokenizer import Tokenizer, load_tokenizer
from flatout.engine.conflicts import Combined, is_method
from flatout.engine.objective import ACTOR
from flatout.errors import UsageError
from flatout.recipes.loop import train
from flatout.recipes.material import Material
from flatout.recipes.policy_gradient import PolicyGradient
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
    source = Rollouts(settings, tokenizer)
    yield Material(
        facts=Asked(settings=settings, tokenizer=tokenizer),
        source=source,
        prompt_tokens=source.prompt_tokens,
        held_out=lambda ranks, micro_batch: [],
        objective=PolicyGradient(settings.rl, temperature=settings.sample.temperature),
        combine=Combined(tasks=settings.rl.tasks, seed=settings.seed, method=method) if is_method(method) else None,
        role=ACTOR,
        critic=settings.rl.critic if policy.ALGORITHMS[settings.rl.algorithm].estimator is None else None,
    )


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a run by rollouts learns from: the questions of its tasks."""

    settings: Settings
    tokenizer: Tokenizer

    @property
    def fingerprint(self) -> str:
        """Of everything that the rollouts of a phase depend on besides the weights."""
        settings = self.settings
        length = settings.train.steps or f"{settings.train.epochs} epochs"
        sections = {name: asdict(getattr(settings, name)) for name in ("rl", "mtl", "sample")}
        return identity_of(**sections, tokenizer=self.tokenizer.fingerprint, steps=length)

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
