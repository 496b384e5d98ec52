"""Damages what flatout left on disk, then uses it: nothing damaged may be used in silence, crash or hang.

    python -m tests.faults.corruption [--count N] [--seed N] [--only KIND]

One run of each recipe, prepared shards, an exported adapter and the caches are made once. Each trial copies one of
them, damages one file of the copy, and gives the copy to a command that reads it. The trial passes if the command
    - ends with an error that names the file or the folder it lies in, or
    - ends well, and says on the way that it did not use the file, or
    - ends well with the result of the undamaged copy, because it did not need the file or the damage changed nothing.
A traceback, a time-out, or another result without a word fails. Prints a line for each failure and a count at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.kills import JOBS, flatout

HANG_S = 300


@dataclass(frozen=True, kw_only=True)
class Artefact:
    """A folder to be damaged, the command that then reads it, and what that command makes of it."""

    command: Callable[[Path], list[str]]  # of the folder that holds the copy, called `it`
    result: Callable[[Path, str], object]  # of that folder, and of what the command printed
    damaged: Callable[[Path], list[Path]]  # the files that may be damaged
    # Logs of numbers carry no checksum: of them only what is no valid record is damage that can be known.
    logs: tuple[str, ...] = ("steps.jsonl", "events.jsonl", "monitor.jsonl", "steps.rollup.jsonl", "config.yaml")


def _files(*patterns: str) -> Callable[[Path], list[Path]]:
    def found(folder: Path) -> list[Path]:
        return sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())

    return found


def _exported(folder: Path, _told: str) -> object:
    return _hashes(folder / "out", "*.safetensors", "tokenizer.json")


def _hashes(folder: Path, *patterns: str) -> dict[str, str]:
    found = (path for pattern in patterns for path in folder.glob(pattern))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def _trained(folder: Path, _told: str) -> object:
    return _made(folder, "it")


def _made(folder: Path, run: str) -> object:
    newest = max((folder / run / "checkpoints").glob("step-*"), default=None)
    return None if newest is None else _hashes(newest, "*.safetensors")


def _training(file: str, setting: str = "", *, run: str = "run", resume: bool = False) -> Callable[[Path], list[str]]:
    """`setting` may name the damaged folder as IT."""

    def command(at: Path) -> list[str]:
        settings = [setting.replace("IT", str(at / "it"))] if setting else []
        more = ["--resume"] if resume else []
        return ["train", str(at / "given" / file), *settings, "--run", str(at / run), *more]

    return command


_RUN = ("*.json", "*.jsonl", "config.yaml", "tokenizer/*", "checkpoints/*", "checkpoints/*/*")

ARTEFACTS: dict[str, Artefact] = {
    "pretrain run, exported": Artefact(
        command=lambda at: ["export", str(at / "it"), "--to", str(at / "out")],
        result=_exported,
        damaged=_files(*_RUN),
    ),
    "pretrain run, resumed": Artefact(
        command=_training("job.yaml", "train.steps=8", run="it", resume=True),
        result=_trained,
        damaged=_files(*_RUN),
    ),
    "pretrain run, reported": Artefact(
        command=lambda at: ["report", str(at / "it"), "-o", str(at / "report.json")],
        result=lambda at, told: (at / "report.json").is_file(),
        damaged=_files("*.json", "*.jsonl"),
    ),
    "sft run, asked": Artefact(
        command=lambda at: ["eval", str(at / "it"), "--tasks", f"perplexity:{at / 'given' / 'text.txt'}", "--json"],
        result=lambda at, told: re.findall(r'"value": ([^,]+)', told),
        damaged=_files("tokenizer/*", "checkpoints/*/*", "plan.json", "config.json"),
    ),
    "sft run, resumed": Artefact(
        command=_training("job.yaml", "train.steps=8", run="it", resume=True),
        result=_trained,
        damaged=_files(*_RUN),
    ),
    "rft run, resumed": Artefact(
        command=_training("job.yaml", run="it", resume=True),
        result=_trained,
        damaged=_files("samples/*", "samples/*/*", "student/*", "taught/checkpoints/*/*", "round-1/checkpoints/*/*",
                       "taught/*.json", "round-1/*.json", "tokenizer/*"),
    ),
    "shards, trained on": Artefact(
        command=_training("tokens.yaml", "data.path=IT"),
        result=lambda at, told: _made(at, "run"),
        damaged=_files("*/*", "*.json"),
    ),
    "data cache, trained on": Artefact(
        command=_training("job.yaml", "data.cache=IT"),
        result=lambda at, told: _made(at, "run"),
        damaged=_files("**/*"),
    ),
    "sft cache, trained on": Artefact(
        command=_training("job.yaml", "data.cache=IT"),
        result=lambda at, told: _made(at, "run"),
        damaged=_files("**/*"),
    ),
    "adapter, trained on": Artefact(
        command=_training("job.yaml", "lora.adapter=IT"),
        result=lambda at, told: _made(at, "run"),
        damaged=_files("adapter_*"),
    ),
}  # fmt: skip


# -- damage ------------------------------------------------------------------------------------------------


def _flip(path: Path, chance: random.Random, _outside: Path) -> str:
    content = bytearray(path.read_bytes())
    at = chance.randrange(len(content))
    content[at] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return f"bit flipped in byte {at}"


def _cut(path: Path, chance: random.Random, _outside: Path) -> str:
    size = chance.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"cut to {size} bytes"


def _grow(path: Path, chance: random.Random, _outside: Path) -> str:
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.randrange(1, 64)))
    return "grown"


def _noise(path: Path, chance: random.Random, _outside: Path) -> str:
    path.write_bytes(chance.randbytes(max(1, path.stat().st_size)))
    return "replaced by noise"


def _delete(path: Path, _chance: random.Random, _outside: Path) -> str:
    path.unlink()
    return "deleted"


def _pipe(path: Path, _chance: random.Random, _outside: Path) -> str:
    path.unlink()
    os.mkfifo(path)
    return "replaced by a named pipe"


def _folder(path: Path, _chance: random.Random, _outside: Path) -> str:
    path.unlink()
    path.mkdir()
    return "replaced by a folder"


def _link(path: Path, _chance: random.Random, outside: Path) -> str:
    shutil.copy(path, outside)
    path.unlink()
    path.symlink_to(outside)
    return "replaced by a link to the same content elsewhere"


def _swap(path: Path, chance: random.Random, _outside: Path) -> str:
    within = next(one for one in path.parents if one.name == "it")
    alike = [one for one in within.rglob(f"*{path.suffix}") if one.is_file() and one != path]
    alike = [one for one in alike if one.read_bytes() != path.read_bytes()]
    if not alike:
        return _flip(path, chance, _outside)
    other = chance.choice(sorted(alike))
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)
    return f"swapped with {other.name}"


_VALUES: list[Any] = [None, True, -1, 0, 10**18, 10**400, 1e308, "x", "", [], {}, [[[]]], "../../etc/passwd", "NaN"]


def _value(path: Path, chance: random.Random, _outside: Path) -> str:
    """One value somewhere in the JSON, or in one of its lines, becomes something else."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = chance.randrange(len(lines))
    value = json.loads(lines[number])
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])

    walk(value)
    node, key = chance.choice(places)
    new = chance.choice([one for one in _VALUES if one != node[key] or type(one) is not type(node[key])])
    node[key] = new
    sys.set_int_max_str_digits(0)
    lines[number] = json.dumps(value)
    path.write_text("\n".join(lines) + ("\n" if path.suffix == ".jsonl" else ""))
    return f"{key} became {str(new)[:20]!r}"


