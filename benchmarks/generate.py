"""Sampling throughput against Hugging Face's `generate`, on one GPU, in one call, repeats interleaved.

    python -m benchmarks.generate --peer-script FILE --peers hf-generate-bf16-bs1024 --repeats 3
    python -m benchmarks.generate --sweep       # by concurrent sequences and context length; the share of bandwidth

The workload is that of the peers: the SmolLM2-360M shape with random weights, 64 prompts of 120 tokens, 16 samples of
each, 128 new tokens at temperature 0.7, no stop token. `flatout-apart` has 1,024 prompts that share nothing. A peer is
a script that takes a variant's name and prints one JSON line with `gen_tok_s` and `mem_gib`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers
from benchmarks.results import FOLDER, measuring
from flatout.cost import ModelShape
from flatout.data.tokenizer import ByteTokenizer
from flatout.hardware import detect
from flatout.model import Decoder
from flatout.sample import Generator, Sampling

SHAPE = ModelShape(
    layers=32, hidden=960, heads=15, kv_heads=5, head_dim=64, intermediate=2560, vocab=49152, tied=True, positions=2048
)
SMALL = ModelShape(
    layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=512, tied=True, positions=512
)
NUM_PROMPTS, SAMPLES, PROMPT, NEW = 64, 16, 120, 128
UNITS = {"tokens_per_s": "generated tokens/s", "peak_gib": "GiB"}
SWEEP_ROWS = (64, 256, 512, 1024, 2048, 4096)
SWEEP_CONTEXTS = (120, 500, 1500)


class Vocabulary(ByteTokenizer):
    """Every id of the model may be sampled; nothing is ever decoded."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    @property
    def vocab_size(self) -> int:
        return self._size


def decoder(shape: ModelShape, device: torch.device) -> Decoder:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Decoder(shape, compute_dtype=dtype).to(device)
    model.initialise(0)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.requires_grad_(False).eval()


def prompts_of(count: int, length: int, *, vocab: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(5, vocab) for _ in range(length)] for _ in range(count)]


def timed(generator: Generator, prompts: list[list[int]], *, samples: int, new: int, seed: int) -> float:
    """Seconds for all completions, prompts included."""
    if generator.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    sampling = Sampling(max_tokens=new, temperature=0.7, seed=seed)
    count = sum(len(c.ids) for c in generator.generate(prompts, sampling=sampling, samples=samples))
    seconds = time.perf_counter() - began
    assert count == len(prompts) * samples * new, "every completion has its length"
    return seconds


def peer(script: Path, variant: str, *, seconds: float) -> dict[str, float] | None:
    found = peers.measured(script, variant, figure="gen_tok_s", seconds=seconds)
    return found and {"tokens_per_s": found["gen_tok_s"], "peak_gib": found["mem_gib"]}


def sweep(model: Decoder, tokenizer: Vocabulary, *, rows: list[int], contexts: list[int], new: int) -> None:
    """Decoding alone, from the difference of a long and a short generation, and the minimum of bytes it must read."""
    shape = model.shape
    bandwidth = detect().bandwidth
    for context in contexts:
        for count in rows:
            generator = Generator(model, tokenizer, rows=count)
            prompts = prompts_of(count, context, vocab=shape.vocab, seed=context)
            line: dict[str, Any] = {"rows": count, "context": context}
            try:
                timed(generator, prompts, samples=1, new=new, seed=0)
                long = timed(generator, prompts, samples=1, new=new, seed=1)
                short = timed(generator, prompts, samples=1, new=new // 2, seed=2)
            except torch.OutOfMemoryError:
                line["refused"] = "out of memory"
            else:
                assert generator._running is not None
                if (room := generator._running.store.rows) < count:
                    print(json.dumps(line | {"refused": f"room for {room} rows"}), flush=True)
                    continue
                step = (long - short) / (new - new // 2)
                kept = 2 * shape.layers * shape.kv_width * model.compute_dtype.itemsize
                read = count * (context + 0.75 * new) * kept + shape.num_parameters * model.compute_dtype.itemsize
                line |= {
                    "tokens_per_s": count * new / long,
                    "step_ms": 1e3 * step,
                    "read_gb": read / 1e9,
                    "bandwidth_share": read / step / bandwidth if bandwidth and step > 0 else None,
                }
            print(json.dumps(line), flush=True)
            del generator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=None, help="concurrent sequences (default: the sampler's)")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--sweep-rows", default=",".join(map(str, SWEEP_ROWS)))
    parser.add_argument("--sweep-contexts", default=",".join(map(str, SWEEP_CONTEXTS)))
    parser.add_argument("--small", action="store_true", help="a toy that tries this script on a CPU")
    parser.add_argument("--peer-script", type=Path)
    parser.add_argument("--peers", default="")
    parser.add_argument("--peer-seconds", type=float, default=120)
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "sample-360m.jsonl")
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = SMALL if options.small else SHAPE
    num_prompts, samples, length, new = (2, 2, 12, 8) if options.small else (NUM_PROMPTS, SAMPLES, PROMPT, NEW)
    model, tokenizer = decoder(shape, device), Vocabulary(shape.vocab)
    if options.sweep:
        rows, contexts = ([int(x) for x in text.split(",")] for text in (options.sweep_rows, options.sweep_contexts))
        sweep(model, tokenizer, rows=rows, contexts=contexts, new=new)
        return
    generator = Generator(model, tokenizer, rows=options.rows)
    jobs = {
        "flatout": (prompts_of(num_prompts, length, vocab=shape.vocab, seed=0), samples),
        "flatout-apart": (prompts_of(num_prompts * samples, length, vocab=shape.vocab, seed=1), 1),
    }
    for name, (prompts, many) in jobs.items():
        print(name, "first", f"{timed(generator, prompts, samples=many, new=new, seed=9):.2f} s", flush=True)
    to = None if options.small else options.to
    with measuring("sample-360m", commit=options.commit, units=UNITS, to=to) as measured:
        for repeat in range(options.repeats):
            for name, (prompts, many) in jobs.items():
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                seconds = timed(generator, prompts, samples=many, new=new, seed=repeat)
                peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
                measured[name].append({"tokens_per_s": len(prompts) * many * new / seconds, "peak_gib": peak})
                print(name, repeat, measured[name][-1], flush=True)
            for variant in filter(None, options.peers.split(",")):
                if (found := peer(options.peer_script, variant, seconds=options.peer_seconds)) is not None:
                    measured[variant].append(found)
                    print(variant, repeat, found, flush=True)


if __name__ == "__main__":
    main()
