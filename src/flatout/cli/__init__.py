"""The `flatout` command: one module per verb. Each imports its dependencies when called, so that all start fast.

`shared` has the options and the output functions that several verbs use.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from flatout import __version__, output
from flatout.cli import (
    ablate,
    chat,
    compare,
    config,
    data,
    demo,
    doctor,
    evaluate,
    examples,
    export,
    generate,
    hardware,
    launch,
    plan,
    report,
    runs,
    shared,
    train,
    tune,
    watch,
)
from flatout.errors import EnvironmentLacks, FlatoutError, RunFailed, UsageError
from flatout.files import shown_path

__all__ = ["app", "main"]


def _version(wanted: bool) -> None:
    if wanted:
        shared.out.print(f"flatout {__version__}", highlight=False)
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


app = typer.Typer(
    name="flatout",
    help="LLM training at the limit of the hardware, with measurements that prove it.",
    callback=_options,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order of the help page.
app.command()(demo.demo)
app.command()(examples.examples)
app.command()(hardware.hardware)
app.command()(plan.plan)
app.command()(train.train)
app.command()(launch.launch)
app.command()(train.sample)
app.command()(export.export)
app.command(cls=doctor.OptionsAnywhere, context_settings={"allow_interspersed_args": False})(doctor.doctor)
app.command("eval")(evaluate.evaluate)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(ablate.ablate)
app.command()(tune.tune)
app.command()(compare.compare)
app.command()(report.report)
app.command()(watch.watch)
app.command()(runs.runs)
app.add_typer(data.app, name="data")
app.add_typer(config.app, name="config")


# What is wrong with a path that fits by itself, but not with what is added to it, or leads nowhere.
_OF_NAMES = (errno.ENAMETOOLONG, errno.ELOOP)


def _report(text: str) -> None:
    """Tells a launcher the error with which this rank ends."""
    from flatout.probe import launched

    launched.report_error(text)


def main() -> None:
    """Runs the command. Every FlatoutError becomes one message and an exit code."""
    output.prepare()
    try:
        app()
    except output.ReaderGone as error:
        sys.exit(error.exit_code)
    except FlatoutError as error:
        _report(f"error: {error}\n")
        if os.environ.get("RANK", "0") != "0":
            sys.exit(error.exit_code)  # rank 0 prints the message
        shared.fail(str(error), exit_code=error.exit_code)
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        _report(f"error: {error.filename}: {error.strerror}\n")
        shared.fail(f"{error.filename}: {error.strerror}", exit_code=EnvironmentLacks.exit_code)
    except OSError as error:
        if (refused := output.unwritable(error)) is not None:
            _report(f"error: {refused}\n")
            shared.fail(refused, exit_code=EnvironmentLacks.exit_code)
        if error.errno not in _OF_NAMES:
            _crashed()
        _report(f"error: {error.filename}: {error.strerror}\n")
        shared.fail(f"{shown_path(str(error.filename))}: {error.strerror}", exit_code=UsageError.exit_code)
    except MemoryError:
        text = "out of host memory: free some, raise the memory limit of this process, or use a smaller model"
        _report(f"error: {text}\n")
        shared.fail(text, exit_code=RunFailed.exit_code)
    except Exception:
        _crashed()


def _crashed() -> NoReturn:
    """Reports a bug in flatout."""
    from flatout.record import redact

    text = redact(traceback.format_exc())
    _report(text)
    shared.err.write(text)
    sys.exit(FlatoutError.exit_code)
