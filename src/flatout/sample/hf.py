"""A sampler by `generate` of transformers: for models that our decoder cannot run, and to compare ours with.

transformers runs the model, keeps its cache and pads on the left. Tokens are sampled here, so that a sample is the same
function of (seed, prompt, sample, position) as everywhere. A batch runs until its last row ends.

Legend: R rows of a batch, T tokens of its longest, V vocabulary.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatout.data.tokenizer import Tokenizer
from flatout.errors import UsageError
from flatout.kernels.uniform import uniform
from flatout.sample.draw import draw, numbered, row_key
from flatout.sample.plain import ended
from flatout.sample.request import Completion, Keys, Prompt, Sampling, Unfinished

ROWS = {"cpu": 16, "cuda": 64}
# Tokens whose logits exist at once while likelihoods are summed.
LOGIT_TOKENS = 2048


@dataclass(kw_only=True)
class _Row(Unfinished):
    read: Prompt


class HuggingFace:
    """A `Sampler` on any causal language model of transformers, on its device."""

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        window: int,
        compute_dtype: torch.dtype | None = None,
        rows: int | None = None,
    ) -> None:
        """`compute_dtype` is for weights in another type, as during training."""
        if not model.can_generate():
            raise UsageError(
                f"transformers reports that {type(model).__name__} cannot generate: evaluate another model"
            )
        self.model, self.tokenizer, self.window = model, tokenizer, window
        self.compute_dtype = compute_dtype or model.dtype
        adapters = (weight.dtype for name, weight in model.named_parameters() if ".lora_" in name)
        self._mixed = {model.dtype, *adapters} != {self.compute_dtype}
        self._rows = rows or ROWS.get(model.device.type, ROWS["cpu"])

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: Sampling, samples: int = 1, first: int = 0, keys: Keys = None
    ) -> Iterator[Completion]:
        waiting: list[_Row] = []
        for i, sample, key in numbered(len(prompts), samples, first=first, keys=keys, seed=sampling.seed):
            row = self._row(i, sample, key, prompts[i], sampling)
            if row.status:
                yield row.done()
            else:
                waiting.append(row)
        for at in range(0, len(waiting), self._rows):
            batch = waiting[at : at + self._rows]
            self._write(batch, sampling)
            yield from (row.done() for row in batch)

    def stream(self, prompt: Prompt, *, sampling: Sampling) -> Iterator[int]:
        """`generate` returns nothing before its end, so a thread runs it and passes on each token."""
        row = self._row(0, 0, row_key(sampling.seed, 0, 0), prompt, sampling)
        if row.status:
            return
        tokens: queue.Queue[int | BaseException | None] = queue.Queue()

        def work() -> None:
            try:
                self._write([row], sampling, tell=tokens.put)
                tokens.put(None)
            except BaseException as error:  # raised in the caller's thread
                tokens.put(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            while (token := tokens.get()) is not None:
                if isinstance(token, BaseException):
                    raise token
                yield token
        finally:
            row.status = row.status or "stopped"  # the caller has stopped iterating
            thread.join()

    def likelihoods(self, items: Sequence[tuple[Prompt, Sequence[Prompt]]]) -> list[list[float]]:
        whole = [([*prompt, *more], len(more)) for prompt, many in items for more in many]
        found = iter(self.surprisals([sequence for sequence, _ in whole]))
        sums = iter([-sum(next(found)[-length:]) for _, length in whole])
        return [[next(sums) for _ in many] for _, many in items]

    def surprisals(self, sequences: Sequence[Prompt]) -> Iterator[list[float]]:
        for batch in _batches(sequences, tokens=LOGIT_TOKENS):
            yield from self._surprisals(batch)

    def _surprisals(self, sequences: Sequence[Prompt]) -> list[list[float]]:
        """Padded on the right, because no token of a causal model attends to later ones."""
        lengths = [len(sequence) - 1 for sequence in sequences]
        tokens_RT = torch.zeros(len(sequences), max(lengths), dtype=torch.long)
        for row_T, sequence, length in zip(tokens_RT, sequences, lengths, strict=True):
            row_T[:length] = torch.tensor(sequence[:-1])
        mask_RT = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
        device = self.model.device
        with self._inference():
            answer = self.model(
                input_ids=tokens_RT.to(device), attention_mask=mask_RT.long().to(device), use_cache=False
            )
            found = []
            for logits_TV, sequence, length in zip(answer.logits, sequences, lengths, strict=True):
                targets_T = torch.tensor(sequence[1:], device=device)
                logprobs_TV = logits_TV[:length].float().log_softmax(-1)
                found.append((-logprobs_TV.gather(-1, targets_T[:, None])[:, 0]).tolist())
        return found

    def _row(self, prompt: int, sample: int, key: int, read: Prompt, sampling: Sampling) -> _Row:
        status = ended(self.tokenizer, read, (), sampling, window=self.window)
        return _Row(prompt=prompt, sample=sample, key=key, read=read, status=status)

    def _write(self, rows: Sequence[_Row], sampling: Sampling, *, tell: Callable[[int], None] | None = None) -> None:
        """Generates all rows to their ends. Ended rows run on, ignored, until the last one ends."""
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        longest, device = max(len(row.read) for row in rows), self.model.device
        tokens_RT = torch.zeros(len(rows), longest, dtype=torch.long)
        mask_RT = torch.zeros(len(rows), longest, dtype=torch.long)
        for row, row_T, seen_T in zip(rows, tokens_RT, mask_RT, strict=True):
            row_T[longest - len(row.read) :] = torch.tensor(row.read)
            seen_T[longest - len(row.read) :] = 1
        keys_R = torch.tensor([row.key for row in rows], device=device)

        def extend(_: Tensor, logits_RV: Tensor) -> Tensor:
            """Samples the tokens, stores them, and forces `generate` to use them."""
            place_R = torch.full_like(keys_R, max(len(row.ids) for row in rows))
            known_RV = logits_RV[:, : self.tokenizer.vocab_size]
            chosen_R = draw(known_RV, uniform(keys_R, place_R), place_R, sampling)
            logprobs_R = logits_RV.log_softmax(-1).gather(-1, chosen_R[:, None])[:, 0]
            for row, token, logprob in zip(rows, chosen_R.tolist(), logprobs_R.tolist(), strict=True):
                if row.status is None:
                    row.ids.append(token)
                    row.logprobs.append(logprob)
                    row.status = ended(self.tokenizer, row.read, row.ids, sampling, window=self.window)
                    if tell is not None:
                        tell(token)
            return torch.full_like(logits_RV, float("-inf")).scatter(-1, chosen_R[:, None], 0.0)

        def over(tokens_RT: Tensor, _: Tensor, **__: Any) -> Tensor:
            return torch.tensor([row.status is not None for row in rows], device=tokens_RT.device)

        with self._inference():
            self.model.generate(
                input_ids=tokens_RT.to(device),
                attention_mask=mask_RT.to(device),
                generation_config=GenerationConfig(max_new_tokens=sampling.max_tokens, do_sample=False, pad_token_id=0),
                logits_processor=LogitsProcessorList([extend]),
                stopping_criteria=StoppingCriteriaList([over]),
            )

    @contextmanager
    def _inference(self) -> Iterator[None]:
        """Inference mode: without training behaviour, and without the model's own generation settings."""
        from transformers import GenerationConfig

        model, dtype = self.model, self.compute_dtype
        training, habits = model.training, model.generation_config
        model.eval()
        model.generation_config = GenerationConfig()
        try:
            with torch.no_grad(), torch.autocast(model.device.type, dtype=dtype, enabled=self._mixed):
                yield
        finally:
            model.train(training)
            model.generation_config = habits


def _batches(sequences: Sequence[Prompt], *, tokens: int) -> Iterator[list[Prompt]]:
    """Batches in order, each of at most this many tokens, including padding."""
    batch: list[Prompt] = []
    for sequence in sequences:
        if batch and max(map(len, [*batch, sequence])) * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(sequence)
    if batch:
        yield batch
