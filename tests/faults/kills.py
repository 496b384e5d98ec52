"""Kills a short job at every call that writes, lets it go on by the same command, and compares what it leaves.

    python -m tests.faults.kills {pretrain,sft,rft,rl,prepare} [--from N] [--every N]

A library preloaded into the process (`writes.c`) counts the calls that change files of the job and ends the process
with SIGKILL at one of them. For each call of an undisturbed job, the job is begun in fresh folders, killed there, and
started again by the same command (`--resume` where a run folder stands). It must end with exit code 0, leave the same
weights, steps and files bit for bit, and no temporary file. Prints a line for each failure and a count at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("writes.c")


def built(folder: Path) -> Path:
    """The library that kills, compiled."""
    library = folder / "writes.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", library, SOURCE, "-ldl"], check=True)
    return library


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command that works in a fresh folder, on what lies in `given` beside it, and what its result consists of."""

    arguments: Callable[[Path], list[str]]
    result: Callable[[Path], dict[str, object]]
    made: Path  # relative: once it stands, the command goes on with `resume`
    give: Callable[[Path], None]  # writes what the job reads, once for all trials
    resume: tuple[str, ...] = ()


def _write_yaml(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))  # JSON is YAML


def _documents(folder: Path) -> None:
    rows = ({"text": " ".join(str(i * j % 97) for j in range(60))} for i in range(120))
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


_PLAN = {"precision": "fp32", "threads": 1}
_MODEL = {"layers": 1, "hidden": 16, "heads": 2}


def _pretrain(folder: Path) -> None:
    _documents(folder)
    data = {"source": "jsonl", "path": str(folder / "documents.jsonl"), "tokenizer": "bpe:300", "sequence_length": 32}
    train = {"batch_tokens": 128, "steps": 6, "lr": 3e-3, "warmup_steps": 2}
    config = {"recipe": "pretrain", "model": _MODEL, "data": data, "train": train, "plan": _PLAN}
    more = {"eval": {"every": 3, "tokens": 256}, "save": {"every": 2, "best": True}}
    _write_yaml(folder / "job.yaml", config | more)


def _sft(folder: Path) -> None:
    import torch
    from tests.data.talks import tokenizer_folder, write_rows
    from transformers import LlamaConfig, LlamaForCausalLM

    base = tokenizer_folder(folder / "base")
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=320, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(base)
    rows = write_rows(folder / "rows.jsonl", count=60)
    data = {"source": "jsonl", "path": str(rows), "sequence_length": 128, "valid_share": 0.1}
    train = {"batch_tokens": 512, "steps": 6, "lr": 2e-2, "warmup_steps": 2}
    config = {"recipe": "sft", "model": str(base), "data": data, "train": train, "plan": _PLAN}
    _write_yaml(folder / "job.yaml", config | {"lora": {"rank": 4, "alpha": 8}, "save": {"every": 3}})


def _rft(folder: Path) -> None:
    def questions(name: str, numbers: range) -> str:
        rows = ({"question": f"{i}?", "answer": f"#### {i % 10}"} for i in numbers)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"gsm8k:{folder / name}"

    config = {
        "recipe": "rft",
        "model": _MODEL | {"hidden": 32},
        "data": {"tokenizer": "byte", "sequence_length": 48},
        "rft": {
            "teach": questions("shown.jsonl", range(100, 120)),
            "teach_steps": 40,
            "teach_lr": 1e-2,
            "task": questions("train.jsonl", range(200, 216)),
            "valid": questions("valid.jsonl", range(300, 308)),
            "prompt": "bare",
            "oversample": 4,
            "first": 4,
            "chunk": 8,
            "rounds": 2,
        },
        "sample": {"max_tokens": 8, "rows": 32},
        "train": {"batch_tokens": 240, "steps": 3, "lr": 3e-3},
        "save": {"every": 20},
        "lora": {"rank": None},
        "plan": _PLAN,
    }
    _write_yaml(folder / "job.yaml", config)


def _rl(folder: Path) -> None:
    # The last number of a random text is now and then the digit of the answer.
    rows = ({"question": f"{i}?", "answer": f"#### {i % 10}"} for i in range(40))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [f"gsm8k:{folder / 'train.jsonl'}?prompt=bare"]
    config = {
        "recipe": "rl",
        "model": _MODEL,
        "data": {"sequence_length": 48},
        "rl": {"tasks": tasks, "prompts": 8, "samples": 8, "updates": 2, "algorithm": "ppo"},
        "sample": {"max_tokens": 12},
        "train": {"steps": 6, "lr": 3e-3},
        "plan": _PLAN,
        "save": {"every": 2},
    }
    _write_yaml(folder / "job.yaml", config)


def _train(folder: Path) -> list[str]:
    return ["train", str(folder.parent / "given" / "job.yaml"), "--run", str(folder / "run")]


def _trained(folder: Path) -> dict[str, object]:
    """What a run comes to: each step once, the newest weights and optimizer, the datasets and scores between."""
    from flatout.record import Run

    run, found = Run.open(folder / "run"), {}
    found["steps"] = [(r.step, r.loss, r.extra.grad_norm, r.extra.lr) for r in run.latest_steps()]
    newest = max((folder / "run" / "checkpoints").glob("step-*"))
    for path in [*newest.glob("*.safetensors"), *(folder / "run").glob("samples/round-*.jsonl")]:
        found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    for path in (folder / "run").glob("samples/score-*.json"):
        found[path.name] = json.loads(path.read_text())["rewards"]
    # What export needs is there and whole.
    out = folder / "exported"
    exported = flatout(["export", str(folder / "run"), "--to", str(out)], cwd=folder, environment={})
    found["export"] = (exported.returncode, sorted(path.name for path in out.iterdir()) if out.is_dir() else [])
    shutil.rmtree(out, ignore_errors=True)
    return found


