"""A sampler on a bank of adapters: the router chooses one for each prompt, and the answer is generated with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from flatout.data.tokenizer import Tokenizer
from flatout.model import Decoder, Router, lora
from flatout.model.attention import over_documents
from flatout.model.router import prompt_states
from flatout.sample.cache import READ_TOKENS
from flatout.sample.generate import Generator
from flatout.sample.request import Completion, Keys, Prompt, Sampling

# Of a prompt: the number of the adapter that was chosen, and its probability.
Choice = tuple[int, float]


class RoutedSampler:
    """A `Sampler`. The adapters have a generator each, made when the first prompt is sent to it."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, *, rows: int | None = None) -> None:
        assert isinstance(model.router, Router), "a bank without a router is sampled one adapter at a time"
        self.window, self.tokenizer = model.shape.positions, tokenizer
        self.names = model.router.names
        self.chosen: list[Choice] = []  # of the prompts of the last call
        self._model, self._rows = model, rows
        self._generators: dict[int, Generator] = {}

    @torch.no_grad()
    def route(self, prompts: Sequence[Prompt]) -> list[Choice]:
        """The most likely adapter for each prompt; the longest possible part of a prompt that is too long decides."""
        router, device = self._model.router, self._model.embedding.device
        assert isinstance(router, Router)
        found: list[Choice] = []
        for several in _parts([list(prompt)[: self.window] for prompt in prompts]):
            lengths = [len(prompt) for prompt in several]
            tokens = torch.tensor([token for prompt in several for token in prompt], device=device)
            positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
            ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
            attend = over_documents(self._model.shape, ends, tokens=len(tokens), longest=max(lengths))
            whole = torch.ones(len(tokens), device=device)
            logits_DE = router(prompt_states(self._model, tokens, positions, attend, whole, ends))
            sure, which = (logits_DE / router.temperature).softmax(-1).max(-1)
            found += zip(which.tolist(), sure.tolist(), strict=True)
        return found

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: Sampling, samples: int = 1, first: int = 0, keys: Keys = None
    ) -> Iterator[Completion]:
        self.chosen = self.route(prompts)
        for which, members in self._groups():
            group = [prompts[i] for i in members]
            own = [i if keys is None else keys[i] for i in members]
            generator = self._generator(which)
            for done in generator.generate(group, sampling=sampling, samples=samples, first=first, keys=own):
                yield replace(done, prompt=members[done.prompt])

    def stream(self, prompt: Prompt, *, sampling: Sampling) -> Iterator[int]:
        self.chosen = self.route([prompt])
        yield from self._generator(self.chosen[0][0]).stream(prompt, sampling=sampling)

    def likelihoods(self, items: Sequence[tuple[Prompt, Sequence[Prompt]]]) -> list[list[float]]:
        self.chosen = self.route([prompt for prompt, _ in items])
        found: dict[int, list[float]] = {}
        for which, members in self._groups():
            sums = self._generator(which).likelihoods([items[i] for i in members])
            found |= dict(zip(members, sums, strict=True))
        return [found[i] for i in range(len(items))]

    def surprisals(self, sequences: Sequence[Prompt]) -> Iterator[list[float]]:
        for sequence in sequences:
            self.chosen = self.route([sequence])
            yield from self._generator(self.chosen[0][0]).surprisals([sequence])

    def _groups(self) -> Iterator[tuple[int, list[int]]]:
        """Each chosen adapter with the indices of its prompts."""
        for which in sorted({which for which, _ in self.chosen}):
            yield which, [i for i, (one, _) in enumerate(self.chosen) if one == which]

    def _generator(self, which: int) -> Generator:
        if which not in self._generators:
            one = lora.alone(self._model, which)
            self._generators[which] = Generator(one, self.tokenizer, rows=self._rows)
        return self._generators[which]


def _parts(prompts: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Prompts in order, as many at a time as fit a pass after padding."""
    part: list[list[int]] = []
    for prompt in prompts:
        longest = max(len(prompt), *(len(one) for one in part), 1)
        if part and longest * (len(part) + 1) > READ_TOKENS:
            yield part
            part = []
        part.append(prompt)
    if part:
        yield part
