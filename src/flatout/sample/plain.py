"""The plain sampler, without a cache and one prompt at a time: the reference for the faster ones.

It needs only the logits after each token of a sequence, so it works with any model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from flatout.data.tokenizer import Tokenizer
from flatout.kernels.uniform import uniform
from flatout.model import Decoder
from flatout.model.attention import over_sequences
from flatout.sample.draw import draw, numbered, row_key
from flatout.sample.request import Completion, Keys, Prompt, Sampling, Status

# From the token ids of one sequence to the logits after each of them, [T] to [T, V].
Logits = Callable[[Tensor], Tensor]


def logits_of(model: Decoder) -> Logits:
    """The logits by a whole forward pass of our decoder."""

    def logits(tokens_T: Tensor) -> Tensor:
        tokens_T = tokens_T.to(model.embedding.device)
        positions_T = torch.arange(len(tokens_T), device=tokens_T.device)
        out: Tensor = model(
            tokens_T,
            positions_T,
            over_sequences(model.shape, batch=1),
            lambda hidden, weight: hidden @ weight.to(hidden.dtype).t(),
        )
        return out

    return logits


class Plain:
    """A `Sampler` over any model's logits."""

    def __init__(self, logits: Logits, tokenizer: Tokenizer, *, window: int) -> None:
        self.logits, self.tokenizer, self.window = logits, tokenizer, window

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: Sampling, samples: int = 1, first: int = 0, keys: Keys = None
    ) -> Iterator[Completion]:
        for i, sample, key in numbered(len(prompts), samples, first=first, keys=keys, seed=sampling.seed):
            drawn = list(self._drawn(prompts[i], key, sampling))
            ids, logprobs = tuple(token for token, _ in drawn), tuple(logprob for _, logprob in drawn)
            status = ended(self.tokenizer, prompts[i], ids, sampling, window=self.window)
            assert status is not None
            yield Completion(prompt=i, sample=sample, ids=ids, logprobs=logprobs, status=status)

    def stream(self, prompt: Prompt, *, sampling: Sampling) -> Iterator[int]:
        return (token for token, _ in self._drawn(prompt, row_key(sampling.seed, 0, 0), sampling))

    def likelihoods(self, items: Sequence[tuple[Prompt, Sequence[Prompt]]]) -> list[list[float]]:
        return [
            [-sum(self._surprisal([*prompt, *more])[-len(more) :]) for more in continuations]
            for prompt, continuations in items
        ]

    def surprisals(self, sequences: Sequence[Prompt]) -> Iterator[list[float]]:
        return (self._surprisal(sequence) for sequence in sequences)

    def _surprisal(self, sequence: Prompt) -> list[float]:
        with torch.no_grad():
            logprobs_TV = self.logits(torch.tensor(sequence[:-1])).float().cpu().log_softmax(-1)
        found: list[float] = (-logprobs_TV.gather(-1, torch.tensor(sequence[1:])[:, None])[:, 0]).tolist()
        return found

    def _drawn(self, prompt: Prompt, key: int, sampling: Sampling) -> Iterator[tuple[int, float]]:
        ids: list[int] = []
        while ended(self.tokenizer, prompt, ids, sampling, window=self.window) is None:
            with torch.no_grad():
                logits_V = self.logits(torch.tensor([*prompt, *ids]))[-1].float().cpu()
            place = torch.tensor([len(ids)])
            chance = uniform(torch.tensor([key]), place)
            token = int(draw(logits_V[None, : self.tokenizer.vocab_size], chance, place, sampling))
            ids.append(token)
            yield token, float(logits_V.log_softmax(-1)[token])


def ended(
    tokenizer: Tokenizer, prompt: Prompt, ids: Sequence[int], sampling: Sampling, *, window: int
) -> Status | None:
    """How a completion has ended; None while it is unfinished."""
    if not 0 < len(prompt) < window:
        return "too_long"
    text = tokenizer.decode(ids) if sampling.stop_texts and len(ids) >= sampling.min_tokens else ""
    if (ids and ids[-1] in sampling.stop_ids) or any(stop in text for stop in sampling.stop_texts):
        return "stopped"
    full = len(ids) >= sampling.max_tokens or len(prompt) + len(ids) >= window
    return "length" if full else None
