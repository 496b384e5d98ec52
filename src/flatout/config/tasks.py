"""The names of tasks: a misspelt one is refused with the configuration, before anything is opened."""

from __future__ import annotations

from flatout.config.nearest import nearest

# What follows the colon, for those who forget it.
TAKES = {
    "units": "nothing, or train, valid or endless",
    "sums": "nothing, or shown, train or valid",
    "gsm8k": "a JSON-lines file",
    "mmlu-stem": "a file, or a folder with test.jsonl",
    "arc-challenge": "a file, or a folder with test.json",
    "choice": "a file of multiple-choice questions",
    "jsonl": "a file with question and answer",
    "perplexity": "a text or JSON-lines file",
}


def unknown_task(spec: str) -> str | None:
    """What is wrong with the name in a spec, NAME[:PATH][?key=value&…]; None: it is known."""
    name = spec.partition("?")[0].partition(":")[0]
    if name in TAKES:
        return None
    near = nearest(name, TAKES)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(TAKES)}"
    return f"task {name!r:.200} is unknown: {hint}"


def held_out(task: str) -> str | None:
    """The held-out questions that belong to a task of the package's own; None for files."""
    name, _, rest = task.partition(":")
    split, mark, options = rest.partition("?")
    return f"{name}{mark}{options}" if name in ("units", "sums") and split == "train" else None
