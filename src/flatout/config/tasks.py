"""The names of tasks: a misspelled one is refused with the configuration, before any file is opened."""

from __future__ import annotations

from flatout.config.nearest import nearest

# What each task takes after the colon; error messages quote it.
TAKES = {
    "units": "nothing, or train, valid or endless",
    "sums": "nothing, or shown, train or valid",
    "gsm8k": "a JSON-lines file",
    "mmlu-stem": "a file, or a folder with test.jsonl",
    "arc-challenge": "a file, or a folder with test.json",
    "choice": "a file of multiple-choice questions",
    "jsonl": "a file with question and answer",
    "code": "nothing, or train or valid",
    "mbpp": "a file of MBPP",
    "humaneval": "a file of HumanEval",
    "perplexity": "a text or JSON-lines file",
}


def unknown_task(spec: str) -> str | None:
    """The error message for an unknown name in a spec, NAME[:PATH][?key=value&…]; None if it is known."""
    name = spec.partition("?")[0].partition(":")[0]
    if name in TAKES:
        return None
    near = nearest(name, TAKES)
    hint = f"did you mean {near[0]}?" if near else f"the known tasks are {', '.join(TAKES)}"
    return f"task {name!r:.200} is unknown: {hint}"


def held_out(task: str) -> str | None:
    """The held-out split of a built-in task; None for files."""
    name, _, rest = task.partition(":")
    split, mark, options = rest.partition("?")
    return f"{name}{mark}{options}" if name in ("units", "sums", "code") and split == "train" else None