def _deep(path: Path, _chance: random.Random, _outside: Path) -> str:
    path.write_text("[" * 200_000)
    return "nested 200,000 deep"


ANY = (_flip, _flip, _cut, _grow, _noise, _delete, _pipe, _folder, _link, _swap)
JSON = (_value, _value, _value, _deep)
# A record that is no record. Their numbers are not hashed, and one of them may be cut at any time by a kill.
LOGS = (_noise, _pipe, _folder, _link, _deep)


def _damage(path: Path, artefact: Artefact, chance: random.Random, outside: Path) -> str:
    if path.name in artefact.logs:
        kinds: tuple[Any, ...] = LOGS
    elif path.suffix in (".json", ".jsonl"):
        kinds = ANY + JSON
    else:
        kinds = ANY
    kind = chance.choice(kinds)
    if path.stat().st_size == 0 and kind in (_flip, _cut, _value):
        kind = _noise
    return str(kind(path, chance, outside))


# -- trials ------------------------------------------------------------------------------------------------


def make(root: Path) -> dict[str, Path]:
    """Everything that is damaged later, by the folder name of its artefact."""
    made: dict[str, Path] = {}
    for name in ("pretrain", "sft", "rft"):
        given, job = root / name / "given", root / name / "job"
        given.mkdir(parents=True)
        job.mkdir()
        JOBS[name].give(given)
        (given / "text.txt").write_text("How many grams are there in 2 kilograms? 2000 grams.\n" * 8)
        done = flatout(JOBS[name].arguments(job), cwd=job, environment={})
        assert done.returncode == 0, done.stderr
        made[name] = root / name
    pretrain, sft = root / "pretrain", root / "sft"
    source = str(pretrain / "given" / "documents.jsonl")
    shards = ["data", "prepare", source, "--tokenizer", "bpe:300", "--to", str(root / "shards")]
    for arguments in (shards, ["export", str(sft / "job" / "run"), "--to", str(root / "adapter")]):
        done = flatout(arguments, cwd=root, environment={})
        assert done.returncode == 0, done.stderr
    config = json.loads((pretrain / "given" / "job.yaml").read_text())
    config["data"] = {"source": "tokens", "sequence_length": 32}
    (pretrain / "given" / "tokens.yaml").write_text(json.dumps(config))
    return made


