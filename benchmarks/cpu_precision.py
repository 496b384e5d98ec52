"""bf16 against fp32 on this CPU, by the width of the layers: `flatout ablate` without mixed precision.

python -m benchmarks.cpu_precision
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.results import FOLDER, Call, Result, git_commit, table, write

WIDTHS = (128, 256, 384, 512, 768)
CONFIG = """recipe: pretrain
model: {{layers: 3, hidden: {width}, heads: 4}}
data: {{source: embedded, embedded_mb: 1, tokenizer: byte, sequence_length: 256}}
train: {{batch_tokens: 2048, steps: 200, lr: 1.0e-3}}
plan: {{precision: bf16, compile: none}}
"""


def measured(width: int, call: Call, *, folder: Path) -> list[Result]:
    """How many times as fast bf16 is, with its interval, and the ratio of the losses."""
    (file := folder / f"{width}.yaml").write_text(CONFIG.format(width=width))
    words = ["ablate", str(file), "--only", "mixed precision", "--table", "without", "--run", str(folder / str(width))]
    done = subprocess.run([sys.executable, "-m", "flatout", *words, "--json"], stdout=subprocess.PIPE, check=True)
    row = json.loads(done.stdout)["rows"][-1]
    results = []
    for metric, seen in (("times_as_fast", row["time"]), ("fp32_loss_ratio", row["loss_difference"])):
        values = [seen[key] for key in ("ratio", "low", "high")]
        made = call.result(variant=f"width {width}", metric=metric, unit="ratio", values=values[:1])
        results.append(replace(made, low=min(values), high=max(values), repeats=row["blocks"]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default=None)
    parser.add_argument("--to", type=Path, default=FOLDER / "cpu-precision.jsonl")
    options = parser.parse_args()
    call, results = Call(benchmark="cpu-precision", commit=options.commit or git_commit()), list[Result]()
    with tempfile.TemporaryDirectory() as folder:
        for width in WIDTHS:
            results += measured(width, call, folder=Path(folder))
    write(results, options.to)
    print(table(results))


if __name__ == "__main__":
    main()
