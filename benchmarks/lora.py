"""Fine-tuning with adapters against Hugging Face's Trainer with PEFT, on one GPU, in one call, repeats interleaved.

    python -m benchmarks.lora --peer-script FILE --peers rft-bf16-bs256,rft-bf16-bs256-compile --repeats 3
    python -m benchmarks.lora --fit           # what fits in 15, 40 and 80 GB, predicted and measured

The workload is that of the peers: the SmolLM2-360M shape, rank 16 on all projections, examples of 48 to 128 tokens of
which the first 24 are the prompt. We run the command itself, `flatout train` with `recipe: sft`, with clipping, data
loading and recording on, and read its run folder. A peer is a script that takes a variant's name and prints one JSON
line with `samples_s` and `mem_gib`. Our side needs only torch, numpy, safetensors and tokenizers.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.results import FOLDER, measuring
from flatout.record import Run

PROMPT, SHORTEST, LONGEST = 24, 48, 128
UNITS = {"samples_per_s": "samples/s", "tokens_per_s": "real tokens/s", "peak_gib": "GiB"}
FIT_UNITS = {"peak_gib": "GiB", "predicted_gib": "GiB"}
SMOLLM2_360M = (
    "{layers: 32, hidden: 960, heads: 15, kv_heads: 5, intermediate: 2560, vocab: 49152, positions: 2048, tied: true}"
)
# Ours, by what is trained and how much a step takes: 256 examples, as the peers, and a batch that fills the device.
VARIANTS = {
    "flatout": ["train.batch_tokens=65536"],
    "flatout-bs256": ["train.batch_tokens=22528", "data.sequence_length=1024"],
    "flatout-full": ["train.batch_tokens=65536", "lora.rank=null", "lora.alpha=null"],
}
SHAPES = {
    "1b": "{layers: 16, hidden: 2048, heads: 32, kv_heads: 8, intermediate: 8192, vocab: 128256, tied: true}",
    "3b": "{layers: 28, hidden: 3072, heads: 24, kv_heads: 8, intermediate: 8192, vocab: 128256, tied: true}",
    "8b": "{layers: 32, hidden: 4096, heads: 32, kv_heads: 8, intermediate: 14336, vocab: 128256}",
}
CAPS_GB = (15, 40, 80)
BASES = ("16-bit", "4-bit")


def write_rows(path: Path, *, count: int) -> None:
    """Writes texts in which a character is a token: the prompt, and an answer that is complete with its EOS."""
    with path.open("w") as file:
        for i in range(count):
            generator = random.Random(i)
            letters = generator.choices(string.ascii_letters, k=generator.randint(SHORTEST, LONGEST) - 1)
            row = {"prompt": "".join(letters[:PROMPT]), "completion": "".join(letters[PROMPT:])}
            file.write(json.dumps(row) + "\n")


def config(path: Path, *, rows: Path, model: str, steps: int) -> Path:
    path.write_text(
        f"recipe: sft\nmodel: {model}\n"
        f"data: {{source: jsonl, path: {rows}, tokenizer: byte, sequence_length: 2048, cache: {path.parent}/cache}}\n"
        f"train: {{batch_tokens: 65536, steps: {steps}, lr: 2.0e-4, weight_decay: 0.0}}\n"
        "lora: {rank: 16, alpha: 64}\neval: {tokens: 16384}\nsave: {weights_only: true}\n"
    )
    return path


@dataclass(frozen=True, kw_only=True)
class Done:
    refused: str | None
    figures: dict[str, float]
    predicted_gib: float | None


def ours(file: Path, overrides: list[str], *, folder: Path, seconds: float = 180) -> Done:
    """Runs the command once. Returns its summary, or why it was refused."""
    command = [sys.executable, "-m", "flatout", "train", str(file), *overrides, "--run", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Done(refused=f"FAILED: not finished in {seconds:.0f} s", figures={}, predicted_gib=None)
    if done.returncode:
        # Only what was told beforehand is a refusal; anything else is a failure.
        kind = "refused" if done.returncode == 2 else f"FAILED, exit {done.returncode}"
        return Done(refused=f"{kind}: {done.stderr.strip()[-600:]}", figures={}, predicted_gib=None)
    run = Run.open(folder)
    events: dict[str, Any] = {event.kind: event.data for event in run.events()}
    end, data = events["end"]["outcome"], events["data"]
    # An example of n tokens takes n - 1 places: the last one is only a target.
    places = data["train_tokens"] / data["train_examples"] - 1
    speed = end["speed"]["tokens_per_s"]
    return Done(
        refused=None,
        figures={"samples_per_s": speed / places, "tokens_per_s": speed, "peak_gib": end["peak_gib"]},
        predicted_gib=run.plan["predicted"]["peak_gib"],
    )


def peer(script: Path, variant: str, *, seconds: float) -> dict[str, float] | None:
    found = peers.measured(script, variant, figure="samples_s", seconds=seconds)
    if found is None:
        return None
    speed = found["samples_s"]
    real = (SHORTEST + LONGEST) / 2
    return {"samples_per_s": speed, "tokens_per_s": speed * real, "peak_gib": found["mem_gib"]}


def fit(
    options: argparse.Namespace, scratch: Path, rows: Path, measured: dict[str, list[dict[str, float]]], *, steps: int
) -> None:
    """Trains each shape under each memory cap, in 16 and 4 bits: predicted and measured peak, or why it is refused."""
    import torch

    total_gb = torch.cuda.get_device_properties(0).total_memory / 1e9
    shapes = {name: SHAPES[name] for name in options.shapes}
    files = {name: config(scratch / f"{name}.yaml", rows=rows, model=shapes[name], steps=steps) for name in shapes}

    def one(cap: int, name: str, base: str) -> None:
        pins = [f"plan.memory_fraction={cap / total_gb:.4f}", f"lora.base={base}", "train.batch_tokens=16384"]
        pins += ["plan.precision=fp16"] if cap == 15 else []
        variant = f"{name}-{cap}gb-{base}"
        done = ours(files[name], pins, folder=scratch / variant, seconds=240)
        if done.predicted_gib is not None:
            measured[variant].append({"peak_gib": done.figures["peak_gib"], "predicted_gib": done.predicted_gib})
        print(json.dumps({"variant": variant, "refused": done.refused, "measured": measured.get(variant)}), flush=True)

    def all_of(cap: int) -> None:
        for base in options.bases:
            for name in files:
                one(cap, name, base)

    # All caps at once: together they are less than the card, and no time is read off these runs.
    with ThreadPoolExecutor(len(CAPS_GB)) as threads:
        list(threads.map(all_of, CAPS_GB))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--model", default=SMOLLM2_360M, help="shape as YAML; smaller ones try the script on a CPU")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="NAME or NAME:key=value:key=value, by commas")
    parser.add_argument("--peer-script", type=Path)
    parser.add_argument("--peers", default="")
    parser.add_argument("--peer-seconds", type=float, default=180)
    parser.add_argument("--fit", action="store_true", help="what fits capped memory, instead of the comparison")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="of --fit")
    parser.add_argument("--bases", nargs="+", choices=BASES, default=BASES, help="of --fit")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, help="default: lora-360m.jsonl or lora-fit.jsonl among the results")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        write_rows(rows := scratch / "rows.jsonl", count=options.examples)
        benchmark, units = ("lora-fit", FIT_UNITS) if options.fit else ("lora-360m", UNITS)
        to = options.to or FOLDER / f"{benchmark}.jsonl"
        with measuring(benchmark, commit=options.commit, units=units, to=to) as measured:
            if options.fit:
                fit(options, scratch, rows, measured, steps=20)
            else:
                file = config(scratch / "lora.yaml", rows=rows, model=options.model, steps=options.steps)
                compare(options, file, scratch, measured)


def compare(
    options: argparse.Namespace, file: Path, scratch: Path, measured: dict[str, list[dict[str, float]]]
) -> None:
    for repeat in range(options.repeats):
        for variant, *more in (v.split(":") for v in options.variants.split(",") if v):
            began = time.time()
            done = ours(file, [*VARIANTS.get(variant, []), *more], folder=scratch / f"{variant}-{repeat}")
            if done.refused:
                print(variant, done.refused, flush=True)
                continue
            measured[variant].append(done.figures)
            print(variant, repeat, done.figures, f"{time.time() - began:.0f} s", flush=True)
        for variant in filter(None, options.peers.split(",")):
            if (found := peer(options.peer_script, variant, seconds=options.peer_seconds)) is not None:
                measured[variant].append(found)
                print(variant, repeat, found, flush=True)


if __name__ == "__main__":
    main()
