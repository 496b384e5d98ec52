"""`flatout doctor`: a script, a run folder or a log file to a diagnosis, said to people or to machines."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from flatout.errors import INTERRUPTED_EXIT, EnvironmentLacks, RunFailed, UsageError
from flatout.hardware import detect
from flatout.insight.attach import Asked, Watched, new_run, watch
from flatout.insight.diagnose import diagnose
from flatout.insight.diagnose.observed import Observed
from flatout.insight.diagnose.ranks import straggler
from flatout.insight.prove import ALL_TOGETHER, Proof, measured, prove
from flatout.record import Diagnosis, Run, redact, redact_command, redacted
from flatout.terminal import table
from flatout.words import number, percent

# Fewer timed steps than these are no measurement.
FEWEST_STEPS = 3


def asked_for(*, steps: int, seconds: float, window: float, then: str, json_to: str | None) -> Asked:
    if then not in ("stop", "continue"):
        raise UsageError(f"--then {then!r} is neither stop nor continue")
    if steps < FEWEST_STEPS + 4:
        raise UsageError(f"--steps {steps} is too few: {FEWEST_STEPS + 4} leave {FEWEST_STEPS} to measure")
    for name, value in (("seconds", seconds), ("window", window)):
        if not value > 0:
            raise UsageError(f"--{name} {value:g} must be above 0")
    if json_to not in (None, "-") and (Path(json_to).is_dir() or not Path(json_to).parent.is_dir()):
        raise UsageError(f"--json {json_to} cannot be written: it is a folder, or its folder does not exist")
    return Asked(
        steps=steps,
        seconds=window,
        limit_s=seconds,
        then="stop" if then == "stop" else "continue",
        stdout_to_stderr=json_to == "-",
    )


def main(
    what: Sequence[str],
    *,
    asked: Asked,
    folder: Path,
    consoles: tuple[Console, Console],
    json_to: str | None,
    proving: bool,
    repeats: int,
    log: Path | None,
    on: str | None,
    params: str | None,
) -> int:
    """One of the three things there are to look at."""
    out, err = consoles
    of_run = log is None and bool(what) and Path(what[0]).is_dir()
    if (proving or "--prove" in what) and (log is not None or of_run):
        raise UsageError(
            f"--prove runs a script again with its fixes, and {what[0] if of_run else '--log FILE'} is no script: "
            "leave --prove out, or give the command as -- python train.py ..."
        )
    if of_run and len(what) > 1:
        raise UsageError(f"{what[0]} is a folder, and {what[1]} follows it: options go before the run folder")
    if log is not None:
        if what:
            raise UsageError("--log FILE takes no command and no run folder beside it")
        from flatout.insight import logs

        say(logs.diagnose(log, on=on, params=params), console=out, json_to=json_to)
        return 0
    if of_run:
        from flatout.insight.diagnose import runs

        run = Run.open(what[0])
        diagnosis = runs.diagnose(run)
        say(diagnosis, console=out, json_to=json_to)
        try:
            run.write_diagnosis(diagnosis)
        except EnvironmentLacks as error:  # a read-only folder is diagnosed all the same
            note(err, f"not kept in the run: {error}")
        return 0
    # With `continue` the script's stdout stays the script's.
    console = err if asked.then == "continue" or json_to == "-" else out
    return script(what, asked=asked, folder=folder, console=console, json_to=json_to, proving=proving, repeats=repeats)


def script(
    command: Sequence[str],
    *,
    asked: Asked,
    folder: Path,
    console: Console,
    json_to: str | None = None,
    proving: bool = False,
    repeats: int = 3,
) -> int:
    """Run a script under the agent, say what is wrong with it, and return the exit code to leave with."""
    if not command:
        raise UsageError("doctor needs something to look at: -- python train.py ..., a run folder, or --log FILE")
    looked = look(command, asked=asked, folder=folder)
    watched, seen = looked.watched, looked.seen
    estimates = {finding.cause: finding.gain for finding in looked.diagnosis.findings}
    proofs: list[Proof] = []
    if proving and seen is not None and not watched.crash and not watched.interrupted:
        proofs = prove(
            command, looked.diagnosis, seen=seen, asked=asked, repeats=repeats, say=lambda text: note(console, text)
        )
    diagnosis = measured(looked.diagnosis, proofs)
    looked.run.write_diagnosis(diagnosis)
    about = {
        "command": shlex.join(redact_command(command)),
        "exit_code": watched.returncode,
        "stopped": watched.stopped,
    }
    extra = {"run": str(folder), "script": about, "estimates": estimates, "proofs": [asdict(proof) for proof in proofs]}
    say(diagnosis, console=console, json_to=json_to, extra=extra, proofs=proofs)
    if watched.left:
        note(console, f"these processes of the script could not be ended: {', '.join(map(str, watched.left))}")
    if asked.then == "continue":
        return _shell_code(watched.returncode)
    if watched.signalled:
        return INTERRUPTED_EXIT
    looked.check()
    return 0


@dataclass(frozen=True, kw_only=True)
class Looked:
    """One look at a script: what was seen of it, and what follows."""

    run: Run
    watched: Watched
    seen: Observed | None
    diagnosis: Diagnosis

    def check(self) -> None:
        """Raises where the script failed by itself, or too little of it was seen."""
        watched = self.watched
        if watched.returncode != 0 and not watched.stopped:
            how = f"the script failed by itself, {_how(watched.returncode)}"
            raise RunFailed(f"{how}. Its last words:\n{watched.crash}")
        if self.seen is None:
            raise RunFailed(self.diagnosis.verdict)


def look(command: Sequence[str], *, asked: Asked, folder: Path) -> Looked:
    """Run a script under the agent; what was seen is in the run folder from then on."""
    hardware = detect()
    run = new_run(folder, command=command, hardware=hardware, asked=asked)
    watched = watch(command, asked=asked, run=run)
    seen = observed(watched, hardware=hardware)
    diagnosis = diagnose(seen) if seen is not None else _nothing(watched)
    return Looked(run=run, watched=watched, seen=seen, diagnosis=diagnosis)


def observed(watched: Watched, *, hardware: Any) -> Observed | None:
    """What the rules look at, rank 0 or the one the others wait for; None where too little was seen to say anything."""
    steps, facts = watched.timed, watched.facts
    if facts is None or len(steps) < FEWEST_STEPS:
        return None
    ranks = {rank: found.timed for rank, found in watched.ranks.items() if len(found.timed) >= FEWEST_STEPS}
    last = straggler(ranks)
    every = watched.steps
    if last is not None:
        steps, every, facts = ranks[last.rank], watched.ranks[last.rank].steps, watched.ranks[last.rank].facts
    return Observed(
        steps=steps,
        facts=facts,
        hardware=hardware,
        samples=watched.samples,
        all_steps=every,
        ranks=ranks,
        straggler=last,
    )


def _nothing(watched: Watched) -> Diagnosis:
    limit_s = watched.timed_out_s
    within = "" if limit_s is None else f" in {limit_s:g} s"
    if watched.facts is not None:
        timed = len(watched.timed)
        why = f"only {timed} steps after warm-up were seen{within}, {FEWEST_STEPS} are needed: "
        why += "let the script take more" if limit_s is None else "give it longer with --seconds"
    else:
        cause = "the command ran no Python with torch from 2.4 on, or did not get to training"
        if watched.was_at is not None:
            cause = f"the script was at {watched.was_at}; give it longer with --seconds"
        why = f"no optimizer step was seen{within}: {cause}"
    return Diagnosis(verdict=why, limit={}, findings=())


def _how(returncode: int) -> str:
    return f"killed by signal {-returncode}" if returncode < 0 else f"with exit code {returncode}"


def _shell_code(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


# -- saying it


def say(
    diagnosis: Diagnosis,
    *,
    console: Console,
    json_to: str | None = None,
    extra: Mapping[str, Any] | None = None,
    proofs: Sequence[Proof] = (),
) -> None:
    """As JSON to a file or stdout, or as text; to a file, both."""
    if json_to is not None:
        text = json.dumps(redacted({**asdict(diagnosis), **(extra or {})}), indent=2, default=str) + "\n"
        if json_to == "-":
            sys.stdout.write(text)
            return
        Path(json_to).write_text(text)
    _print(diagnosis, console=console, proofs=proofs)
    if extra and "run" in extra:
        note(console, f"run folder {extra['run']}")


def _print(diagnosis: Diagnosis, *, console: Console, proofs: Sequence[Proof]) -> None:
    console.print(f"\n[bold]Doctor[/]  {escape(redact(diagnosis.verdict))}", highlight=False, soft_wrap=True)
    if line := limit_line(diagnosis.limit):
        console.print(f"[dim]{escape(line)}[/]", highlight=False, soft_wrap=True)
    for place, finding in enumerate(diagnosis.findings, start=1):
        facts = [f"costs {percent(finding.share)}"] if finding.share else []
        if finding.gain is not None:
            saves = "the fix does not help:" if finding.gain <= 0 and finding.status == "measured" else "a fix saves"
            facts.append(f"{saves} {percent(finding.gain)} ({finding.status})")
        console.print(f"\n[bold]{place}. {finding.cause}[/]  {', '.join(facts)}".rstrip(), highlight=False)
        console.print(f"   {escape(redact(finding.sentence))}", highlight=False, soft_wrap=True)
        for line in finding.evidence:
            console.print(f"   [dim]- {escape(redact(line))}[/]", highlight=False, soft_wrap=True)
        console.print(f"   [green]change:[/] {escape(redact(finding.fix))}", highlight=False, soft_wrap=True)
    if proofs:
        print_proofs(proofs, console=console, fixes={finding.cause: finding.fix for finding in diagnosis.findings})


def print_proofs(proofs: Sequence[Proof], *, console: Console, fixes: Mapping[str, str] | None = None) -> None:
    """What each fix did; with `fixes`, also the change to make."""
    last = () if fixes is None else ("make it permanent",)
    rows = table("Proof", "fix for", "time saved", "spread", "repeats", "loss difference", *last)
    for proof in proofs:
        spread = f"{percent(min(proof.gains))} to {percent(max(proof.gains))}" if proof.gains else "n/a"
        spread = f"failed: {proof.problem}" if proof.problem and fixes is None else spread
        cells = [proof.cause, percent(proof.gain), spread, str(len(proof.gains)), number(proof.loss_difference)]
        if fixes is not None:
            patch = "every change above" if proof.cause == ALL_TOGETHER else fixes.get(proof.cause, "")
            cells.append(f"failed: {proof.problem}" if proof.problem else patch)
        rows.add_row(*(escape(redact(cell)) for cell in cells))
    console.print("", rows)


def limit_line(limit: Mapping[str, Any]) -> str:
    """The speed of light, in one line."""
    if not limit or limit.get("tokens_per_s") is None:
        return ""
    ceiling = limit.get("ceiling_tokens_per_s")
    if ceiling is None:
        why = limit.get("source") if limit.get("peak_flops") is None else limit.get("model")
        return f"{number(limit['tokens_per_s'])} tokens/s; ceiling n/a: {why}"
    known = f"{limit.get('source')}; {limit.get('model')}"
    return f"{number(limit['tokens_per_s'])} tokens/s of at most {number(ceiling)} ({known})"


def note(console: Console, text: str) -> None:
    console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
