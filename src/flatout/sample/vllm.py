"""A sampler on vLLM, if it is installed: many prompts at once on a dedicated GPU.

Its samples are seeded by (seed, prompt, sample) and differ from those of our own samplers; its log-probabilities are
raw, at temperature 1, without top-k or top-p. It returns whole answers only. The limits are those of vLLM 0.24.
"""

from __future__ import annotations

import os
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from flatout.data.tokenizer import Tokenizer
from flatout.errors import EnvironmentLacks, RunFailed, UsageError, first_line
from flatout.sample.draw import row_key
from flatout.sample.request import Completion, Keys, Prompt, Sampling, Status, Watch, unwatched

# vLLM adds a token to every sequence that it scores, so this many positions are not available.
RESERVED = 2
STATUS: dict[str, Status] = {"stop": "stopped", "length": "length"}
# Per request, vLLM forbids at most so many ids, and delays at most so many stop ids for a minimum length.
MAX_FORBIDDEN, MAX_DELAYED_STOPS = 1024, 128
# vLLM raises lower temperatures to the first without a word, and refuses those above the second.
COLDEST, HOTTEST = 0.01, 2.0
# Below an error, vLLM reports every step of its start, and each kernel of ours that is compiled beside it; to stdout,
# which belongs to the command. A process started by `fork` cannot use CUDA after its parent.
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


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
        check_vocabulary(tokenizer, vocab=vocab)
        vllm = imported()
        self.tokenizer, self.window = tokenizer, window - RESERVED
        lora = {} if adapter is None else {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
        options: dict[str, Any] = {
            "model": str(folder),
            "tokenizer": str(folder),
            "dtype": dtype,
            "max_model_len": window,
            "logprobs_mode": "raw_logprobs",
            "generation_config": "vllm",  # the folder's own would delay its stop ids too, not only the requested ones
            "use_tqdm_on_load": False,
            **lora,
            **({} if rows is None else {"max_num_seqs": rows}),
            **({} if memory is None else {"gpu_memory_utilization": memory}),
        }
        shared_group = distributed.is_available() and distributed.is_initialized()
        with _starting(in_process=follow is not None):
            self._llm = vllm.LLM(**options)
        self._shut_down = weakref.finalize(self, _shut_down, self._llm, shared_group=shared_group)
        self._follow, self._watch = follow, watch
        self._params = vllm.SamplingParams
        self._adapter = None if adapter is None else _request(adapter)
        # A head may be wider than the tokenizer: ids without text are never sampled.
        self._bias = dict.fromkeys(range(tokenizer.vocab_size, vocab), float("-inf")) or None

    def close(self) -> None:
        """Ends the engine and frees its memory; so do the end of the process and of the last reference to this."""
        self._llm = None
        self._shut_down()

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: Sampling, samples: int = 1, first: int = 0, keys: Keys = None
    ) -> Iterator[Completion]:
        check_sampling(sampling)
        asked: list[int] = []
        params: list[Any] = []
        for i, prompt in enumerate(prompts):
            if 0 < len(prompt) < self.window:
                # vLLM seeds its n-th sample with seed + n, so later samples of a prompt continue its first ones.
                seed = row_key(sampling.seed, i if keys is None else keys[i], 0) % 2**62 + first
                asked.append(i)
                params.append(self._sampling(sampling, seed=seed, samples=samples, length=len(prompt)))
                continue
            for sample in range(first, first + samples):
                yield Completion(prompt=i, sample=sample, ids=(), logprobs=(), status="too_long")
        for i, answer in zip(asked, self._ask([prompts[i] for i in asked], params), strict=True):
            for sample in range(samples):
                # The likeliest answer is computed once.
                yield _completion(answer.outputs[sample % len(answer.outputs)], prompt=i, sample=first + sample)

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
        # Without a seed, vLLM would take one from numpy's global generator.
        params = self._params(
            max_tokens=1, temperature=0.0, seed=0, prompt_logprobs=0, flat_logprobs=True, detokenize=False
        )
        answers = self._ask(sequences, [params] * len(sequences))
        # The first token has no log-probability.
        return [[-logprob for logprob in _logprobs(answer.prompt_logprobs, skip=1)] for answer in answers]

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

    def _sampling(self, sampling: Sampling, *, seed: int, samples: int, length: int) -> Any:
        most = min(sampling.max_tokens, self.window - length)
        return self._params(
            n=samples if sampling.temperature else 1,
            max_tokens=most,
            min_tokens=min(sampling.min_tokens, most),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            # Only the requested stops end an answer, and their tokens stay in.
            ignore_eos=True,
            stop_token_ids=sorted(sampling.stop_ids),
            stop=list(sampling.stop_texts) or None,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            # Text and log-probabilities cost vLLM a Python call per token: it makes them only where they are needed.
            detokenize=bool(sampling.stop_texts),
            logprobs=0 if sampling.logprobs else None,
            flat_logprobs=True,
            logit_bias=self._bias,
        )


