"""`flatout doctor`: diagnoses a script, a run folder or a log file, and prints the result as text or JSON."""

from __future__ import annotations

import json
import math
import shlex
import shutil
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
from flatout.output import out, write_file
from flatout.record import Diagnosis, Run, redact, redact_command, redacted
from flatout.terminal import table
from flatout.words import number, percent

# With fewer timed steps than this, nothing is reported.
FEWEST_STEPS = 3


def asked_for(*, steps: int, seconds: float, window: float, then: str, json_to: str | None) -> Asked:
    if then not in ("stop", "continue"):
        raise UsageError(f"--then {then!r} must be stop or continue")
    if steps < FEWEST_STEPS + 4:
        raise UsageError(
            f"--steps {steps} is too few: at least {FEWEST_STEPS + 4} are needed to measure {FEWEST_STEPS}"
        )
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
    config: Path | None,
    log: Path | None,
    on: str | None,
    params: str | None,
    target_loss: float | None,
) -> int:
    """Diagnoses a script, a run folder or a log, and returns the exit code."""
    out, err = consoles
    of_run = log is None and bool(what) and Path(what[0]).is_dir()
    if (proving or "--prove" in what) and log is not None:
        raise UsageError(
            "--prove runs the training again with its fixes, and --log FILE is not a script: remove --prove, or give "
            "the command as -- python train.py ..."
        )
    if config is not None and not (of_run and proving):
        raise UsageError("--config FILE names the configuration for RUN --prove: give both, or remove it")
    if of_run and proving and config is None:
        raise UsageError(
            f"{what[0]} --prove needs --config FILE, the configuration to train again for a few steps with each fix: "
            f"{what[0]}/config.yaml is a copy, if you trust that folder"
        )
    if of_run and len(what) > 1:
        raise UsageError(f"{what[0]} is a folder, but {what[1]} follows it: give one run folder at a time")
    if target_loss is not None and log is None:
        raise UsageError("--target-loss needs --log FILE: a run of flatout has target.val_loss in its configuration")
    if target_loss is not None and not 0 < target_loss < math.inf:
        raise UsageError(f"--target-loss {target_loss:g} is not a loss: it must be above 0, such as 3.0")
    if log is not None:
        if what:
            raise UsageError("--log FILE cannot be combined with a command or a run folder: give one of them")
        from flatout.insight import logs

        say(logs.diagnose(log, on=on, params=params, target_loss=target_loss), console=out, json_to=json_to)
        return 0
    if of_run:
        from flatout.insight.diagnose import runs

        run = Run.open(what[0])
        diagnosis = runs.diagnose(run)
        proofs: list[Proof] = []
        if config is not None:
            from flatout.insight.prove_run import prove_run

            proofs = prove_run(
                run, diagnosis, config=config, folder=folder, repeats=repeats, say=lambda text: note(err, text)
            )
            if not proofs:
                note(err, "nothing to prove: no fix of these findings is a setting that short runs can measure")
            diagnosis = measured(diagnosis, proofs)
        extra = {"proofs": [asdict(proof) for proof in proofs]} if proofs else None
        say(diagnosis, console=out, json_to=json_to, extra=extra, proofs=proofs)
        try:
            run.write_diagnosis(diagnosis)
        except EnvironmentLacks as error:  # a read-only folder can still be diagnosed
            note(err, f"not saved in the run: {error}")
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
    """Runs a script under the agent, prints the diagnosis, and returns the exit code."""
    if not command:
        raise UsageError("doctor needs something to diagnose: -- python train.py ..., a run folder, or --log FILE")
    if shutil.which(command[0]) is None and not Path(command[0]).exists():
        raise UsageError(
            f"{command[0]} is neither a run folder nor a command: give a run folder, or -- python train.py ..."
        )
    looked = look(command, asked=asked, folder=folder)
    watched, seen = looked.watched, looked.seen
    estimates = {finding.cause: finding.gain for finding in looked.diagnosis.findings}
    proofs: list[Proof] = []
    if proving and seen is not None and not watched.crash and not watched.interrupted:
        proofs = prove(
            command,
            looked.diagnosis,
            seen=seen,
            asked=asked,
            repeats=repeats,
            run_s=watched.run_s(asked, step_s=seen.step_s),
            say=lambda text: note(console, text),
        )
    diagnosis = measured(looked.diagnosis, proofs)
    looked.run.write_diagnosis(diagnosis)
    about = {
        "command": shlex.join(redact_command(command)),
        "exit_code": watched.returncode,
        "stopped": watched.stopped,
        **({} if seen is None else {"framework": seen.framework, "version": seen.framework_version}),
    }
    extra = {"run": str(folder), "script": about, "estimates": estimates, "proofs": [asdict(proof) for proof in proofs]}
    say(diagnosis, console=console, json_to=json_to, extra=extra, proofs=proofs)
    if watched.left:
        note(console, f"these processes of the script could not be stopped: {', '.join(map(str, watched.left))}")
    if asked.then == "continue":
        return _shell_code(watched.returncode)
    if watched.signalled:
        return INTERRUPTED_EXIT
    looked.check()
    return 0


