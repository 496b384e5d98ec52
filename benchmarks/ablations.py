"""`flatout ablate` on the four kinds of jobs: pretraining, LoRA, sampling, and reinforcement learning.

    python -m benchmarks.ablations pretrain --table alone --table cumulative --budget 500s
    python -m benchmarks.ablations lora sampling --table without --model FOLDER --data GSM8K.jsonl
    python -m benchmarks.ablations rl --table without --budget 900s --model FOLDER
    python -m benchmarks.ablations small --budget 900s    # on a CPU

The jobs are the examples with smaller batches, so that a trial takes seconds; `small` is a pretraining job for a CPU.
`--folder` keeps the trials, and a second call goes on there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import FOLDER, Call, Result, git_commit, table, write

JOBS = {
    "pretrain": """recipe: pretrain
model: {layers: 12, hidden: 768, heads: 12, vocab: 50304}
data: {source: embedded, embedded_mb: 6, tokenizer: "bpe:16384", sequence_length: 1024}
train: {batch_tokens: 16384, steps: 1000, lr: 6.0e-4, warmup_steps: 100}
plan: {preset: balanced}
""",
    "small": """recipe: pretrain
model: {layers: 4, hidden: 128, heads: 4}
data: {source: embedded, embedded_mb: 1, tokenizer: byte, sequence_length: 128}
train: {batch_tokens: 1024, steps: 200, lr: 1.0e-3}
""",
    "lora": """recipe: sft
model: MODEL
data: {source: jsonl, path: DATA, sequence_length: 512, valid_share: 0.1}
train: {batch_tokens: 16384, epochs: 30, lr: 2.0e-4}
lora: {rank: 16, alpha: 64}
""",
    "sampling": """recipe: rft
model: MODEL
rft: {task: "units:train", chunk: 64, oversample: 8}
sample: {max_tokens: 32}
data: {sequence_length: 512, valid_share: 0.02}
train: {batch_tokens: 16384, epochs: 3, lr: 2.0e-4}
lora: {rank: 16, alpha: 64}
""",
    "rl": """recipe: rl
model: MODEL
rl: {tasks: ["math:train?level=1&shots=4"], prompts: 32, samples: 8}
data: {sequence_length: 1024}
sample: {max_tokens: 64}
train: {steps: 300, lr: 1.0e-5, warmup_steps: 10}
""",
}


def rows_of(job: str, found: dict[str, Any], call: Call) -> list[Result]:
    """Speeds, and against the reference: how many times as fast, and the ratio of the losses. Of a CPU only ratios."""
    rows = []
    absolute = {"tokens_per_s": "1/s", "peak_gib": "GiB", "start_s": "s", "longest_start_s": "s"}
    absolute = absolute if torch.cuda.is_available() else {}
    for row in found["rows"]:
        name, blocks = f"{job}: {row['name']}", row["blocks"]
        if row["problem"] is not None or not blocks:
            continue
        for metric, unit in absolute.items():
            if row[metric] is not None:
                made = call.result(variant=name, metric=metric, unit=unit, values=[row[metric]])
                rows.append(replace(made, repeats=blocks))
        for part, metric in (("time", "times_as_fast"), ("loss_difference", "loss_ratio")):
            if (seen := row[part]) is not None and seen["low"] and seen["high"]:  # there is an interval
                values = [1 / seen[key] if part == "time" else seen[key] for key in ("ratio", "low", "high")]
                made = call.result(variant=name, metric=metric, unit="ratio", values=values[:1])
                rows.append(replace(made, low=min(values), high=max(values), repeats=blocks))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", choices=JOBS)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--data", default="gsm8k.jsonl", help="rows with question and answer")
    parser.add_argument("--budget", default=None, help="of each job, such as 300s; four blocks without one")
    parser.add_argument("--steps", default=None, help="measured steps of a trial; ten without it")
    parser.add_argument("--table", action="append", default=[])
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--folder", type=Path, default=Path("ablations"))
    parser.add_argument("--commit", default=None)
    parser.add_argument("--to", type=Path, default=FOLDER / "ablations.jsonl")
    options = parser.parse_args()
    call = Call(benchmark="ablations", commit=options.commit or git_commit())
    results: list[Result] = []
    for job in options.jobs:
        folder = options.folder / "-".join([job, *options.table])
        (file := options.folder / f"{job}.yaml").parent.mkdir(parents=True, exist_ok=True)
        file.write_text(JOBS[job].replace("MODEL", options.model).replace("DATA", options.data))
        given = [word for key in ("table", "only") for value in getattr(options, key) for word in (f"--{key}", value)]
        given += [
            word for key in ("budget", "steps") if (value := getattr(options, key)) for word in (f"--{key}", value)
        ]
        command = [sys.executable, "-m", "flatout", "ablate", str(file), *given]
        done = subprocess.run([*command, "--run", str(folder)], check=False)
        if done.returncode:
            print(f"{job}: exit {done.returncode}", flush=True)
            continue
        rows = rows_of(job, json.loads((folder / "ablation.json").read_text()), call)
        write(rows, options.to)
        results += rows
    print(table(results))


if __name__ == "__main__":
    main()
