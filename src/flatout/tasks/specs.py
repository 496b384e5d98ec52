"""A task by its spec, NAME[:PATH][?key=value&…]: `units`, `gsm8k:test.jsonl`, `jsonl:q.jsonl?grader=math`.

Every task with questions takes `prompt=FILE`: another text and examples around its questions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from urllib.parse import parse_qsl, quote

from flatout.config.tasks import TAKES, unknown_task
from flatout.errors import UsageError
from flatout.tasks import workers
from flatout.tasks.base import Task, Texts
from flatout.tasks.code import Code, humaneval, mbpp
from flatout.tasks.domains import DOMAINS, Generated
from flatout.tasks.files import Gsm8k, JsonLines, MultipleChoice, PlainText
from flatout.tasks.grader import Grader
from flatout.tasks.guru import Guru
from flatout.tasks.language import READERS, Language
from flatout.tasks.own import open_own
from flatout.tasks.prompts import Prompted, Template
from flatout.tasks.published import FORMATS, Published
from flatout.tasks.sums import Sums
from flatout.tasks.units import Units


def open_task(spec: str) -> Task | Texts:
    head, _, query = spec.partition("?")
    name, _, path = head.partition(":")
    if problem := unknown_task(spec):
        raise UsageError(problem)
    if name == "units":
        return _built(lambda: Units(split=path or "valid"), spec, query)
    if name == "sums":
        return _built(lambda: Sums(split=path or "valid"), spec, query)
    if name == "code":
        return _built(Code.open, spec, query, path or "valid")
    if name in READERS:
        return _built(Language.open, spec, query, path, name)
    if name in DOMAINS:
        return _built(Generated.open, spec, query, name, path or "valid")
    if name == "python" and path:
        options = dict(parse_qsl(query, keep_blank_values=True))
        prompt = options.pop("prompt", None)
        return _prompted(open_own(path, options), spec, prompt)
    if not path:
        raise UsageError(f"task {name} needs {TAKES[name]}: {name}:PATH")
    try:
        file = Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"task {spec!r} names the home folder of an unknown user") from None
    match name:
        case "gsm8k":
            return _built(lambda: Gsm8k.open(file), spec, query)
        case "mbpp":
            return _built(mbpp, spec, query, file)
        case "humaneval":
            return _built(humaneval, spec, query, file)
        case "jsonl":
            return _built(JsonLines.open, spec, query, file)
        case "guru":
            return _built(Guru.open, spec, query, file)
        case "perplexity":
            return _built(lambda: PlainText.open(file), spec, query)
        case _ if name in FORMATS:
            return _built(Published.open, spec, query, file, name)
        case _:
            return _built(MultipleChoice.open, spec, query, file, name)


def _built(build: Callable[..., Task | Texts], spec: str, query: str, *arguments: object) -> Task | Texts:
    """Builds a task with the options of the query; options that `build` does not know are refused."""
    options = dict(parse_qsl(query, keep_blank_values=True))
    prompt = options.pop("prompt", None)
    takes = [p.name for p in inspect.signature(build).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for key in options:
        if key not in takes:
            raise UsageError(f"task {spec!r}: option {key!r} is unknown; it takes {', '.join([*takes, 'prompt'])}")
    task = build(*arguments, **options)
    if "judge" in options and not workers.SERVING:
        _probe(spec)
    return _prompted(task, spec, prompt)


def _prompted(task: Task | Texts, spec: str, prompt: str | None) -> Task | Texts:
    if prompt is None:
        return task
    if isinstance(task, Texts):
        raise UsageError(f"task {spec!r} has no questions, so it takes no prompt")
    return Prompted(task=task, template=Template.open(prompt))


@cache
def _probe(spec: str) -> None:
    """A judge that does not answer is an error before any work is done. It is asked in a grading process."""
    with Grader(spec) as grader:
        grader.probe()


def by_domain(specs: Sequence[str]) -> list[str]:
    """The specs, with one for each domain of a file that has several: each is scored with its own metric."""
    found: list[str] = []
    for spec in specs:
        task = open_task(spec)
        task = task.task if isinstance(task, Prompted) else task
        several = task.domains if isinstance(task, Guru) and len(task.domains) > 1 else ()
        mark = "&" if "?" in spec else "?"
        found += [f"{spec}{mark}domain={quote(domain)}" for domain in several] or [spec]
    return found


def with_prompt(spec: str, prompt: str | None) -> str:
    """The spec of the same task with this prompt; None: its own prompt."""
    if prompt is None:
        return spec
    return f"{spec}{'&' if '?' in spec else '?'}prompt={quote(prompt, safe='/')}"