def check_vocabulary(tokenizer: Tokenizer, *, vocab: int) -> None:
    """Refuses a model with more ids beyond the tokenizer than vLLM can be told never to sample."""
    beyond = vocab - tokenizer.vocab_size
    if beyond > MAX_FORBIDDEN:
        raise UsageError(
            f"the model has {vocab:,} ids and its tokenizer {tokenizer.vocab_size:,}: vLLM can leave out at most "
            f"{MAX_FORBIDDEN:,} ids that have no text, not {beyond:,}; use another sampler (--backend flatout or hf, "
            "rl.sampler: flatout)"
        )


def check_sampling(sampling: Sampling) -> None:
    """Refuses what vLLM refuses, or would change without a word."""
    if sampling.temperature and not COLDEST <= sampling.temperature <= HOTTEST:
        raise UsageError(
            f"temperature {sampling.temperature:g}: vLLM takes 0, or {COLDEST:g} to {HOTTEST:g}; change it, or use "
            "another sampler (--backend flatout or hf, rl.sampler: flatout)"
        )
    # vLLM adds the tokenizer's EOS to the requested ones.
    if sampling.min_tokens and len(sampling.stop_ids) >= MAX_DELAYED_STOPS:
        raise UsageError(
            f"{len(sampling.stop_ids)} stop ids with a minimum length of {sampling.min_tokens} tokens: vLLM takes at "
            f"most {MAX_DELAYED_STOPS - 1} there; name fewer, leave out the minimum, or use another sampler (--backend "
            "flatout or hf, rl.sampler: flatout)"
        )


def imported() -> Any:
    """Imports vLLM, or raises with how to install it."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError:
        raise EnvironmentLacks(
            "vLLM is not installed: pip install vllm in a separate environment (it brings its own torch), or use "
            "another sampler: leave out --backend vllm or rl.sampler: vllm"
        ) from None
    return vllm


@contextmanager
def _starting(*, in_process: bool) -> Iterator[None]:
    """What an engine's start would change in this process stays as it was: random states, stdout, the environment."""
    with ExitStack() as stack:
        stack.enter_context(_stdout_to_stderr())
        stack.enter_context(_no_progress_bars())
        if in_process:
            stack.enter_context(_environment("VLLM_ENABLE_V1_MULTIPROCESSING", "0"))
            stack.enter_context(_random_states())
        try:
            yield
        except (ValueError, RuntimeError) as error:
            # Out of memory in this process is for the caller, who may try with fewer rows.
            if in_process and isinstance(error, RuntimeError):
                raise
            raise EnvironmentLacks(
                f"vLLM cannot start: {first_line(error)}; VLLM_LOGGING_LEVEL=INFO shows its log"
            ) from error


@contextmanager
def _random_states() -> Iterator[None]:
    """vLLM seeds the generators of the process that its worker runs in."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Of tqdm, in this process and in those that it starts."""
    from tqdm import tqdm

    shown = tqdm.__init__
    tqdm.__init__ = partialmethod(shown, disable=True)
    try:
        with _environment("TQDM_DISABLE", "1"):
            yield
    finally:
        tqdm.__init__ = shown


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Also for C libraries, and for the processes that are started meanwhile as long as they live."""
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _shut_down(llm: Any, *, shared_group: bool) -> None:
    """Ends an engine and what it opened; a process group that was open before it stays open."""
    core = llm.llm_engine.engine_core
    with _kept_open() if shared_group else nullcontext():
        core.shutdown()


@contextmanager
def _kept_open() -> Iterator[None]:
    """vLLM destroys the default process group even where it found it open."""
    destroy = distributed.destroy_process_group

    def keep(group: Any = None) -> None:
        if group is not None and group is not distributed.GroupMember.WORLD:
            destroy(group)

    distributed.destroy_process_group = keep
    try:
        yield
    finally:
        distributed.destroy_process_group = destroy


def _completion(output: Any, *, prompt: int, sample: int) -> Completion:
    if output.finish_reason not in STATUS:
        raise RunFailed(f"vLLM ended an answer by {output.finish_reason!r}, neither at a stop nor at its length")
    ids = tuple(output.token_ids)
    logprobs = () if output.logprobs is None else tuple(_logprobs(output.logprobs))
    return Completion(prompt=prompt, sample=sample, ids=ids, logprobs=logprobs, status=STATUS[output.finish_reason])


def _logprobs(flat: Any, *, skip: int = 0) -> Iterator[float]:
    """The log-probabilities of the tokens themselves, which come first at each position."""
    return (flat.logprobs[at] for at in flat.start_indices[skip:])


def _request(adapter: Path) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, str(adapter))
