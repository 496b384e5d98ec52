"""A transformers Llama in a plain loop: as it is, with `flatout.accelerate`, and with Liger's patch if it is installed.

    python -m benchmarks.accelerated --repeats 3
    python -m benchmarks.accelerated --shape tiny --steps 4 --warm 1 --batch 2 --length 32    # on a CPU

Each variant runs in a process of its own, because a patch may change classes for all models; repeats are interleaved.
The loop is the same for all: forward with labels, backward, fused AdamW, the same random tokens. `--weights bf16` holds
all in bf16; `fp32` runs under autocast, as the Trainer does with `bf16=True`. The last loss is printed, so that a
variant that computes something else shows. The module is not called `accelerate`: scripts beside it would import it
instead of the package.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER, measuring

UNITS = {"tokens_per_s": "tokens/s", "peak_gib": "GiB"}
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": True,
    },
}  # fmt: skip
VARIANTS = ("transformers", "flatout", "liger")


def one(variant: str, options: argparse.Namespace) -> dict[str, float]:
    """Trains for a few steps in this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES[options.shape], max_position_embeddings=8192))
    if options.weights == "bf16":
        model.to(torch.bfloat16)
    model.train()
    if variant == "flatout":
        import flatout

        print(flatout.accelerate(model), file=sys.stderr, flush=True)
    elif variant == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(1)
    vocab = SHAPES[options.shape]["vocab_size"]
    batches = [torch.randint(0, vocab, (options.batch, options.length), generator=generator) for _ in range(4)]
    batches = [batch.to(device) for batch in batches]

    def step(number: int) -> Any:
        ids = batches[number % len(batches)]
        with torch.autocast(device, dtype=torch.bfloat16, enabled=options.weights == "fp32"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def waited() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    for number in range(options.warm):
        step(number)
    began = waited()
    for number in range(options.steps):
        loss = step(number)
    seconds = waited() - began
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    tokens = options.steps * options.batch * options.length
    return {"tokens_per_s": tokens / seconds, "peak_gib": peak, "loss": loss.item()}


def measured(variant: str, options: argparse.Namespace) -> dict[str, float] | None:
    """The figures of one run in a process of its own; None, with its last output printed, if it failed."""
    kept = [f"--{name}={getattr(options, name)}" for name in ("shape", "steps", "warm", "batch", "length", "weights")]
    command = [sys.executable, "-m", "benchmarks.accelerated", "--one", variant, *kept]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if done.returncode:
        print(f"{variant}: {done.stderr[-600:]}", flush=True)
        return None
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(variant, found, done.stderr.strip()[-300:] if variant == "flatout" else "", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--weights", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--one", choices=VARIANTS, help="measure this variant in this process and print one JSON line")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, help="default: accelerate-SHAPE.jsonl among the results")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options)))
        return
    variants = [name for name in options.variants if name != "liger" or importlib.util.find_spec("liger_kernel")]
    if "liger" in options.variants and "liger" not in variants:
        print("liger is left out: liger_kernel is not installed", flush=True)
    benchmark = f"accelerate-{options.shape}"
    to = options.to or FOLDER / f"{benchmark}.jsonl"
    with measuring(benchmark, commit=options.commit, units=UNITS, to=to) as found:
        for _ in range(options.repeats):
            for variant in variants:
                if (figures := measured(variant, options)) is not None:
                    found[variant].append(figures)


if __name__ == "__main__":
    main()
