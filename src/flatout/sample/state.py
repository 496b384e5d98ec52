"""What the device knows of each row in flight, and how a drawn token changes it.

Legend: R rows, S tokens a row may write, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from flatout.kernels.chance import uniform
from flatout.sample.draw import draw
from flatout.sample.request import Sampling


@dataclass(frozen=True, kw_only=True)
class State:
    """Rows by their places. One that has ended, or was never begun, stands still."""

    key: Tensor
    token: Tensor  # the newest, not yet read
    position: Tensor  # where it will be read
    count: Tensor  # tokens written
    alive: Tensor  # 1, or 0
    limit: Tensor  # most tokens it may write
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
        """Rows whose prompts of such lengths were read, and whose first token is drawn next."""
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
class Chance:
    """How tokens are drawn: what was asked for, and of how many tokens."""

    sampling: Sampling
    known: int  # a head may be wider than the tokenizer: what has no text is never drawn
    stops_K: Tensor
    kernel: bool  # in one kernel, or plainly

    @classmethod
    def of(cls, sampling: Sampling, *, known: int, kernel: bool, device: torch.device) -> Chance:
        num_stops = len(sampling.stop_ids)
        # To a power of two, as kernels like it; no token is -1.
        unused = [-1] * ((1 << num_stops.bit_length()) - num_stops)
        stops = torch.tensor([*sorted(sampling.stop_ids), *unused], device=device)
        return cls(sampling=sampling, known=known, stops_K=stops, kernel=kernel)

    def advance(self, state: State, logits_RV: Tensor, places_R: Tensor) -> None:
        """Draws a token for each of these rows and writes down what follows; those that have ended keep still."""
        if self.kernel:
            self._in_one(state, logits_RV, places_R)
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

    def _in_one(self, state: State, logits_RV: Tensor, places_R: Tensor) -> None:
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