@dataclass(frozen=True, kw_only=True)
class Examined:
    """One watched run of a script: the observations and the diagnosis."""

    run: Run
    watched: Watched
    seen: Observed | None
    diagnosis: Diagnosis

    def check(self) -> None:
        """Raises if the script itself failed, or if too few steps were observed."""
        watched = self.watched
        if watched.returncode != 0 and not watched.stopped:
            how = f"the script itself failed, {_how(watched.returncode)}"
            raise RunFailed(f"{how}. Its last output:\n{watched.crash}")
        if self.seen is None:
            raise RunFailed(self.diagnosis.verdict)


def look(command: Sequence[str], *, asked: Asked, folder: Path) -> Examined:
    """Runs a script under the agent and records the observations in the run folder."""
    hardware = detect()
    run = new_run(folder, command=command, hardware=hardware, asked=asked)
    watched = watch(command, asked=asked, run=run)
    seen = observed(watched, hardware=hardware, then=asked.then)
    diagnosis = diagnose(seen) if seen is not None else _nothing(watched)
    return Examined(run=run, watched=watched, seen=seen, diagnosis=diagnosis)


def observed(watched: Watched, *, hardware: Any, then: str = "stop") -> Observed | None:
    """The input of the rules, from rank 0 or from the straggler; None if too little was observed."""
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
        no_replays=_no_replays(watched, then=then),
    )


def _no_replays(watched: Watched, *, then: str) -> str:
    if watched.crash:
        return "the script failed first"
    if then == "continue":
        return "--then continue replays nothing"
    return "time was up first" if watched.timed_out_s is not None else "the script ended first"


def _nothing(watched: Watched) -> Diagnosis:
    limit_s = watched.timed_out_s
    within = "" if limit_s is None else f" in {limit_s:g} s"
    if watched.facts is not None:
        timed = len(watched.timed)
        why = f"only {timed} steps after warm-up were observed{within}, {FEWEST_STEPS} are needed: "
        why += "let the script run more steps" if limit_s is None else "give it more time with --seconds"
    else:
        cause = _no_step(watched.progress)
        if watched.was_at is not None:
            cause += f"; the script was at {watched.was_at}: give it more time with --seconds"
        why = f"no optimizer step was observed{within}: {cause}"
    return Diagnosis(verdict=why, limit={}, findings=())


def _no_step(progress: Mapping[str, Any] | None) -> str:
    if progress is None:
        return "the command did not run Python with torch 2.4 or later, or ended before it imported torch"
    if not progress["backwards"]:
        return f"torch {progress['torch']} was imported, but no backward pass was run"
    passes = f"{progress['backwards']} backward pass{'es' * (progress['backwards'] > 1)}"
    return f"torch {progress['torch']} ran {passes}, and no parameter that they reach was changed"


def _how(returncode: int) -> str:
    return f"killed by signal {-returncode}" if returncode < 0 else f"with exit code {returncode}"


