"""The interface of all samplers: requests, completions, and the `Sampler` protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from flatout.errors import UsageError

# stopped: by a stop token or text; length: at max_tokens or the window; too_long: the prompt fills the window.
Status = Literal["stopped", "length", "too_long"]
Prompt = Sequence[int]
# Keys for the random numbers of prompts; None: their indices in the call.
Keys = Sequence[int] | None
# Called with `sync` before a sampler reads the weights of a model in training, and with `generate` after that.
Watch = Callable[[str], None]


def unwatched(phase: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Temperature 0 takes the likeliest token. `stop_texts` end a completion as soon as they appear; nothing ends it
    before `min_tokens`."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    stop_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
    seed: int = 0
    logprobs: bool = True  # False: a sampler may leave out the log-probabilities, where they cost much

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"max tokens {self.max_tokens} must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise UsageError(f"min tokens {self.min_tokens} must be from 0 to max tokens, {self.max_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature {self.temperature:g} must be 0 (the likeliest token) or above")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p {self.top_p:g} must be above 0 and at most 1")
        if self.top_k < 0:
            raise UsageError(f"top-k {self.top_k} must be 0 (all tokens) or above")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A completion of a prompt, including its stop token. Log-probabilities are the model's own, at temperature 1,
    without top-k or top-p; empty where a sampler left them out."""

    prompt: int  # index in the call
    sample: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    status: Status


@dataclass(kw_only=True)
class Unfinished:
    """An unfinished completion."""

    prompt: int
    sample: int
    key: int  # of its random numbers
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    status: Status | None = None

    def done(self) -> Completion:
        assert self.status is not None
        return Completion(
            prompt=self.prompt,
            sample=self.sample,
            ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            status=self.status,
        )


class Sampler(Protocol):
    """Random numbers depend on (seed, key of the prompt, sample, position), so they do not depend on the batch."""

    @property
    def window(self) -> int:
        """Tokens that prompt and completion may have together."""
        ...

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: Sampling, samples: int = 1, first: int = 0, keys: Keys = None
    ) -> Iterator[Completion]:
        """Yields completions as they finish: of each prompt, samples `first` to `first + samples - 1`."""
        ...

    def stream(self, prompt: Prompt, *, sampling: Sampling) -> Iterator[int]:
        """Yields the tokens of one completion as they are generated."""
        ...

    def likelihoods(self, items: Sequence[tuple[Prompt, Sequence[Prompt]]]) -> list[list[float]]:
        """For each prompt, the log-probability of each of its continuations."""
        ...

    def surprisals(self, sequences: Sequence[Prompt]) -> Iterator[list[float]]:
        """Minus the log-probability of each token after the first, sequence by sequence."""
        ...
