"""A task by its spec, NAME[:PATH][?key=value&…]: `units`, `gsm8k:test.jsonl`, `jsonl:q.jsonl?grader=math`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl

from flatout.config.nearest import nearest
from flatout.errors import UsageError
from flatout.tasks.base import Task, Texts
from flatout.tasks.files import Gsm8k, JsonLines, MultipleChoice, PlainText
from flatout.tasks.units import Units

# What follows the colon, for those who forget it.
_TAKES = {
    "units": "nothing, or train, valid or endless",
    "gsm8k": "a JSON-lines file",
    "mmlu-stem": "a file, or a folder with test.jsonl",
    "arc-challenge": "a file, or a folder with test.json",
    "choice": "a file of multiple-choice questions",
    "jsonl": "a file with question and answer",
    "perplexity": "a text or JSON-lines file",
}


def open_task(spec: str) -> Task | Texts:
    head, _, query = spec.partition("?")
    name, _, path = head.partition(":")
    if name not in _TAKES:
        near = nearest(name, _TAKES)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_TAKES)}"
        raise UsageError(f"task {name!r} is unknown: {hint}")
    if name == "units":
        return _built(lambda: Units(split=path or "valid"), spec, query)
    if not path:
        raise UsageError(f"task {name} needs {_TAKES[name]}: {name}:PATH")
    file = Path(path).expanduser()
    match name:
        case "gsm8k":
            return _built(lambda: Gsm8k.open(file), spec, query)
        case "jsonl":
            return _built(JsonLines.open, spec, query, file)
        case "perplexity":
            return _built(lambda: PlainText.open(file), spec, query)
        case _:
            return _built(MultipleChoice.open, spec, query, file, name)


def _built(build: Callable[..., Task | Texts], spec: str, query: str, *arguments: object) -> Task | Texts:
    """With the options of the query, none of which `build` does not know."""
    options = dict(parse_qsl(query, keep_blank_values=True))
    takes = [p.name for p in inspect.signature(build).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for key in options:
        if key not in takes:
            known = f"it takes {', '.join(takes)}" if takes else "it takes none"
            raise UsageError(f"task {spec!r}: option {key!r} is unknown; {known}")
    return build(*arguments, **options)
