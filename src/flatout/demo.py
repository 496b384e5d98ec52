"""`flatout demo`: a slow script, why it is slow, the fixes measured, and the same job done by flatout.

The script is `examples/slow/train.py`, run by the doctor as any other would be. Every number is measured in this call.
If the doctor fails, the demo reports it and continues; only the training decides whether the demo succeeds.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flatout import gallery, recipes
from flatout.config import load
from flatout.config.settings import Settings
from flatout.data import embedded
from flatout.data.prepare import prepare
from flatout.engine.trained import open_trained
from flatout.errors import UsageError
from flatout.files import write_atomic
from flatout.hardware import Hardware, detect
from flatout.insight import doctor, report
from flatout.insight.attach import Asked
from flatout.insight.prove import Proof, change_for, measured, prove
from flatout.model import Decoder
from flatout.record import Outcome, Run
from flatout.sample import complete
from flatout.terminal import View, table
from flatout.words import number

T = TypeVar("T")

CONFIG, SCRIPT = "pretrain-demo", Path("slow") / "train.py"
PROMPT = "One morning"
# How many stories are sampled to find one that is longer than a line.
DRAWS, LINE = 4, 80
# Short, because users wait for it: one diagnosis, and a few steps for each fix.
LOOK = Asked(steps=8, seconds=45.0, quiet=True)
PROOF = Asked(steps=7, seconds=2.0, quiet=True)
MOST_PROOFS, REPEATS = 3, 3


def run(folder: Path, *, console: Console, repeats: int = REPEATS, overrides: Sequence[str] = ()) -> Outcome:
    """Tell the story; `folder` becomes the run of flatout, `folder/slow` that of the script."""
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not an empty folder, and nothing is overwritten: choose another with --run")
    settings = load(gallery.find(CONFIG).path, overrides=overrides).settings
    tell = Story(console)

    with tell.chapter("The machine", "The hardware that the demo trains on."):
        console.print(*machine(detect()), sep="\n", highlight=False, markup=False)

    with tell.chapter("A slow script", "Plain PyTorch, a typical first script, run unchanged by the doctor."):
        command = slow_job(settings, folder / "slow" / "script")
        tell.note(f"flatout doctor -- {shlex.join(command)}")
        looked = tell.unless_it_fails(lambda: examine(command, folder=folder / "slow", console=console))

    proofs: Sequence[Proof] = ()
    if looked is not None and repeats:
        with tell.chapter("The fixes", "The fixes that are switches, applied by the agent and measured on the script."):
            proofs = tell.unless_it_fails(lambda: proved(command, looked, repeats=repeats, console=console)) or ()

    with tell.chapter(
        "The same job by flatout", "Same model, same text, same tokens per step; the plan decides the rest."
    ):
        outcome = train(settings, folder=folder, console=console)
    if outcome.stopped_by.startswith("SIG"):
        return outcome

    with tell.chapter("The speed-up", "Both measured in this call, on this machine; padding is not counted as tokens."):
        console.print(comparison(looked, proofs, outcome))
        if looked is not None and looked.seen is not None and looked.seen.is_disturbed:
            busy = number(looked.seen.others_cores, digits=2)
            tell.note(f"Other processes kept {busy} cores busy while the script was watched, so the ratio is rough.")

    with tell.chapter("The report", "Both runs side by side, with the source of each number."):
        runs = [Run.open(folder), *([looked.run] if looked is not None else [])]
        write_atomic(runs[0].report_path, report.render(runs).encode())
        for line in ending(folder, command=command, watched=looked is not None):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return outcome


class Story:
    """Chapters with a heading, a sentence, and at their end the time they took."""

    def __init__(self, console: Console) -> None:
        self.console, self.chapters = console, 0

    @contextmanager
    def chapter(self, title: str, sentence: str) -> Iterator[None]:
        self.chapters += 1
        self.console.print()
        self.console.rule(f"[bold]{self.chapters}. {title}[/]", align="left")
        self.console.print(f"{sentence}\n", highlight=False)
        began = time.perf_counter()
        yield
        self.note(f"\n({time.perf_counter() - began:.0f} s)")

    def unless_it_fails(self, part: Callable[[], T]) -> T | None:
        """The result of `part`; if the doctor does not work here, prints the reason and returns None."""
        try:
            return part()
        except Exception as error:
            self.console.print(f"[yellow]This did not work here:[/] {escape(str(error))}", highlight=False)
            self.console.print("The demo continues without it.")
            return None

    def note(self, text: str) -> None:
        doctor.note(self.console, text)


# -- the parts


def machine(hardware: Hardware) -> list[str]:
    gpu = "no GPU: everything runs on the CPU"
    if hardware.gpu:
        gpu = f"{hardware.num_gpus} x {hardware.gpu}, {number(hardware.memory_gib, unit=' GiB')} each"
    cpu = f"{hardware.cpu}, " if hardware.cpu else ""
    return [gpu, f"{cpu}{hardware.num_cpus or 'n/a'} cores, {number(hardware.ram_gib, unit=' GiB')} of RAM"]


def slow_job(settings: Settings, folder: Path) -> list[str]:
    """The script with the documents and the tokenizer that flatout trains with, ready to run, look at and change."""
    folder.mkdir(parents=True)
    shutil.copy(gallery.folder() / SCRIPT, folder / SCRIPT.name)
    prepare(settings.data, seed=settings.seed).tokenizer.save(folder)
    with (folder / "documents.jsonl").open("w") as file:
        for text in embedded.documents(settings.seed, settings.data.embedded_mb):
            file.write(json.dumps({"text": text}) + "\n")
    return [sys.executable, str(folder / SCRIPT.name)]


def examine(command: Sequence[str], *, folder: Path, console: Console) -> doctor.Examined:
    looked = doctor.look(command, asked=LOOK, folder=folder)
    if looked.watched.interrupted:
        raise KeyboardInterrupt
    looked.check()
    looked.run.write_diagnosis(looked.diagnosis)
    doctor.say(looked.diagnosis, console=console)
    return looked


def proved(command: Sequence[str], looked: doctor.Examined, *, repeats: int, console: Console) -> list[Proof]:
    """The first few switches, one by one and together; what they measured goes into the diagnosis."""
    seen, diagnosis = looked.seen, looked.diagnosis
    assert seen is not None
    switches = tuple(finding for finding in diagnosis.findings if change_for(finding, seen) is not None)[:MOST_PROOFS]
    if not switches:
        console.print("No fix is a switch here: each one is a code change.")
        return []
    proofs = prove(
        command,
        replace(diagnosis, findings=switches),
        seen=seen,
        asked=PROOF,
        repeats=repeats,
        say=lambda text: doctor.note(console, text),
    )
    looked.run.write_diagnosis(measured(diagnosis, proofs))
    doctor.print_proofs(proofs, console=console)
    return proofs


def train(settings: Settings, *, folder: Path, console: Console) -> Outcome:
    outcome = recipes.run(settings, folder=folder, sinks=[View(console, every=settings.log.every)])
    if outcome.stopped_by.startswith("SIG"):
        return outcome
    trained = open_trained(Run.open(folder))
    for notice in trained.notices:
        console.print(notice, style="yellow", markup=False, highlight=False)
    assert isinstance(trained.model, Decoder)
    draws = (
        complete(trained.model, trained.tokenizer, PROMPT, max_new_tokens=120, temperature=0.7, seed=settings.seed + i)
        for i in range(DRAWS)
    )
    # A story may end after a word; the first that does not is shown.
    text = max(draws, key=lambda story: min(len(story), LINE))
    console.print("\n[bold]It generates[/]")
    console.print(text, markup=False, highlight=False)
    return outcome


def comparison(looked: doctor.Examined | None, proofs: Sequence[Proof], outcome: Outcome) -> Table:
    """Tokens a second: the script as it is, with the switches, and flatout."""
    rows = table("", "", "tokens per step", "tokens/s", "times as fast")
    slow = looked.diagnosis.limit.get("tokens_per_s") if looked is not None else None
    if looked is not None and looked.seen is not None:
        seen = looked.seen
        tokens = None if seen.real_tokens is None else seen.real_tokens / len(seen.steps)
        rows.add_row("the unchanged script", number(tokens), number(slow), "1")
        for proof in proofs[-1:]:  # all together, where there are several
            if slow is not None and proof.gain is not None:
                left = 1 - proof.gain
                rows.add_row(f"the script with its fix: {proof.cause}", "", number(slow / left), number(1 / left))
    ours = outcome.speed.tokens_per_s
    times = None if slow is None or ours is None else ours / slow
    rows.add_row("flatout", number(outcome.tokens / outcome.steps), number(ours), f"[bold]{number(times)}[/]")
    return rows


def ending(folder: Path, *, command: Sequence[str], watched: bool) -> list[str]:
    ours, script = shlex.quote(str(folder)), shlex.join(["python", *command[1:]])
    return [
        f"Report: {Run.open(folder).report_path}",
        f"Run folder: {folder}" + (f"; the script's: {folder / 'slow'}" if watched else ""),
        "",
        "What to try next:",
        f"  flatout doctor --prove -- {script}    change the script, then look again; or take your own",
        f"  flatout watch {ours} --web    the run as a live page",
        "  flatout examples pretrain-124m --to mine.yaml    a configuration to start from",
    ]
