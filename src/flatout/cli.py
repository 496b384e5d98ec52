"""The `flatout` command: one function per verb, importing its verb lazily so that each starts at once."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from flatout import __version__
from flatout.errors import INTERRUPTED_EXIT, PREEMPTED_EXIT, EnvironmentLacks, FlatoutError, RunFailed, UsageError

if TYPE_CHECKING:
    import torch

    from flatout.config.settings import Settings
    from flatout.engine.trained import Trained
    from flatout.hardware import Hardware
    from flatout.record import Outcome, Run

app = typer.Typer(
    name="flatout",
    help="LLM training at the limit of the hardware, with the proof.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Prepare training data.", no_args_is_help=True)
config_app = typer.Typer(help="Look at a configuration.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(config_app, name="config")

Config = Annotated[Path, typer.Argument(help="YAML file of the run")]
Overrides = Annotated[list[str] | None, typer.Argument(help="dotted overrides, such as train.lr=3e-4")]
RunFolder = Annotated[Path | None, typer.Option("--run", help="run folder (default: runs/CONFIG-TIME)")]
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]
Trust = Annotated[
    str | None,
    typer.Option(
        "--trust-remote-code",
        metavar="PIN",
        help="run the code that comes with the model: its commit on the hub, or the hash that the refusal prints",
    ),
]
Backend = Annotated[str, typer.Option(help="who samples: flatout, hf, vllm, or auto: flatout where it can, else hf")]

out = Console(emoji=False)
err = Console(stderr=True, emoji=False)


def main() -> None:
    """Runs the command; every error meant for the user becomes one message and an exit code."""
    try:
        app()
    except FlatoutError as error:
        if os.environ.get("RANK", "0") != "0":
            sys.exit(error.exit_code)  # the first rank says it
        _fail(str(error), exit_code=error.exit_code)
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        _fail(f"{error.filename}: {error.strerror}", exit_code=EnvironmentLacks.exit_code)
    except Exception:  # a mistake of ours
        from flatout.record import redact

        sys.stderr.write(redact(traceback.format_exc()))
        sys.exit(FlatoutError.exit_code)


def _fail(message: str, *, exit_code: int) -> NoReturn:
    """What went wrong may quote a setting, an address or a command line: secrets in it are masked."""
    from flatout.record import redact

    err.print(f"[bold red]error:[/] {_escaped(redact(message))}", highlight=False, soft_wrap=True)
    sys.exit(exit_code)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"flatout {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    run: Annotated[Path | None, typer.Option(help="run folder (default: runs/demo-TIME)")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="without the proofs of the fixes")] = False,
) -> None:
    """A slow script, why it is slow, the fixes measured, and the same job by flatout: here and now, in minutes."""
    _require_torch()
    from flatout import demo as verb

    folder = run or _new_folder("demo")
    try:
        outcome = verb.run(folder, console=out, repeats=0 if quick else verb.REPEATS)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_EXIT) from None
    _leave(outcome, folder)
    if not outcome.val_losses[-1] < outcome.val_losses[0]:
        raise RunFailed("the demo did not learn: its validation loss did not fall")


@app.command()
def examples(
    name: Annotated[str | None, typer.Argument(help="example to print or copy")] = None,
    to: Annotated[Path | None, typer.Option(help="file to write it to")] = None,
) -> None:
    """List the shipped configurations, print one, or copy it to a file."""
    from flatout import gallery

    if name is None:
        for example in gallery.examples():
            out.print(f"[bold]{example.name}[/]  {_escaped(example.title)}", highlight=False)
        out.print("\nPrint one: flatout examples NAME; copy it: flatout examples NAME --to FILE", style="dim")
        return
    text = gallery.find(name).text
    if to is None:
        sys.stdout.write(text)
    elif to.exists():
        raise UsageError(f"{to} exists and is not overwritten: choose another file")
    elif not to.parent.is_dir():
        raise UsageError(f"{to} cannot be written: there is no folder {to.parent}")
    else:
        to.write_text(text)
        out.print(f"wrote {to}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def hardware(
    measure: Annotated[bool, typer.Option("--measure", help="time matmuls per type and a copy on this device")] = False,
    selftest: Annotated[
        bool, typer.Option("--selftest", help="run every optional path here against the plain one")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what this machine can do."""
    from flatout import hardware as facts
    from flatout.terminal import hardware_table, measured_table, selftest_table

    found = facts.detect()
    if measure or selftest:
        _require_torch()
    measured = facts.measure(found) if measure else None
    checks = _selftest(found) if selftest else None
    if as_json:
        known = found.to_json()
        known |= {"measured": measured.to_json()} if measured else {}
        known |= {"selftest": checks} if checks is not None else {}
        _print_json(known)
        return
    out.print(hardware_table(found))
    if measured:
        out.print("", measured_table(found, measured), *measured.notes, sep="\n")
    if checks is not None:
        out.print("", selftest_table(checks), sep="\n")


