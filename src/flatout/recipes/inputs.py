"""What a run reads, looked for before anything is loaded, so that a wrong path is reported with the configuration.

Nothing here needs torch, runs code that a configuration names, or asks the network: names on the hub, tasks of one's
own and tasks with a judge are left to the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from flatout import hub
from flatout.config.recipes import RECIPES
from flatout.config.settings import DataSettings, Settings
from flatout.data.rows import files_of, sources_of
from flatout.data.sources import SUFFIXES, find_files, source_files
from flatout.errors import UsageError
from flatout.hardware import named
from flatout.plan import job_of
from flatout.plan.job import tokenizer_size
from flatout.tasks import Texts, open_task, with_prompt


def check_inputs(settings: Settings) -> None:
    """Refuses a configuration that names a file, a folder or a task that is missing or cannot be read."""
    _check_data(settings)
    _check_models(settings)
    for key, spec, needs_questions in _tasks(settings):
        head, _, query = spec.partition("?")
        if head.partition(":")[0] == "python" or "judge=" in query:
            continue
        try:
            task = open_task(spec)
        except UsageError as error:
            raise UsageError(f"{key}: {error}") from None
        if isinstance(task, Texts) and needs_questions:
            raise UsageError(f"{key}: {spec} has no questions: recipe {settings.recipe} takes tasks with questions")


def _check_data(settings: Settings) -> None:
    data = settings.data
    match RECIPES[settings.recipe].learns_from:
        case "rows":
            for source in (*sources_of(data, which="train"), *sources_of(data, which="valid")):
                files_of(source)
        case "running text" if data.source == "tokens":
            for key, given in (("path", data.path), ("valid_path", data.valid_path)):
                if given is not None:
                    _check_tokens(key, given)
        case "running text":
            source_files(data, which="train")
            if data.valid_path:
                source_files(data, which="valid")
        case "solutions":
            for number, source in enumerate(data.sources):
                if source.path is not None and not os.path.exists(os.path.expanduser(source.path)):
                    raise UsageError(f"data.sources: item {number}: {source.path} does not exist; correct the path")


def _check_tokens(key: str, given: str) -> None:
    """Shards with a manifest, of a preparation or of one part of it, or files of token ids."""
    folder = Path(given).expanduser()
    if not any((folder / name / "manifest.json").is_file() for name in ("train", "")):
        find_files(given, key=key, suffixes=SUFFIXES["tokens"])


def _check_models(settings: Settings) -> None:
    """Every model and adapter that is a folder, and the plan's facts about the model that is trained."""
    for name in (settings.model.name, settings.rft.generator):
        if name is not None:
            hub.check_name(name)
    adapter, start = settings.lora.adapter, settings.router.start
    if adapter is not None and not os.path.isdir(adapter):
        raise UsageError(f"lora.adapter: there is no folder {adapter}; correct the path")
    if start is not None and not os.path.isdir(start):
        raise UsageError(f"router.start: there is no run and no folder {start}; correct the path")
    tokenizer = settings.data.tokenizer
    if _is_local(tokenizer):
        tokenizer_size(tokenizer)
    local = [name for name in (settings.model.name, settings.rft.generator) if name is not None]
    if all(map(hub.is_here, local)) and (local or _is_local(tokenizer)):
        job_of(settings, hardware=named("CPU"), num_ranks=1)


def _is_local(tokenizer: str) -> bool:
    """Whether it is no name on the hub."""
    trained = tokenizer == DataSettings().tokenizer or tokenizer.startswith("bpe:")
    return trained or tokenizer.startswith((".", "/", "~")) or os.path.exists(os.path.expanduser(tokenizer))


def _tasks(settings: Settings) -> Iterator[tuple[str, str, bool]]:
    """The setting, the spec, and whether it must have questions."""
    rft = settings.rft
    for spec in settings.eval.tasks:
        yield "eval.tasks", spec, False
    for spec in settings.rl.tasks:
        yield "rl.tasks", spec, True
    prompts = {"task": rft.prompt, "valid": rft.student_prompt or rft.prompt, "teach": None}
    for name, prompt in prompts.items():
        if (spec := getattr(rft, name)) is not None:
            yield f"rft.{name}", with_prompt(spec, prompt), True
