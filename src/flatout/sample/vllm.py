"""A sampler on vLLM, if it is installed: many prompts at once on a dedicated GPU.

Its samples are seeded by (seed, prompt, sample) and differ from those of our own samplers; its log-probabilities are
raw, at temperature 1, without top-k or top-p. It returns whole answers only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from flatout.data.tokenizer import Tokenizer
from flatout.errors import EnvironmentLacks
from flatout.sample.draw import numbered
from flatout.sample.request import Completion, Keys, Prompt, Sampling, Status, Watch, unwatched

# vLLM adds a token to every sequence that it scores, so this many positions are not available.
KEPT_FREE = 2
STATUS: dict[str, Status] = {"stop": "stopped", "length": "length"}


class Vllm:
    """A `Sampler` on the weights of a Hugging Face folder, with a PEFT adapter on them if one is given."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        window: int,
        vocab: int,
        dtype: str = "auto",
        adapter: Path | None = None,
        rank: int | None = None,
        rows: int | None = None,
        memory: float | None = None,
        follow: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
        watch: Watch = unwatched,
    ) -> None:
        """`vocab` is the model's, `rank` the adapter's, `memory` the share of the GPU's memory that vLLM may take.

        `follow` returns the weights of a model that is being trained, by their names in the folder; they are loaded
        before each use. The engine then runs in this process.
        """
        if follow is not None:
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        vllm = imported()
        self.tokenizer, self.window = tokenizer, window - KEPT_FREE
        lora = {} if adapter is None else {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
        self._llm = vllm.LLM(
            model=str(folder),
            tokenizer=str(folder),
            dtype=dtype,
            max_model_len=window,
            logprobs_mode="raw_logprobs",
            **lora,
            **({} if rows is None else {"max_num_seqs": rows}),
            **({} if memory is None else {"gpu_memory_utilization": memory}),
        )
        self._follow, self._watch = follow, watch
        self._params = vllm.SamplingParams
        self._adapter = None if adapter is None else _request(adapter)
        # A head may be wider than the tokenizer: ids without text are never sampled.
        known = tokenizer.vocab_size
        self._allowed = list(range(known)) if known < vocab else None

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: Sampling, samples: int = 1, first: int = 0, keys: Keys = None
    ) -> Iterator[Completion]:
        asked: list[tuple[int, int]] = []
        params: list[Any] = []
        for i, sample, key in numbered(len(prompts), samples, first=first, keys=keys, seed=sampling.seed):
            if not 0 < len(prompts[i]) < self.window:
                yield Completion(prompt=i, sample=sample, ids=(), logprobs=(), status="too_long")
                continue
            asked.append((i, sample))
            params.append(self._sampling(sampling, key=key, length=len(prompts[i])))
        for (i, sample), answer in zip(asked, self._ask([prompts[i] for i, _ in asked], params), strict=True):
            [output] = answer.outputs
            ids = tuple(output.token_ids)
            logprobs = tuple(float(places[token].logprob) for token, places in zip(ids, output.logprobs, strict=True))
            status = STATUS[output.finish_reason]
            yield Completion(prompt=i, sample=sample, ids=ids, logprobs=logprobs, status=status)

    def stream(self, prompt: Prompt, *, sampling: Sampling) -> Iterator[int]:
        [completion] = self.generate([prompt], sampling=sampling)
        yield from completion.ids

    def likelihoods(self, items: Sequence[tuple[Prompt, Sequence[Prompt]]]) -> list[list[float]]:
        whole = [([*prompt, *more], len(more)) for prompt, many in items for more in many]
        found = iter(self._surprisals([sequence for sequence, _ in whole]))
        sums = iter([-sum(next(found)[-length:]) for _, length in whole])
        return [[next(sums) for _ in many] for _, many in items]

    def surprisals(self, sequences: Sequence[Prompt]) -> Iterator[list[float]]:
        return iter(self._surprisals(sequences))

    def _surprisals(self, sequences: Sequence[Prompt]) -> list[list[float]]:
        params = self._params(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        found = []
        for sequence, answer in zip(sequences, self._ask(sequences, [params] * len(sequences)), strict=True):
            places = list(answer.prompt_logprobs)[1:]  # the first token has no log-probability
            found.append([-float(place[token].logprob) for token, place in zip(sequence[1:], places, strict=True)])
        return found

    def _ask(self, prompts: Sequence[Prompt], params: Sequence[Any]) -> list[Any]:
        if not prompts:
            return []
        if self._follow is not None:
            self._watch("sync")
            self._refresh(self._follow())
            self._watch("generate")
        answers: list[Any] = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            list(params),
            use_tqdm=False,
            lora_request=self._adapter,
        )
        return answers

    def _refresh(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads weights into the running engine. What it cached of earlier prompts came from the old ones."""
        worker = self._llm.llm_engine.model_executor.driver_worker
        worker.model_runner.model.load_weights(weights)
        self._llm.reset_prefix_cache()

    def _sampling(self, sampling: Sampling, *, key: int, length: int) -> Any:
        most = min(sampling.max_tokens, self.window - length)
        return self._params(
            n=1,
            max_tokens=most,
            min_tokens=min(sampling.min_tokens, most),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=key % 2**63,
            # Only the requested stops end an answer, and their tokens stay in.
            ignore_eos=True,
            stop_token_ids=sorted(sampling.stop_ids),
            stop=list(sampling.stop_texts) or None,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            logprobs=0,
            allowed_token_ids=self._allowed,
        )


def imported() -> Any:
    """Imports vLLM, or raises with how to install it."""
    try:
        import vllm
    except ImportError:
        raise EnvironmentLacks(
            "vLLM is not installed: pip install vllm in a separate environment (it brings its own torch), or use "
            "another sampler: leave out --backend vllm or rl.sampler: vllm"
        ) from None
    return vllm


def _request(adapter: Path) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, str(adapter))