def _selftest(found: Hardware) -> list[dict[str, Any]]:
    import torch

    from flatout.engine.resolve import check_build
    from flatout.engine.selftest import selftest

    check_build(found)
    return [asdict(check) for check in selftest(torch.device("cuda" if found.gpu else "cpu"))]


@app.command()
def plan(
    config: Config,
    overrides: Overrides = None,
    on: Annotated[str | None, typer.Option("--on", help="a machine from the table, such as A100-80GBx8")] = None,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Decide how a run would use a machine, here or named, with reasons and predictions. Needs no torch."""
    from flatout import hardware as facts
    from flatout.config import load
    from flatout.plan import decide, job_of
    from flatout.record import redacted
    from flatout.terminal import plan_tables

    settings = _trusting(load(config, overrides=overrides or []).settings, trust)
    machine = facts.detect() if on is None else facts.parse(on)
    num_ranks = max(1, machine.num_gpus)
    made = decide(job_of(settings, hardware=machine, num_ranks=num_ranks))
    if as_json:
        _print_json(made.to_json())
        return
    where = machine.name or machine.gpu or "CPU"
    out.print(f"[bold]{_escaped(str(config))}[/] on {num_ranks} x {where}\n", highlight=False)
    out.print(*plan_tables(redacted(made.to_json())), sep="\n\n")


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    run: RunFolder = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the newest whole checkpoint in --run")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="plan and check, then stop")] = False,
    trust: Trust = None,
) -> None:
    """Train. One configuration file to a measured, resumable run."""
    _require_torch()
    from flatout.config import load

    settings = _trusting(load(config, overrides=overrides or []).settings, trust)
    folder = _run_folder(settings, run, config=config, resume=resume)
    # Only now: torch takes seconds to import, and the user's mistakes are told before.
    from flatout.recipes import pretrain, rft, sft
    from flatout.record import redacted
    from flatout.terminal import plan_tables

    if dry_run:
        out.print(*plan_tables(redacted(pretrain.dry_run(settings).to_json())), sep="\n\n")
        return
    recipes: dict[str, Callable[..., Outcome]] = {"pretrain": pretrain.run, "sft": sft.run, "rft": rft.run}
    recipe = recipes[settings.recipe]
    _leave(_carry_out(recipe, settings, folder=folder, resume=resume), folder, trust=trust)


@app.command()
def sample(
    config: Config,
    overrides: Overrides = None,
    run: RunFolder = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the first unfinished chunk in --run")] = False,
    trust: Trust = None,
) -> None:
    """Sample a task's questions and keep what is right: the first half of recipe rft, without the training."""
    _require_torch()
    from flatout.config import load

    settings = _trusting(load(config, overrides=overrides or []).settings, trust)
    if settings.recipe != "rft":
        raise UsageError(f"{config} is of recipe {settings.recipe}, which samples nothing: give one of rft")
    folder = _run_folder(settings, run, config=config, resume=resume)
    from functools import partial

    from flatout.recipes import rft
    from flatout.record import Run

    outcome = _carry_out(partial(rft.run, train=False), settings, folder=folder, resume=resume)
    _leave(outcome, folder, verb="sample", trust=trust)
    hint = json.dumps({"source": "jsonl", "path": str(Run.open(folder).samples_dir / "round-1.jsonl")})
    out.print(f"train on it by recipe sft with data: {hint}, or on all of it by\n  ", end="", highlight=False)
    out.print(_resuming("train", folder, trust=trust), highlight=False, markup=False, soft_wrap=True)


def _trusting(settings: Settings, trust: str | None) -> Settings:
    """The settings with the user's pin; of a name on the hub, the commit it stands for is recorded as its revision."""
    if trust is None:
        return settings
    from flatout import hub

    model = replace(settings.model, trust=trust)
    if model.name is not None and settings.recipe != "rft":  # there it is the generator that may have code
        model = replace(model, revision=hub.pinned(model.name, revision=model.revision, trust=trust))
    return replace(settings, model=model)


def _run_folder(settings: Settings, run: Path | None, *, config: Path, resume: bool) -> Path:
    run = run or (Path(settings.run) if settings.run else None)
    if run == Path():
        raise UsageError("--run is empty or the current folder: a run needs a folder of its own")
    if resume and run is None:
        raise UsageError("--resume needs --run FOLDER: the folder of the run to go on with")
    return run or _new_folder(config.stem)


def _carry_out(recipe: Callable[..., Outcome], settings: Settings, *, folder: Path, resume: bool) -> Outcome:
    from flatout.config import dump, to_mapping
    from flatout.engine.ranks import from_environment
    from flatout.record import Run
    from flatout.terminal import View

    if resume and Run.is_half_made(folder):
        resume = False
        if from_environment().first:
            err.print(f"{folder} was not whole when the run was stopped: it starts from the beginning", markup=False)
    try:
        return recipe(
            settings,
            folder=folder,
            config_text=dump(settings),
            config=to_mapping(settings),
            resume=resume,
            sinks=[View(out, every=settings.log.every)] if from_environment().first else [],
        )
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_EXIT) from None


