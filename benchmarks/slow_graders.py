"""What slow graders cost a step of reinforcement learning, with and without `rl.ahead`.

    python -m benchmarks.slow_graders

Three variants of one job take turns: graders as they are, a tenth of the completions taking two seconds more, and the
same with phases generated ahead. The delay is in the process that waits for a grader, as of a judge that answers late,
so it takes no core away from the others. The figure is a ratio of step times in one call. A CPU is enough.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.results import FOLDER, Call, git_commit, table, write
from flatout.parity import typical
from flatout.record import Run

DELAY_S, SHARE = 2.0, 10
CONFIG = """recipe: rl
model: {layers: 3, hidden: 192, heads: 4}
data: {tokenizer: byte, sequence_length: 512}
rl: {tasks: ["sums:train"], prompts: 16, samples: 4, graders: 8}
sample: {max_tokens: 96}
train: {steps: STEPS, lr: 1.0e-5}
save: {weights_only: true}
"""
CODE = f"""
import time, zlib
from flatout.tasks.grader import Grader
plain = Grader.grade_each
def late(self, several):
    if any(zlib.crc32(text.encode()) % {SHARE} == 0 for _, text in several):
        time.sleep({DELAY_S})
    return plain(self, several)
Grader.grade_each = late
"""
VARIANTS = {"quick": ("", []), "slow": (CODE, []), "slow, ahead": (CODE, ["rl.ahead=3"])}


def step_s(name: str, *, folder: Path, steps: int) -> float:
    """The typical step time, without the warm-up."""
    code, overrides = VARIANTS[name]
    file = folder.with_suffix(".yaml")
    file.write_text(CONFIG.replace("STEPS", str(steps)))
    start = ["-c", f"{code}\nfrom flatout.cli import main; main()"]
    command = [sys.executable, *start, "train", str(file), *overrides, "--run", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: exit {done.returncode}: {done.stderr.strip()[-1500:]}")
    times = [step.training_s for step in Run.open(folder).latest_steps()]
    # The last phases are not followed by others to generate.
    return math.exp(typical(times[4:-4]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "slow-graders.jsonl")
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(options.repeats):
            for name in VARIANTS if repeat % 2 == 0 else reversed(VARIANTS):
                place = Path(scratch) / f"{repeat}-{name.replace(', ', '-')}"
                found[name].append(step_s(name, folder=place, steps=options.steps))
                print(name, round(found[name][-1], 3), flush=True)
    call, quick = Call(benchmark="slow-graders", commit=options.commit or git_commit()), found["quick"]
    rows = [
        call.result(
            variant=name,
            metric="times_the_step",
            unit="ratio",
            values=[one / plain for one, plain in zip(times, quick, strict=True)],
        )
        for name, times in found.items()
    ]
    write(rows, options.to)
    print(table(rows))


if __name__ == "__main__":
    main()