def _shell_code(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


# -- output


def say(
    diagnosis: Diagnosis,
    *,
    console: Console,
    json_to: str | None = None,
    extra: Mapping[str, Any] | None = None,
    proofs: Sequence[Proof] = (),
) -> None:
    """Prints the diagnosis as text or as JSON; with a JSON file, both."""
    if json_to is not None:
        text = json.dumps(redacted({**asdict(diagnosis), **(extra or {})}), indent=2, default=str) + "\n"
        if json_to == "-":
            out.write(text)
            return
        write_file(json_to, text, option="--json")
    _print(diagnosis, console=console, proofs=proofs)
    if extra and "run" in extra:
        note(console, f"run folder {extra['run']}")


def _print(diagnosis: Diagnosis, *, console: Console, proofs: Sequence[Proof]) -> None:
    console.print(f"\n[bold]Doctor[/]  {escape(redact(diagnosis.verdict))}", highlight=False, soft_wrap=True)
    if line := limit_line(diagnosis.limit):
        console.print(f"[dim]{escape(line)}[/]", highlight=False, soft_wrap=True)
    if loop := diagnosis.limit.get("loop"):
        console.print(escape(redact(str(loop))), highlight=False, soft_wrap=True)
    if target := diagnosis.limit.get("target"):
        console.print(escape(str(target)), highlight=False, soft_wrap=True)
    for place, finding in enumerate(diagnosis.findings, start=1):
        facts = [f"costs {percent(finding.share)}"] if finding.share else []
        if finding.gain is not None:
            saves = "the fix does not help:" if finding.gain <= 0 and finding.status == "measured" else "a fix saves"
            if finding.status == "refuted":
                facts.append("refuted: the change was measured, and it is slower")
            else:
                facts.append(f"{saves} {percent(finding.gain)} ({finding.status})")
        console.print(f"\n[bold]{place}. {finding.cause}[/]  {', '.join(facts)}".rstrip(), highlight=False)
        console.print(f"   {escape(redact(finding.sentence))}", highlight=False, soft_wrap=True)
        for line in finding.evidence:
            console.print(f"   [dim]- {escape(redact(line))}[/]", highlight=False, soft_wrap=True)
        console.print(f"   [green]change:[/] {escape(redact(finding.fix))}", highlight=False, soft_wrap=True)
        console.print(f"   [dim]more: docs/causes.md#{escape(finding.cause)}[/]", highlight=False, soft_wrap=True)
    missing: Any = diagnosis.limit.get("missing") or ()
    if missing:
        console.print("\n[bold]Not in the log[/]  to say more, the doctor needs", highlight=False)
        for fact in missing:
            console.print(f"   [dim]- {escape(fact)}[/]", highlight=False, soft_wrap=True)
    if proofs:
        print_proofs(proofs, console=console, fixes={finding.cause: finding.fix for finding in diagnosis.findings})


def print_proofs(proofs: Sequence[Proof], *, console: Console, fixes: Mapping[str, str] | None = None) -> None:
    """Prints the measured effect of each fix; with `fixes`, also the change to make, below the table."""
    rows = table("Proof", "fix for", "time saved", "95 % interval", "verdict", "loss change")
    for column in rows.columns:  # names and numbers stay whole; a failure may be long and goes below
        column.no_wrap, column.overflow = True, "ellipsis"
    for proof in proofs:
        interval = " to ".join(map(percent, proof.interval)) if proof.interval else "none"
        few = "too few repeats" if proof.gains else "n/a"
        verdict = (proof.verdict if proof.interval or proof.stopped else None) or few
        cells = [proof.cause, percent(proof.gain), interval, verdict, number(proof.loss_difference)]
        rows.add_row(*(escape(redact(cell)) for cell in cells))
    console.print("", rows)
    for proof in proofs:
        if proof.problem:
            said = f"{proof.cause} failed: {proof.problem}"
            console.print(f"[red]{escape(redact(said))}[/]", highlight=False, soft_wrap=True)
        elif fixes is not None and proof.verdict == "faster":
            patch = "every change above" if proof.cause == ALL_TOGETHER else fixes.get(proof.cause, "")
            said = f"make it permanent, {proof.cause}: {patch}"
            console.print(escape(redact(said)), highlight=False, soft_wrap=True)


def limit_line(limit: Mapping[str, Any]) -> str:
    """The measured speed and the theoretical limit, in one line."""
    if "line" in limit:
        return str(limit["line"])
    if not limit or limit.get("tokens_per_s") is None:
        return ""
    ceiling = limit.get("ceiling_tokens_per_s")
    if ceiling is None:
        why = limit.get("source") if limit.get("peak_flops") is None else limit.get("model")
        return f"{number(limit['tokens_per_s'])} tokens/s; ceiling n/a: {why}"
    known = f"{limit.get('source')}; {limit.get('model')}"
    return f"{number(limit['tokens_per_s'])} tokens/s of a ceiling of {number(ceiling)} ({known})"


def note(console: Console, text: str) -> None:
    console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