def _source(root: Path, name: str) -> tuple[Path, Path]:
    """What is copied and damaged, and the folder `given` that goes with it."""
    recipe = name.split()[0]
    if name.startswith("shards"):
        return root / "shards", root / "pretrain" / "given"
    if name.startswith("data cache"):
        return root / "pretrain" / "job" / "cache", root / "pretrain" / "given"
    if name.startswith("sft cache"):
        return root / "sft" / "job" / "cache", root / "sft" / "given"
    if name.startswith("adapter"):
        return root / "adapter", root / "sft" / "given"
    return root / recipe / "job" / "run", root / recipe / "given"


def _at(root: Path, name: str, home: Path) -> None:
    """A fresh copy, under the same names each time: paths are part of what is recorded."""
    shutil.rmtree(home, ignore_errors=True)
    source, given = _source(root, name)
    home.mkdir()
    shutil.copytree(source, home / "it", symlinks=True)
    (home / "given").symlink_to(given)
    if name == "rft run, resumed":  # as if killed before the last training: everything before it is read again
        shutil.rmtree(home / "it" / "checkpoints")
    if "cache" in name:
        return
    cache = source.parent / "cache"
    if cache.is_dir():
        shutil.copytree(cache, home / "cache")


def trial(root: Path, name: str, number: int, *, seed: int, expected: dict[str, object]) -> str | None:
    """What went wrong; None where nothing did."""
    artefact, home, chance = ARTEFACTS[name], root / "trial", random.Random(f"{seed} {number}")
    _at(root, name, home)
    path = chance.choice(artefact.damaged(home / "it"))
    outside = root / "outside"
    how = _damage(path, artefact, chance, outside)
    what = f"{name}: {path.relative_to(home / 'it')} {how}"
    try:
        done = flatout(artefact.command(home), cwd=home, environment={}, hang_s=HANG_S)
    except TimeoutError:
        return f"{what}: no end after {HANG_S} s"
    told = done.stdout + done.stderr
    if "Traceback" in told or done.returncode not in (0, 2, 3, 4):
        return f"{what}: exit {done.returncode}, {told[-500:]}"
    names = {path.name, path.parent.name, *(("samples",) if "samples" in path.parts else ())}
    named = any(one in told for one in names if one != "it") or str(home / "it") in done.stderr
    if done.returncode != 0:
        return None if named else f"{what}: not named: {told[-500:]}"
    if artefact.result(home, done.stdout) == expected[name]:
        return None
    # A checkpoint that is passed over is named with its file and what is wrong with it.
    passed_over = re.search(rf"{path.parent.name}: .*({path.name}|missing|link)", told)
    rebuilt = passed_over or any(word in told for word in ("again", "instead", "not used"))
    return None if named and rebuilt else f"{what}: another result, and nobody said so: {told[-300:]}"


def undamaged(root: Path, name: str) -> object:
    _at(root, name, root / "trial")
    done = flatout(ARTEFACTS[name].command(root / "trial"), cwd=root / "trial", environment={}, hang_s=HANG_S)
    assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
    return ARTEFACTS[name].result(root / "trial", done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    names = [name for name in ARTEFACTS if given.only in name]
    tried: Counter[str] = Counter()
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make(root)
        expected = {name: undamaged(root, name) for name in names}
        for number in range(given.count):
            name = names[number % len(names)]
            problem = trial(root, name, number, seed=given.seed, expected=expected)
            tried[name] += 1
            if problem is not None:
                bad += 1
                print(f"  {number}: {problem}", flush=True)
    for name, count in tried.items():
        print(f"{name}: {count}")
    print(f"{sum(tried.values())} damaged, {bad} used in silence, crashed or unnamed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
