"""GRPO on one GPU: steps per second beside a peer, accuracy with real weights, and the cost of PCGrad.

    python -m benchmarks.grpo --questions gsm8k/train.jsonl --tokenizer FOLDER --peer-script FILE --repeats 2
    python -m benchmarks.grpo --model FOLDER              # real weights: held-out accuracy before and after
    python -m benchmarks.grpo --model FOLDER --mtl        # six domains: mixed, equal and PCGrad

The workload is that of the peer: the SmolLM2-135M shape with random weights, all of them trained, 32 prompts of 8
completions, up to 128 new tokens each. We run the command itself, `flatout train` with `recipe: rl`, with grading,
clipping and recording on, and read its run folder. Steps of the second half count.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks import peers
from benchmarks.results import FOLDER, Call, Result, git_commit, table, write
from flatout.record import Run
from flatout.record.events import TasksScored

SHAPE = (
    "{layers: 30, hidden: 576, heads: 9, kv_heads: 3, intermediate: 1536, vocab: 49152, positions: 2048, tied: true}"
)
DOMAINS = ("math", "code", "logic", "simulation", "table", "stem")
METHODS = ("mixed", "equal", "pcgrad")


def trained(config: str, overrides: list[str], *, folder: Path) -> Run:
    file = folder.with_suffix(".yaml")
    file.write_text(config)
    command = [sys.executable, "-m", "flatout", "train", str(file), *overrides, "--run", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{folder.name}: exit {done.returncode}: {done.stderr.strip()[-1500:]}")
    print(done.stdout[-1500:], flush=True)
    return Run.open(folder)


def figures(run: Run) -> dict[str, float]:
    """Seconds of a step and of its parts, and the peak memory."""
    steps = list(run.latest_steps())
    late = steps[len(steps) // 2 :]
    seconds = sum(step.training_s for step in late) / len(late)
    parts: Counter[str] = Counter()
    for step in late:
        for phase, spent in step.phases.items():
            parts[f"{phase.rpartition('/')[2]}_s"] += spent / len(late)
    peak = max(step.memory.get("peak_gib", 0.0) for step in late)
    return {"steps_per_s": 1 / seconds, "step_s": seconds, "peak_gib": peak, **parts}


def speed(options: argparse.Namespace, scratch: Path, call: Call) -> list[Result]:
    """The peer's workload, repeats interleaved with the peer."""
    config = (
        f"recipe: rl\nmodel: {SHAPE}\ndata: {{tokenizer: {options.tokenizer}, sequence_length: 1024}}\n"
        f'rl: {{tasks: ["jsonl:{options.questions}"], prompts: 32, samples: 8}}\nsample: {{max_tokens: 128}}\n'
        f"train: {{steps: {options.steps}, lr: 1.0e-6, weight_decay: 0.0}}\nsave: {{weights_only: true}}\n"
    )
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for repeat in range(options.repeats):
        run = trained(config, options.set, folder=scratch / f"speed-{repeat}")
        ours.append(figures(run))
        if options.peer_script is not None and repeat < options.peer_repeats:
            found = peers.measured(options.peer_script, "trl", figure="s_per_step", seconds=options.peer_seconds)
            if found is not None:
                theirs.append({"steps_per_s": 1 / found["s_per_step"], "step_s": found["s_per_step"]})
                theirs[-1]["peak_gib"] = found["mem_gib"]
    return [*rows(call, "flatout", ours), *rows(call, "trl", theirs)]


def rows(call: Call, variant: str, found: list[dict[str, float]]) -> list[Result]:
    if not found:
        return []
    units = {"steps_per_s": "steps/s", "peak_gib": "GiB"}
    return [
        call.result(
            variant=variant, metric=name, unit=units.get(name, "s"), values=[one.get(name, 0.0) for one in found]
        )
        for name in found[0]
    ]


