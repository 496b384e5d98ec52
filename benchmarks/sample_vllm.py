"""Sampling by flatout, by vLLM itself and by flatout's vLLM backend, on one GPU, in one call.

    python -m benchmarks.sample_vllm --repeats 3      # needs vllm; --small tries the parts without it on a CPU

A shape of 1.2 billion parameters with random weights, 64 prompts of 256 tokens, 8 samples of each, 256 new tokens at
temperature 1, no stop. Each part runs in a process of its own. Variants take turns; a first round is not counted:

- embedded: `flatout` is its own sampler; `vllm` is `LLM.generate` of an engine in this process and `backend` the same
  work through flatout, as with `rl.sampler: vllm`: the backend loads all weights before each use. `-logprobs` asks for
  the log-probability of each token, as `flatout` always does.
- folder: the engine runs in a process of its own, as with `flatout eval --backend vllm`. In addition, `vllm-dicts` asks
  for log-probabilities in vLLM's default container, `vllm-text` for text, `vllm-requests` for each sample apart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.generate import SMALL, Vocabulary, decoder, prompts_of
from benchmarks.results import FOLDER, measuring
from flatout.cost import ModelShape
from flatout.model.loading import export_model
from flatout.sample import Generator, Sampler, Sampling, sampler_of

SHAPE = ModelShape(
    layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab=128256, tied=True,
    positions=2048, rope_theta=500000.0,
)  # fmt: skip
UNITS = {"tokens_per_s": "generated tokens/s"}
PARTS = ("embedded", "folder")
# The share of the GPU's memory of an engine in this process, beside the model that is trained.
MEMORY = 0.3
# Runs the work on the prompts of a seed and returns the number of tokens.
Work = Callable[[list[list[int]], int], int]


@dataclass(frozen=True)
class Load:
    """The model's shape, and how many tokens of how many samples it writes."""

    shape: ModelShape = SHAPE
    num_prompts: int = 64
    samples: int = 8
    prompt: int = 256
    new: int = 256

    @property
    def tokens(self) -> int:
        return self.num_prompts * self.samples * self.new


TOY = Load(shape=SMALL, num_prompts=2, samples=2, prompt=12, new=8)


class Benchmarked:
    """A model with its tokenizer, as the backends take them."""

    adapters = None

    def __init__(self, shape: ModelShape, folder: Path | None = None) -> None:
        self.model = decoder(shape, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self.tokenizer, self.folder = Vocabulary(shape.vocab), folder

    def written(self, folder: Path) -> Benchmarked:
        """On a folder of these weights; the model itself leaves the GPU."""
        export_model(self.model, folder, dtype=self.model.compute_dtype, eos_token_id=self.tokenizer.eos_id)
        self.tokenizer.save(folder)
        self.model.to("cpu")
        torch.cuda.empty_cache()
        self.folder = folder
        return self


def through(sampler: Sampler, load: Load, *, logprobs: bool) -> Work:
    def work(prompts: list[list[int]], seed: int) -> int:
        sampling = Sampling(max_tokens=load.new, temperature=1.0, seed=seed, logprobs=logprobs)
        found = list(sampler.generate(prompts, sampling=sampling, samples=load.samples))
        assert all(len(done.logprobs) == load.new for done in found) or not logprobs
        return sum(len(done.ids) for done in found)

    return work


def direct(llm: Any, load: Load, *, apart: bool = False, **options: Any) -> Work:
    """`LLM.generate` with its own seeds; `apart` makes each sample a request with a seed of its own."""
    from vllm import SamplingParams

    def work(prompts: list[list[int]], seed: int) -> int:
        chosen = {"temperature": 1.0, "max_tokens": load.new, "ignore_eos": True, "detokenize": False} | options
        texts = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(load.samples if apart else 1)]
        params = SamplingParams(n=load.samples, **chosen)
        if apart:
            params = [SamplingParams(seed=1000 * seed + i, **chosen) for i in range(len(texts))]
        found = llm.generate(texts, params, use_tqdm=False)
        return sum(len(output.token_ids) for answer in found for output in answer.outputs)

    return work


def variants_of(part: str, load: Load, folder: Path) -> dict[str, Work]:
    model = Benchmarked(load.shape)
    if part == "embedded":
        own = {"flatout": through(Generator(model.model, model.tokenizer), load, logprobs=True)}
        if not torch.cuda.is_available():
            return own
        return own | of_engine(
            sampler_of(model, backend="vllm", rows=load.num_prompts * load.samples, memory=MEMORY), load
        )
    sampler = sampler_of(model.written(folder), backend="vllm")
    return of_engine(sampler, load, suffix="-folder") | {
        "vllm-dicts-folder": direct(sampler._llm, load, logprobs=0),
        "vllm-text-folder": direct(sampler._llm, load, detokenize=True),
        "vllm-requests-folder": direct(sampler._llm, load, apart=True),
    }


def of_engine(sampler: Any, load: Load, *, suffix: str = "") -> dict[str, Work]:
    """Through the backend, and by its engine itself."""
    return {
        f"vllm{suffix}": direct(sampler._llm, load),
        f"backend{suffix}": through(sampler, load, logprobs=False),
        f"vllm-logprobs{suffix}": direct(sampler._llm, load, logprobs=0, flat_logprobs=True),
        f"backend-logprobs{suffix}": through(sampler, load, logprobs=True),
    }


def measure(part: str, load: Load, *, repeats: int) -> Iterator[tuple[str, float]]:
    """Tokens per second of each variant in turn; a first round is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        variants = variants_of(part, load, Path(folder))
        for repeat in range(repeats + 1):
            for at, (name, work) in enumerate(variants.items()):
                prompts = prompts_of(load.num_prompts, load.prompt, vocab=load.shape.vocab, seed=100 * repeat + at)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                began = time.perf_counter()
                tokens = work(prompts, repeat)
                seconds = time.perf_counter() - began
                assert tokens == load.tokens, f"{name}: {tokens} tokens"
                if repeat:
                    yield name, tokens / seconds


def part_of(part: str, *, repeats: int, small: bool) -> Iterator[tuple[str, float]]:
    """A part in a process of its own; what it had measured counts if it fails later."""
    command = [sys.executable, "-m", "benchmarks.sample_vllm", "--part", part, "--repeats", str(repeats)]
    with subprocess.Popen([*command, *["--small"] * small], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(part, line, end="", flush=True)
            if line.startswith("{"):
                found = json.loads(line)
                yield found["variant"], found["tokens_per_s"]
    if running.returncode:
        print(f"{part} failed with exit code {running.returncode}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--part", choices=PARTS, help="measure one part in this process, and keep nothing")
    parser.add_argument("--small", action="store_true", help="a toy that tries this script on a CPU, without vllm")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "sample-vllm.jsonl")
    options = parser.parse_args()
    if options.part:
        for variant, rate in measure(options.part, TOY if options.small else Load(), repeats=options.repeats):
            print(json.dumps({"variant": variant, "tokens_per_s": rate}), flush=True)
        return
    to = None if options.small else options.to
    with measuring("sample-vllm", commit=options.commit, units=UNITS, to=to) as measured:
        for part in options.parts.split(","):
            for variant, rate in part_of(part, repeats=options.repeats, small=options.small):
                measured[variant].append({"tokens_per_s": rate})


if __name__ == "__main__":
    main()