def _resuming(verb: str, folder: Path, *, trust: str | None) -> str:
    trusting = f" --trust-remote-code {shlex.quote(trust)}" if trust else ""
    return f"flatout {verb} {shlex.quote(f'{folder}/config.yaml')} --run {shlex.quote(str(folder))} --resume{trusting}"


def _leave(outcome: Outcome, folder: Path, *, verb: str = "train", trust: str | None = None) -> None:
    """How a run that was asked to stop ends: whether its state is safe, how to go on, and the exit code."""
    if not outcome.stopped_by.startswith("SIG"):
        return
    from flatout.engine.ranks import from_environment

    ranks = from_environment()
    if ranks.first:
        safe = f"saved at step {outcome.steps}" if outcome.saved_step == outcome.steps else "nothing to save yet"
        if ranks.world > 1:
            begin = f"torchrun --nproc-per-node {ranks.world} -m flatout"
            command = f"{begin} train {shlex.quote(f'{folder}/config.yaml')} {shlex.quote(f'run={folder}')} --resume"
            command += f" --trust-remote-code {shlex.quote(trust)}" if trust else ""
        else:
            command = _resuming(verb, folder, trust=trust)
        err.print(f"{outcome.stopped_by}: {safe}. Resume with\n  {_escaped(command)}", highlight=False, soft_wrap=True)
    raise typer.Exit(INTERRUPTED_EXIT if outcome.stopped_by == "SIGINT" else PREEMPTED_EXIT)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="run folder")],
    to: Annotated[Path, typer.Option(help="folder to write")],
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32")] = "bf16",
    merge: Annotated[bool, typer.Option("--merge", help="adapters: add them to the weights they sit on")] = False,
    best: Annotated[
        bool, typer.Option("--best", help="the lowest validation loss (save.best), not the newest")
    ] = False,
    trust: Trust = None,
) -> None:
    """Write a run's newest weights and tokenizer as a Hugging Face folder; adapters as PEFT's, unless merged."""
    _require_torch()
    from safetensors import SafetensorError

    from flatout.engine.checkpoint import as_os_error
    from flatout.engine.resolve import DTYPES
    from flatout.engine.trained import open_trained
    from flatout.record import Run

    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype!r} is none of {', '.join(DTYPES)}")
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise UsageError(f"{to} is no empty folder, and nothing is overwritten: choose another folder")
    trained = open_trained(Run.open(run), best=best, trust=trust)
    _warn(trained.notices)
    if merge and trained.adapters is None:
        raise UsageError(f"{run} trained all weights: there is nothing to merge, leave --merge out")
    try:
        _write_export(trained, run, to, dtype=DTYPES[dtype], merge=merge)
    except (OSError, SafetensorError) as error:
        why = as_os_error(error, to).strerror or error
        raise EnvironmentLacks(f"{to} cannot be written: {why}. What is there is not whole: remove it") from None