def _prepared(folder: Path) -> dict[str, object]:
    files = (path for path in (folder / "shards").rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


JOBS = {
    "pretrain": Job(arguments=_train, result=_trained, made=Path("run"), resume=("--resume",), give=_pretrain),
    "sft": Job(arguments=_train, result=_trained, made=Path("run"), resume=("--resume",), give=_sft),
    "rft": Job(arguments=_train, result=_trained, made=Path("run"), resume=("--resume",), give=_rft),
    "rl": Job(arguments=_train, result=_trained, made=Path("run"), resume=("--resume",), give=_rl),
    "prepare": Job(
        arguments=lambda folder: [
            *("data", "prepare", str(folder.parent / "given" / "documents.jsonl"), "--tokenizer", "bpe:300"),
            *("--to", str(folder / "shards")),
        ],
        result=_prepared,
        made=Path("nothing"),
        give=_documents,
    ),
}


def flatout(
    arguments: list[str], *, cwd: Path, environment: dict[str, str], hang_s: float = 600
) -> subprocess.CompletedProcess[str]:
    """The command in a process forked from one that has imported everything already; TimeoutError if it hangs."""
    from tests.warm import Started

    before = dict(os.environ)
    os.environ.update({"FLATOUT_CACHE": str(cwd / "cache")} | environment)
    try:
        started = Started(*arguments, cwd=cwd)
        out, err = started.communicate(timeout=hang_s)
        return subprocess.CompletedProcess(arguments, started.wait(), out, err)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no end after {hang_s} s") from None
    finally:
        os.environ.clear()
        os.environ.update(before)


def litter(folder: Path) -> list[str]:
    """Temporary files and folders that nobody removed."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if ".tmp" in path.name or path.name.endswith(("~", ".part"))
    )


def trial(job: Job, folder: Path, *, at: int, expected: dict[str, object]) -> tuple[bool, list[str]]:
    """Whether the job was killed at call `at`, and what went wrong after that."""
    folder.mkdir()
    killed = flatout(job.arguments(folder), cwd=folder, environment=_watching(folder) | {"FAULT_AT": str(at)})
    if killed.returncode == 0:
        return False, []
    if killed.returncode != -9:
        return True, [f"ended with {killed.returncode} instead of SIGKILL: {killed.stderr[-300:]}"]
    resume = job.resume if (folder / job.made).exists() else ()
    again = flatout([*job.arguments(folder), *resume], cwd=folder, environment={})
    if again.returncode != 0:
        return True, [f"did not go on, exit {again.returncode}: {again.stderr[-400:] or again.stdout[-400:]}"]
    try:
        found = job.result(folder)
    except Exception as error:  # whatever it is, it belongs into the list
        return True, [f"cannot be read afterwards: {error}"]
    problems = [
        f"{key} differs: {found.get(key)!s:.80} for {value!s:.80}"
        for key, value in expected.items()
        if found.get(key) != value
    ]
    return True, problems + [f"left behind: {path}" for path in litter(folder)]


def _watching(folder: Path) -> dict[str, str]:
    return {"FAULT_ROOTS": ":".join(str(folder / name) for name in ("run", "cache", "shards"))}


def undisturbed(job: Job, folder: Path) -> tuple[dict[str, object], list[str]]:
    """The result of the job, and the calls it makes that write."""
    folder.mkdir()
    log = folder / "calls"
    done = flatout(job.arguments(folder), cwd=folder, environment=_watching(folder) | {"FAULT_LOG": str(log)})
    if done.returncode != 0:
        raise SystemExit(f"the undisturbed job fails: {done.stderr}")
    calls = [line.replace(str(folder), "") for line in log.read_text().splitlines()]
    return job.result(folder), calls


def failures(name: str, *, first: int = 1, every: int = 1) -> Iterator[tuple[int, list[str]]]:
    """Each call at which the job was killed, and what went wrong."""
    with tempfile.TemporaryDirectory() as made:
        # Always the same folder: its name is in what the job writes.
        job, folder = JOBS[name], Path(made) / "job"
        (folder.parent / "given").mkdir()
        job.give(folder.parent / "given")
        _preload(built(Path(made)))
        expected, calls = undisturbed(job, folder)
        shutil.rmtree(folder)
        print(f"{name}: {len(calls)} calls that write", flush=True)
        for at in range(first, len(calls) + 1, every):
            was_killed, problems = trial(job, folder, at=at, expected=expected)
            if was_killed:
                yield at, [f"{calls[at - 1]}: {problem}" for problem in problems]
            shutil.rmtree(folder)


def _preload(library: Path) -> None:
    """Starts the process that all others are forked from, with the library in it; it watches nothing itself."""
    os.environ["LD_PRELOAD"] = str(library)
    try:
        flatout(["--help"], cwd=Path.cwd(), environment={})
    finally:
        del os.environ["LD_PRELOAD"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--from", dest="first", type=int, default=1)
    parser.add_argument("--every", type=int, default=1)
    given = parser.parse_args()
    kills = bad = 0
    for at, problems in failures(given.job, first=given.first, every=given.every):
        kills, bad = kills + 1, bad + bool(problems)
        for problem in problems:
            print(f"  killed at {at}: {problem}", flush=True)
    print(f"{given.job}: {kills} kills, {bad} did not go on as if nothing had happened")
    return 1 if bad or not kills else 0


if __name__ == "__main__":
    sys.exit(main())
