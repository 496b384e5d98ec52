"""flatout against its alternatives, on one GPU, in one call, repeats interleaved.

    python -m benchmarks.pretrain --tokens FOLDER --peer-script FILE --peers nanogpt,nanochat --repeats 3

We run the command itself, `flatout train examples/pretrain-124m.yaml`, with clipping, data loading and recording on,
and read its run folder. A peer is a script that takes a variant's name and prints one JSON line with `tok_s`, `mfu` and
`mem_gib`; each variant of each repeat is a separate process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import peers
from benchmarks.results import FOLDER, measuring
from flatout.record import Run

EXAMPLES = {name: f"examples/{name}.yaml" for name in ("pretrain-124m", "pretrain-360m", "pretrain-1b")}
UNITS = {"tokens_per_s": "tokens/s", "mfu": "share of 989 TFLOP/s, 6N + 12LHT", "peak_gib": "GiB"}
QUIET = ["eval.every=null", "save.every=null", "save.weights_only=true"]


def ours(example: str, overrides: list[str], *, folder: Path) -> dict[str, float]:
    """Runs the command once. Returns its summary."""
    command = [sys.executable, "-m", "flatout", "train", example, *overrides, "--run", str(folder)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    run = Run.open(folder)
    end = next(event.data for event in run.events() if event.kind == "end")["outcome"]
    speed = end["speed"]
    return {
        "tokens_per_s": speed["tokens_per_s"],
        "mfu": speed["mfu_common"],
        "peak_gib": end["peak_gib"],
        "predicted_gib": run.plan["predicted"]["peak_gib"],
        "unattributed_share": speed["unattributed_share"],
        "data_share": speed["data_share"],
    }


def peer(script: Path, variant: str, *, seconds: float) -> dict[str, float] | None:
    found = peers.measured(script, variant, figure="tok_s", seconds=seconds)
    return found and {"tokens_per_s": found["tok_s"], "mfu": found["mfu"] / 100, "peak_gib": found["mem_gib"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmark", choices=EXAMPLES, default="pretrain-124m")
    parser.add_argument("--tokens", help="folder of prepared shards (default: what the example says)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer-script", type=Path)
    parser.add_argument("--peers", default="")
    parser.add_argument("--peer-seconds", type=float, default=90)
    parser.add_argument("--variants", default="flatout", help="NAME or NAME:key=value:key=value, comma-separated")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=None)
    options = parser.parse_args()

    common = [*QUIET, f"train.steps={options.steps}", "train.warmup_steps=5"]
    if options.tokens:
        common += ["data.source=tokens", f"data.path={options.tokens}", "data.tokenizer=byte"]
    variants = {name: rest for name, *rest in (v.split(":") for v in options.variants.split(",") if v)}
    peers = [name for name in options.peers.split(",") if name]
    to = options.to or FOLDER / f"{options.benchmark}.jsonl"
    with (
        tempfile.TemporaryDirectory() as scratch,
        measuring(options.benchmark, commit=options.commit, units=UNITS, to=to) as measured,
    ):
        for repeat in range(options.repeats):
            for name, overrides in variants.items():
                began = time.time()
                folder = Path(scratch) / f"{name}-{repeat}"
                measured[name].append(ours(EXAMPLES[options.benchmark], [*common, *overrides], folder=folder))
                print(name, repeat, measured[name][-1], f"{time.time() - began:.0f} s", flush=True)
            for name in peers:
                began = time.time()
                if (found := peer(options.peer_script, name, seconds=options.peer_seconds)) is not None:
                    measured[name].append(found)
                    print(name, repeat, found, f"{time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