def accuracy(options: argparse.Namespace, scratch: Path, call: Call) -> list[Result]:
    """Real weights on unit conversion, with the held-out questions before and after."""
    config = (
        f"recipe: rl\nmodel: {options.model}\ndata: {{sequence_length: 1024}}\n"
        'rl: {tasks: ["units:train"], prompts: 32, samples: 8}\nsample: {max_tokens: 96}\n'
        f"train: {{steps: {options.steps}, lr: 1.0e-5, warmup_steps: 5, weight_decay: 0.0}}\n"
        f"eval: {{tasks: [units], task_limit: {options.limit}, task_tokens: 96, every: {options.steps}}}\n"
        "save: {weights_only: true}\n"
    )
    run = trained(config, options.set, folder=scratch / "real")
    scored = [event for event in run.events() if isinstance(event, TasksScored)]
    found = rows(call, "real-units", [figures(run)])
    for name, event in (("before", scored[0]), ("after", scored[-1])):
        one = event.tasks[0]
        low, high = (one.value if bound is None else bound for bound in (one.low, one.high))
        found.append(call.share(variant="real-units", metric=name, value=one.value, low=low, high=high))
    return found


def several(options: argparse.Namespace, scratch: Path, call: Call) -> list[Result]:
    """Six domains, adapters on real weights: what a step of each method costs, and how the gradients lie."""
    tasks = ", ".join(f'"{name}:train?level=1&shots=3"' for name in DOMAINS)
    valid = ", ".join(f'"{name}?level=1&shots=3"' for name in DOMAINS)
    config = (
        f"recipe: rl\nmodel: {options.model}\nlora: {{rank: 16}}\ndata: {{sequence_length: 1024}}\n"
        f"rl: {{tasks: [{tasks}], prompts: 48, samples: 8}}\nsample: {{max_tokens: 96}}\n"
        f"train: {{steps: {options.steps}, lr: 1.0e-4, warmup_steps: 5, weight_decay: 0.0}}\n"
        f"eval: {{tasks: [{valid}], task_limit: {options.limit}, task_tokens: 96, every: {options.steps}}}\n"
        "save: {weights_only: true}\n"
    )
    found: list[Result] = []
    for seed in options.seeds:
        for method in options.methods:
            overrides = [*options.set, f"mtl.method={method}", f"seed={seed}"]
            run = trained(config, overrides, folder=scratch / f"{method}-{seed}")
            found += rows(call, f"{method}-seed{seed}", [figures(run)])
            scored = [event for event in run.events() if isinstance(event, TasksScored)]
            for when, event in (("before", scored[0]), ("after", scored[-1])):
                for one in event.tasks:
                    name = f"{one.task.partition('?')[0]}_{when}"
                    low, high = (one.value if bound is None else bound for bound in (one.low, one.high))
                    found.append(
                        call.share(variant=f"{method}-seed{seed}", metric=name, value=one.value, low=low, high=high)
                    )
            steps = list(run.latest_steps())
            for name in (name for name in steps[0].extra.metrics if name.startswith(("cosine/", "conflicts"))):
                values = [step.extra.metrics[name] for step in steps]
                found.append(call.result(variant=f"{method}-seed{seed}", metric=name, unit="", values=values))
            write(found, options.to)
            found = []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, help="JSON lines with question and answer")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--peer-script", type=Path)
    parser.add_argument("--peer-seconds", type=float, default=150)
    parser.add_argument("--peer-repeats", type=int, default=1)
    parser.add_argument("--model", type=Path, help="folder of real weights")
    parser.add_argument("--mtl", action="store_true")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--limit", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="overrides for every run")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "grpo.jsonl")
    options = parser.parse_args()
    call = Call(benchmark="grpo", commit=options.commit or git_commit())
    measure = several if options.mtl else accuracy if options.model else speed
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(options, Path(scratch), call)
    write(found, options.to)
    print(table(found))


if __name__ == "__main__":
    main()
