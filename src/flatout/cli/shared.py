"""Options, output and small helpers that several verbs use."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from flatout import limits
from flatout.errors import EnvironmentLacks, UsageError
from flatout.output import err as err
from flatout.output import out as out

if TYPE_CHECKING:
    from flatout.config.settings import Settings


def _keys(incomplete: str) -> list[str]:
    """Completion of overrides: the keys of a configuration."""
    from flatout.config import keys

    return [f"{key}=" for key in keys() if key.startswith(incomplete)]


def file_path(text: str | Path) -> Path:
    """The type of arguments and options that name a file or a folder."""
    return Path(path_text(str(text)))


def path_text(text: str) -> str:
    """The type of those that name a file, a folder or something else, such as a model on the hub."""
    from flatout.files import path_problem, shown_path

    if problem := path_problem(text):
        raise UsageError(f"{shown_path(text)} {problem}: give another path")
    return text


Config = Annotated[Path, typer.Argument(help="YAML file of the run", parser=file_path)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="dotted overrides, such as train.lr=3e-4", autocompletion=_keys)
]
RunFolder = Annotated[
    Path | None, typer.Option("--run", help="run folder (default: runs/CONFIG-TIME)", parser=file_path, metavar="PATH")
]
ModelName = Annotated[
    str, typer.Argument(help="run folder, model folder or hub name", metavar="RUN|MODEL", parser=path_text)
]
LossMargin = Annotated[
    float, typer.Option(help="losses are equal if they are shown to differ by less than this share", min=1e-6, max=0.5)
]
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]
Adapter = Annotated[
    str | None,
    typer.Option(help="one adapter of a router run, or base (default: the router chooses for each prompt)"),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="show every decision of the plan")]
Trust = Annotated[
    str | None,
    typer.Option(
        "--trust-remote-code",
        metavar="PIN",
        help="run the code that comes with the model: its commit on the hub, or the hash that the error prints",
    ),
]
BackendName = Annotated[
    str, typer.Option(help="sampling backend: flatout, hf, vllm, or auto (flatout if it supports the model, else hf)")
]
Dtype = Annotated[str | None, typer.Option(help="bf16, fp16 or fp32 (default: by the device)")]
TopP = Annotated[float, typer.Option(help="sample from the most likely tokens up to this total probability")]
MaxTokens = Annotated[int, typer.Option(help="longest answer, in tokens", min=1, max=limits.ANSWER_TOKENS)]
Seed = Annotated[int, typer.Option(help="random seed for sampling", min=0, max=limits.SEED)]
Rows = Annotated[
    int | None, typer.Option(help="concurrent sequences (default: by the device)", min=1, max=limits.SEQUENCES)
]


def fail(message: str, *, exit_code: int) -> NoReturn:
    """Prints the message and exits. Secrets in quoted settings, URLs or command lines are masked."""
    from flatout.record import redact

    err.print(f"[bold red]error:[/] {escaped(redact(message))}", highlight=False, soft_wrap=True)
    sys.exit(exit_code)


def warn(notices: Iterable[str]) -> None:
    """Prints warnings, with secrets masked as in errors."""
    from flatout.record import redact

    for text in notices:
        err.print(f"[yellow]warning:[/] {escaped(redact(text))}", highlight=False, soft_wrap=True)


def print_plain(text: str) -> None:
    """Prints one line without wrapping, colours or markup, because it may be a path or a command to copy."""
    out.print(text, highlight=False, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    from flatout.record import redacted

    out.write(json.dumps(redacted(value), indent=2) + "\n")


def escaped(text: str) -> str:
    """The text without markup."""
    from rich.markup import escape

    return escape(text)


def require_torch() -> None:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise EnvironmentLacks("training needs torch: pip install 'flatout[train]', or install torch another way")


def new_folder(stem: str) -> Path:
    """A folder name that no run uses yet, even if several runs start in the same second."""
    name = Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (name.with_name(f"{name.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([name], others) if not folder.exists())


def load_settings(config: Path, overrides: list[str] | None, *, trust: str | None) -> Settings:
    """Loads the settings and adds the user's pin. For a hub name, the pinned commit becomes the recorded revision."""
    from flatout.config import load

    settings = load(config, overrides=overrides or []).settings
    if trust is None:
        return settings
    from flatout import hub
    from flatout.config.recipes import RECIPES

    model = replace(settings.model, trust=trust)
    if model.name is not None and not RECIPES[settings.recipe].samples:  # there only the generator may have code
        model = replace(model, revision=hub.pinned(model.name, revision=model.revision, trust=trust))
    return replace(settings, model=model)
