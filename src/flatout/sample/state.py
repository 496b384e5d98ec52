"""The state of each concurrent row on the device, and its update by a sampled token.

Legend: R rows, S tokens a row may generate, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from flatout.kernels.uniform import uniform
from flatout.sample.draw import draw
from flatout.sample.request import Sampling


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of rows by their places. Rows that have ended, or never started, do not change."""

    key: Tensor
    token: Tensor  # the newest, not yet in the KV store
    position: Tensor  # of that token
    count: Tensor  # tokens generated
    alive: Tensor  # 1, or 0
    limit: Tensor  # the most tokens it may generate
    ids_RS: Tensor
    logprobs_RS: Tensor
    places: Tensor  # 0, 1, 2, …

    @classmethod
    def make(cls, *, rows: int, tokens: int, device: torch.device) -> State:
        def zeros(*size: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        numbers = {name: zeros(rows) for name in ("key", "token", "position", "count", "alive", "limit")}
        return cls(
            **numbers,
            ids_RS=zeros(rows, tokens),
            logprobs_RS=zeros(rows, tokens, dtype=torch.float32),
            places=torch.arange(rows, device=device),
        )

    @property
    def rows(self) -> int:
        return self.key.shape[0]

    @property
    def tokens(self) -> int:
        return self.ids_RS.shape[1]

    def begin(self, places: Tensor, *, keys: Sequence[int], lengths: Sequence[int], limits: Sequence[int]) -> None:
        """Starts rows whose prompts of these lengths were prefilled, and whose first token is sampled next."""
        numbers = torch.tensor([keys, lengths, limits], device=self.key.device)
        self.key[places], self.position[places], self.limit[places] = numbers[0], numbers[1] - 1, numbers[2]
        self.count[places] = 0
        self.alive[places] = 1

    def end(self, places: Sequence[int]) -> None:
        self.alive[list(places)] = 0

    def move(self, source: Sequence[int], to: Sequence[int]) -> None:
        for name in (field.name for field in fields(self) if field.name != "places"):
            values = getattr(self, name)
            values[list(to)] = values[list(source)]
        self.end(source)


@dataclass(frozen=True, kw_only=True)
class TokenSampler:
    """Samples tokens with the requested settings, by one kernel or by plain operations."""

    sampling: Sampling
    known: int  # a head may be wider than the tokenizer: ids without text are never sampled
    stops_K: Tensor
    kernel: bool  # use the kernel

    @classmethod
    def of(cls, sampling: Sampling, *, known: int, kernel: bool, device: torch.device) -> TokenSampler:
        num_stops = len(sampling.stop_ids)
        # Padded to a power of two with -1, which is no token, for the kernel.
        unused = [-1] * ((1 << num_stops.bit_length()) - num_stops)
        stops = torch.tensor([*sorted(sampling.stop_ids), *unused], device=device)
        return cls(sampling=sampling, known=known, stops_K=stops, kernel=kernel)

    def advance(self, state: State, logits_RV: Tensor, places_R: Tensor) -> None:
        """Samples a token for each of these rows and updates the state; ended rows do not change."""
        if self.kernel:
            self._by_kernel(state, logits_RV, places_R)
            return
        uniform_R = uniform(state.key[places_R], state.count[places_R])
        logits_RV = logits_RV.float()
        count_R, alive_R = state.count[places_R], state.alive[places_R]
        chosen_R = draw(logits_RV[:, : self.known], uniform_R, count_R, self.sampling)
        logprobs_R = logits_RV.gather(-1, chosen_R[:, None])[:, 0] - logits_RV.logsumexp(-1)
        going = alive_R.bool()
        rows, at = places_R[going], count_R[going]
        state.ids_RS[rows, at], state.logprobs_RS[rows, at] = chosen_R[going], logprobs_R[going]
        state.token[rows] = chosen_R[going]
        state.count[places_R] += alive_R
        state.position[places_R] += alive_R
        more_R = (count_R + alive_R < state.limit[places_R]) & ~torch.isin(chosen_R, self.stops_K)
        state.alive[places_R] = alive_R * more_R

    def _by_kernel(self, state: State, logits_RV: Tensor, places_R: Tensor) -> None:
        from flatout.kernels.draw import draw_

        asked = self.sampling
        rows = (state.token, state.position, state.count, state.alive, state.limit, state.ids_RS, state.logprobs_RS)
        draw_(
            logits_RV,
            state.key,
            places_R,
            self.stops_K,
            rows,
            known=min(self.known, logits_RV.shape[1]),
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            min_tokens=asked.min_tokens,
        )