def _write_export(trained: Trained, run: Path, to: Path, *, dtype: torch.dtype, merge: bool) -> None:
    from flatout.model import Decoder, lora, peft
    from flatout.model.loading import export_model

    trained.tokenizer.save(to)
    if trained.adapters is not None and isinstance(trained.model, Decoder) and not merge:
        peft.save(trained.model, to, trained.adapters, base=trained.base, fingerprint=trained.fingerprint)
        out.print(
            f"wrote the adapter of step {trained.step} of {run} to {to}; it goes on {trained.base}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return
    if trained.adapters is not None and isinstance(trained.model, Decoder):
        if trained.adapters.base_bits == 4:
            out.print("they learnt over 4-bit weights and are merged into the full ones: close, not equal")
        lora.merge(trained.model)
    export_model(trained.model, to, dtype=dtype, eos_token_id=trained.tokenizer.eos_id)
    out.print(f"wrote step {trained.step} of {run} to {to}", highlight=False, markup=False, soft_wrap=True)


@app.command(context_settings={"allow_interspersed_args": False})
def doctor(
    what: Annotated[list[str] | None, typer.Argument(help="a run folder, or -- and the command of any script")] = None,
    steps: Annotated[int, typer.Option(help="optimizer steps to watch, warm-up included")] = 20,
    seconds: Annotated[
        float, typer.Option(help="end the watch this long after the script's start, whatever it has done by then")
    ] = 600.0,
    window: Annotated[
        float, typer.Option(help="time steps for at most this long after warm-up; replays take up to a third more")
    ] = 60.0,
    then: Annotated[str, typer.Option(help="stop: end the script after that; continue: let it run on")] = "stop",
    run: Annotated[Path | None, typer.Option(help="run folder to write (default: runs/doctor-TIME)")] = None,
    json_to: Annotated[str | None, typer.Option("--json", help="file for the diagnosis, or - for stdout")] = None,
    proving: Annotated[bool, typer.Option("--prove", help="measure each fix that is a switch, on the script")] = False,
    repeats: Annotated[int, typer.Option(help="with --prove: how often each is measured", min=1)] = 3,
    log: Annotated[Path | None, typer.Option(help="diagnose the log of a training elsewhere")] = None,
    on: Annotated[str | None, typer.Option("--on", help="with --log: the machine it ran on, such as H100x8")] = None,
    params: Annotated[str | None, typer.Option(help="with --log: size of the model, such as 124M")] = None,
) -> None:
    """Say why training is slow: of any PyTorch script, unchanged; of a run folder; of a log."""
    from flatout.insight import doctor as verb

    try:
        leave = verb.main(
            what or [],
            asked=verb.asked_for(steps=steps, seconds=seconds, window=window, then=then, json_to=json_to),
            folder=run or _new_folder("doctor"),
            consoles=(out, err),
            json_to=json_to,
            proving=proving,
            repeats=repeats,
            log=log,
            on=on,
            params=params,
        )
    except KeyboardInterrupt:
        leave = INTERRUPTED_EXIT
    raise typer.Exit(leave)


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="run folder, model folder or hub name", metavar="RUN|MODEL")],
    tasks: Annotated[
        list[str],
        typer.Option(
            help="units[:train], sums[:train], gsm8k:FILE, mmlu-stem:FOLDER, arc-challenge:FOLDER, choice:FILE, "
            "jsonl:FILE, perplexity:FILE; several by commas"
        ),
    ],
    limit: Annotated[int | None, typer.Option(help="at most so many questions of each task", min=1)] = None,
    samples: Annotated[int, typer.Option(help="answers to each question", min=1)] = 1,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token (default: 0, or 0.7 with several samples)")
    ] = None,
    top_p: Annotated[float, typer.Option(help="draw from the likeliest tokens that reach this share")] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="length of an answer", min=1)] = 256,
    seed: Annotated[int, typer.Option(help="seed of the draws")] = 0,
    against: Annotated[str | None, typer.Option(help="another RUN|MODEL on the same questions")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32 (default: by the device)")] = None,
    rows: Annotated[int | None, typer.Option(help="answers written at once (default: by the device)", min=1)] = None,
    backend: Backend = "auto",
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model on tasks: accuracy, likelihood of choices, perplexity, each with a 95 % interval."""
    _require_torch()
    from flatout.sample import Sampling, backend_of
    from flatout.tasks import open_task

    specs = [spec for several in tasks for spec in several.split(",") if spec]
    if not specs:
        raise UsageError("--tasks names none")
    for spec in specs:
        open_task(spec)  # mistakes are told before a model is loaded
    warmth = temperature if temperature is not None else (0.7 if samples > 1 else 0.0)
    if samples > 1 and warmth == 0:
        raise UsageError("--samples above 1 at temperature 0 would all be the same: give a --temperature")
    sampling = Sampling(max_tokens=max_tokens, temperature=warmth, top_p=top_p, seed=seed)
    from flatout import judge

    judge.run(
        [model, *([against] if against else [])],
        specs,
        sampling=sampling,
        samples=samples,
        limit=limit,
        dtype=dtype,
        rows=rows,
        backend=backend_of(backend),
        trust=trust,
        out=None if as_json else out,
        err=err,
        print_json=_print_json,
    )


@app.command()
def chat(
    model: Annotated[str, typer.Argument(help="run folder, model folder or hub name", metavar="RUN|MODEL")],
    system: Annotated[str | None, typer.Option(help="what the model is told first")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token")] = 0.7,
    top_p: Annotated[float, typer.Option(help="draw from the likeliest tokens that reach this share")] = 0.95,
    max_tokens: Annotated[int, typer.Option(help="length of an answer", min=1)] = 512,
    seed: Annotated[int, typer.Option(help="seed of the draws")] = 0,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32 (default: by the device)")] = None,
    backend: Backend = "auto",
    trust: Trust = None,
) -> None:
    """Talk to a model: in the terminal, or one question a line from a pipe."""
    _require_torch()
    from flatout import chat as verb
    from flatout.engine.opening import open_model
    from flatout.sample import Sampling, backend_of, sampler_of

    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    chosen = backend_of(backend)
    opened = open_model(model, dtype=dtype, backend=chosen, trust=trust)
    _warn(opened.notices)
    talk = verb.Talk(
        sampler_of(opened, backend=chosen, rows=1),
        opened.tokenizer,
        sampling=replace(sampling, stop_ids=opened.stop_ids),
        system=system,
    )
    verb.run(talk, verb.Lines.standard())


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="run folders", metavar="RUN...")],
    to: Annotated[
        Path | None, typer.Option("--output", "-o", help="file to write, - for the terminal (default: RUN/report.html)")
    ] = None,
    format: Annotated[str | None, typer.Option(help="html, md or json (default: by the file's name, or html)")] = None,
    as_json: AsJson = False,
) -> None:
    """Write runs down: one self-contained HTML file, or Markdown or JSON. Several runs stand side by side."""
    from flatout.files import write_atomic
    from flatout.insight import report as verb
    from flatout.record import Run

    opened = [Run.open(run) for run in runs]
    chosen = "json" if as_json else format or (to.suffix.lstrip(".") if to and to.suffix else "html")
    known = next((name for name in verb.FORMATS if name == chosen), None)
    if known is None:
        raise UsageError(f"--format {chosen!r} is none of {', '.join(verb.FORMATS)}")
    if to is None and known == "html" and len(opened) > 1:
        raise UsageError("several runs have no folder in common: say where the report goes with -o FILE")
    text = verb.render(opened, format=known)
    if to is None and known == "html":
        to = opened[0].report_path
    if to is None or to == Path("-"):
        sys.stdout.write(text)
    elif not to.parent.is_dir():
        raise UsageError(f"{to} cannot be written: there is no folder {to.parent}")
    elif to.exists() and not to.is_file():  # a device or a pipe, which must not be replaced
        raise UsageError(f"{to} is not a regular file and is not overwritten: -o - writes to the terminal")
    else:
        try:
            write_atomic(to, text.encode())
        except OSError as error:
            raise EnvironmentLacks(
                f"{to} cannot be written: {error.strerror or error}. Choose another file with -o FILE, or -o - for "
                "the terminal"
            ) from None
        out.print(f"wrote {to}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def watch(
    runs: Annotated[list[Path] | None, typer.Argument(help="run folders", metavar="[RUN...]")] = None,
    web: Annotated[bool, typer.Option("--web", help="a live page on 127.0.0.1 instead of the terminal")] = False,
    once: Annotated[bool, typer.Option("--once", help="one look, then leave")] = False,
    interval: Annotated[float, typer.Option(help="seconds between two looks", min=0.25)] = 2.0,
    port: Annotated[int, typer.Option(help="port of the live page (default: any free one)", min=0, max=65535)] = 0,
    as_json: AsJson = False,
) -> None:
    """Watch runs as they go, or with no run this machine."""
    from flatout.insight import watch as verb
    from flatout.record import Run

    opened = [Run.open(run) for run in runs or []]
    if as_json:
        _print_json(verb.snapshot(opened))
    elif web:
        _serve(opened, port=port)
    else:
        verb.watch(opened, console=out, once=once, interval_s=interval)


def _serve(runs: list[Run], *, port: int) -> None:
    from flatout.insight.machine import looking
    from flatout.insight.web import Server, Site

    with looking(disk=runs[0].path if runs else Path(), interval_s=1.0) as eyes:
        server = Server(Site(runs, eyes), port=port)
        out.print(
            f"{server.url}\non this machine only, for who has this address; Ctrl-C ends it",
            highlight=False,
            soft_wrap=True,
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            server.server_close()


@data_app.command("prepare")
def data_prepare(
    source: Annotated[str, typer.Argument(help="file, folder or glob; `embedded`; or hf:NAME")],
    to: Annotated[Path, typer.Option(help="folder to write the shards to")],
    tokenizer: Annotated[str, typer.Option(help="byte, bpe:SIZE, a folder, a tokenizer.json or a hub name")] = "byte",
    field: Annotated[str, typer.Option(help="field that holds the text, in jsonl and parquet")] = "text",
    separator: Annotated[str, typer.Option(help="what stands between documents, in text")] = "<|endoftext|>",
    valid_share: Annotated[float, typer.Option(help="share of the documents held out")] = 0.01,
    valid_path: Annotated[str | None, typer.Option(help="validation files of their own, of the same kind")] = None,
    on_bad_row: Annotated[str, typer.Option(help="a row that cannot be read: skip and count it, or stop")] = "skip",
    max_bad_share: Annotated[float, typer.Option(help="stop when more than this share of rows is bad")] = 0.01,
    seed: Annotated[int, typer.Option(help="seed of the split")] = 0,
    as_json: AsJson = False,
) -> None:
    """Tokenize documents once, into verified shards with a manifest of hashes and counts."""
    _require_torch()
    from flatout.data.corpus import as_options, settings_for
    from flatout.data.prepare import describe, left_out, prepare

    if not 0 < valid_share < 0.5:
        raise UsageError(f"--valid-share {valid_share:g} must be above 0 and below 0.5")
    if not 0 <= max_bad_share <= 1:
        raise UsageError(f"--max-bad-share {max_bad_share:g} must be from 0 to 1")
    if on_bad_row not in ("skip", "stop"):
        raise UsageError(f"--on-bad-row {on_bad_row!r} must be skip or stop")
    if not separator:
        raise UsageError("--separator must not be empty")
    try:
        settings = settings_for(
            source,
            tokenizer=tokenizer,
            field=field,
            separator=separator,
            valid_share=valid_share,
            valid_path=valid_path,
            on_bad_row=on_bad_row,
            max_bad_share=max_bad_share,
        )
        prepare(settings, seed=seed, to=to)
        facts = describe(to)
    except FlatoutError as error:
        error.args = (as_options(str(error)),)
        raise
    if as_json:
        _print_json(facts)
        return
    for part, counts in facts.items():
        out.print(
            f"{part}: {counts['tokens']:,} tokens in {counts['documents']:,} documents, {counts['shards']} shards"
        )
    if skipped := left_out(to):
        out.print(f"not learnt from: {skipped}", highlight=False, markup=False, soft_wrap=True)
    hint = json.dumps({"source": "tokens", "path": str(to)})
    out.print(f"train on it: data: {hint}", highlight=False, markup=False, soft_wrap=True)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of a configuration."""
    from flatout.config import schema

    sys.stdout.write(json.dumps(schema(), indent=2) + "\n")  # what a secret is named is no secret


@config_app.command("show")
def config_show(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print every setting, its value, and where it came from."""
    from flatout.config import load, show
    from flatout.record import redacted
    from flatout.terminal import table

    rows = show(load(config, overrides=overrides or []))
    values = redacted({row.key: row.value for row in rows})  # also by the name of the setting
    if as_json:
        _print_json({row.key: {"value": values[row.key], "source": row.source} for row in rows})
        return
    drawn = table("", "setting", "value", "from", "what it is")
    for row in rows:
        style = "" if row.source == "default" else "bold"
        shown, source = "" if row.value is None else str(values[row.key]), str(row.source)
        if row.value is None and row.key.startswith("plan."):
            shown, source = "auto", "plan"  # decided there, by the machine; `flatout plan` says what and why
        drawn.add_row(
            row.key, f"[{style}]{_escaped(shown)}[/]" if style else _escaped(shown), source, _escaped(row.help)
        )
    out.print(drawn)


@config_app.command("validate")
def config_validate(config: Config, overrides: Overrides = None) -> None:
    """Check a configuration; all mistakes come in one message."""
    from flatout.config import load

    load(config, overrides=overrides or [])
    out.print(f"{config}: good", highlight=False, markup=False, soft_wrap=True)


def _require_torch() -> None:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise EnvironmentLacks("training needs torch: pip install 'flatout[train]', or install torch your own way")


def _new_folder(stem: str) -> Path:
    """One that no run has, also where several begin in the same second."""
    name = Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (name.with_name(f"{name.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([name], others) if not folder.exists())


def _warn(notices: Iterable[str]) -> None:
    for text in notices:
        err.print(f"[yellow]warning:[/] {_escaped(text)}", highlight=False, soft_wrap=True)


def _print_json(value: Any) -> None:
    from flatout.record import redacted

    sys.stdout.write(json.dumps(redacted(value), indent=2) + "\n")


def _escaped(text: str) -> str:
    from rich.markup import escape

    from flatout.insight.clean import clean

    return escape(clean(text))
