"""Five adapters and their router on real data, on one GPU: speed of mixed batches, and the scores of every phase.

    python -m benchmarks.router --model FOLDER --sentiment F --qa F --summary F --code F --translation F
    python -m benchmarks.router … --parts table --precision fp16      # the same forced to fp16

`speed`: phase 1 of recipe router on all five tasks in one pass (`mixed`), recipe sft with one adapter on the same rows
(`single`), and PEFT with Hugging Face's Trainer, one run for each task after the other (`peft`: router_peft.py). All
have the same rank and targets; repeats are interleaved. Speeds are real tokens a second, over all five runs of PEFT.
`table`: all phases, with the scores of each task as base, own, routed, joint, and the share of prompts that went
to their own adapter, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER, Call, Result, git_commit, measuring, table, write
from flatout.config import from_mapping
from flatout.data.tokenizer import load_tokenizer
from flatout.recipes.mixture import row_of, sources_of
from flatout.record import Run
from flatout.record.routed import PhaseScored

TASKS = {"sentiment": "sentiment", "qa": "qa", "summary": "summary", "code": "mbpp", "translation": "translation"}
UNITS = {"tokens_per_s": "real tokens/s"}
PEER = Path(__file__).with_name("router_peft.py")


def config(options: argparse.Namespace, **router: Any) -> dict[str, Any]:
    sources = [
        {"name": name, "task": task, "path": str(getattr(options, name)), "size": options.size}
        for name, task in TASKS.items()
    ]
    return {
        "recipe": "router",
        "model": {"name": str(options.model)},
        "data": {"sequence_length": options.length, "sources": sources},
        "router": router,
        "train": {"batch_tokens": options.batch_tokens, "steps": options.steps, "lr": 5e-4, "weight_decay": 0.0},
        "lora": {"rank": options.rank, "alpha": 2.0 * options.rank},
        "plan": {"precision": options.precision},
        "eval": {"tokens": 65536},
    }


def trained(values: dict[str, Any], folder: Path) -> Run:
    """Runs the command itself; a failure ends the benchmark with what it said."""
    file = folder.with_suffix(".yaml")
    file.write_text(json.dumps(values))  # JSON is YAML
    command = [sys.executable, "-m", "flatout", "train", str(file), "--run", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{folder.name}: exit {done.returncode}: {done.stderr.strip()[-800:]}")
    return Run.open(folder)


def tokens_per_s(run: Run) -> float:
    ends = [event for event in run.events() if event.kind == "end"]
    return float(ends[-1].data["outcome"]["speed"]["tokens_per_s"])


def write_rows(options: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """The rows of each task as recipe sft and PEFT read them, and of all tasks together."""
    tokenizer = load_tokenizer(str(options.model), documents=None, cache=folder)
    written, everything = {}, []
    for source in sources_of(from_mapping(config(options, phase="1"))):
        rows = [row_of(tokenizer, *pair) for pair in source.solutions(source.train, most=source.size)]
        written[source.name] = folder / f"{source.name}.jsonl"
        written[source.name].write_text("".join(json.dumps(row) + "\n" for row in rows))
        everything += rows
    written["all"] = folder / "all.jsonl"
    written["all"].write_text("".join(json.dumps(row) + "\n" for row in everything))
    return written


def peft_tokens_per_s(options: argparse.Namespace, rows: dict[str, Path]) -> float:
    """Five runs one after the other: all their tokens over all their seconds of training."""
    tokens = seconds = 0.0
    for name in TASKS:
        command = [sys.executable, str(PEER), str(options.model), str(rows[name])]
        command += [str(options.rank), str(options.peer_steps), str(options.peer_batch), options.precision or "bf16"]
        command += [str(options.length)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"PEFT on {name}: {done.stderr.strip()[-800:]}")
        found = json.loads(done.stdout.strip().splitlines()[-1])
        print("peft", name, found, flush=True)
        tokens, seconds = tokens + found["tokens"], seconds + found["seconds"]
    return tokens / seconds


def speed(options: argparse.Namespace, scratch: Path) -> None:
    rows = write_rows(options, scratch)
    mixed = config(options, phase="1", questions=1, answer_tokens=1)
    single = {key: value for key, value in mixed.items() if key not in ("router", "data")} | {
        "recipe": "sft",
        "data": {"source": "jsonl", "path": str(rows["all"]), "sequence_length": options.length,
                 "cache": str(scratch / "cache")},
    }  # fmt: skip
    with measuring("router", commit=options.commit, units=UNITS, to=options.to) as measured:
        for repeat in range(options.repeats):
            for name, values in (("mixed", mixed), ("single", single)):
                found = tokens_per_s(trained(values, scratch / f"{name}-{repeat}"))
                measured[f"{name}{options.suffix}"].append({"tokens_per_s": found})
                print(name, repeat, f"{found:,.0f} tokens/s", flush=True)
            if not options.without_peer:
                found = peft_tokens_per_s(options, rows)
                measured[f"peft{options.suffix}"].append({"tokens_per_s": found})
    for name, wanted in (("single", 0.85), ("peft", 3.0)):
        ours, other = (measured.get(f"{one}{options.suffix}", []) for one in ("mixed", name))
        pairs = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(ours, other, strict=False)]
        if pairs:
            print(f"mixed / {name}: {min(pairs):.2f} to {max(pairs):.2f} (wanted: at least {wanted})", flush=True)


def scores(options: argparse.Namespace, scratch: Path) -> None:
    router = {"router_steps": options.router_steps, "joint_steps": options.router_steps, "questions": options.questions}
    values = config(options, phase="all", **router, answer_tokens=options.answer_tokens)
    values["eval"] |= {"every": 50, "patience": 5}
    run = trained(values, scratch / "phases")
    call, rows = Call(benchmark="router", commit=options.commit or git_commit()), list[Result]()
    for event in run.events():
        if not isinstance(event, PhaseScored):
            continue
        for score in event.scores:
            low, high = (score.value if bound is None else bound for bound in (score.low, score.high))
            at = {"variant": f"{score.task} {score.how}{options.suffix}", "low": low, "high": high}
            rows.append(call.share(metric=score.metric, value=score.value, **at))
            for name, value in (score.measures or {}).items():
                rows.append(call.share(variant=at["variant"], metric=name, value=value, low=value, high=value))
        if event.routed_right is not None:
            rows.append(
                call.share(
                    variant=f"routing after phase {event.phase}{options.suffix}",
                    metric="own adapter",
                    value=event.routed_right,
                    low=event.low or 0.0,
                    high=event.high or 1.0,
                )
            )
            print("confusion after phase", event.phase, event.confusion, flush=True)
    if options.to is not None:
        write(rows, options.to)
    print(table(rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the base model")
    for name in TASKS:
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"file of the task {TASKS[name]}")
    parser.add_argument("--parts", default="speed,table")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), help="default: the plan's")
    parser.add_argument("--size", type=int, default=4000, help="examples of each task, at most")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60, help="of phase 1")
    parser.add_argument("--router-steps", type=int, default=60, help="of phases 2 and 3")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer-steps", type=int, default=20)
    parser.add_argument("--peer-batch", type=int, default=32)
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "router.jsonl")
    options = parser.parse_args()
    options.suffix = f", {options.precision}" if options.precision else ""
    with tempfile.TemporaryDirectory() as name:
        if "speed" in options.parts:
            speed(options, Path(name))
        if "table" in options.parts:
            scores(options, Path(name))


if __name__ == "__main__":
    main()
