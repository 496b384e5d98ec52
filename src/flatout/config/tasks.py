"""The names of tasks: a misspelled one is refused with the configuration, before any file is opened."""

from __future__ import annotations

from flatout.config.nearest import nearest
from flatout.files import path_problem, shown_path

# What each task takes after the colon; error messages quote it.
TAKES = {
    "units": "nothing, or train, valid or endless",
    "sums": "nothing, or shown, train or valid",
    **dict.fromkeys(("math", "logic", "simulation", "table", "stem"), "nothing, or train or valid"),
    **dict.fromkeys(("sentiment", "qa", "summary", "translation"), "nothing, or train or valid, or a file"),
    "gsm8k": "a JSON-lines file",
    "mmlu-stem": "a file, or a folder with test.jsonl",
    "arc-challenge": "a file, or a folder with test.json",
    "choice": "a file of multiple-choice questions",
    "jsonl": "a file with question and answer",
    "code": "nothing, or train or valid",
    "mbpp": "a file of MBPP",
    "humaneval": "a file of HumanEval",
    "guru": "a file of rows in the format of GURU",
    "math500": "a JSON-lines file, or a folder with test.jsonl",
    "cruxeval": "a JSON-lines file, or a folder with cruxeval.jsonl",
    "codeio": "a JSON-lines file of programs with recorded input and output",
    "arc-agi": "a JSON file, or a folder with evaluation.json",
    "bbh": "a JSON file, or a folder of them",
    "wikitablequestions": "a TSV file, or a folder with pristine-unseen-tables.tsv",
    "tatqa": "a JSON file, or a folder with tatqa_dataset_test_gold.json",
    "scibench": "a JSON file, or a folder of them",
    "perplexity": "a text or JSON-lines file",
    "python": "MODULE:FUNCTION, a function of your own that returns a task",
}
# Built-in tasks whose `train` questions have held-out ones beside them, which the bare name means.
SPLIT = (
    "units", "sums", "math", "code", "logic", "simulation", "table", "stem",
    "sentiment", "qa", "summary", "translation",
)  # fmt: skip


def unknown_task(spec: str) -> str | None:
    """The error message for an unknown name or an impossible path in a spec, NAME[:PATH][?key=value&…]; or None."""
    head = spec.partition("?")[0]
    name = head.partition(":")[0]
    if name in TAKES:
        problem = path_problem(head)
        return problem and f"task {shown_path(spec)} {problem}"
    near = nearest(name, TAKES)
    hint = f"did you mean {near[0]}?" if near else f"the known tasks are {', '.join(TAKES)}"
    return f"task {name!r:.200} is unknown: {hint}"


def held_out(task: str) -> str | None:
    """The held-out split of a built-in task; None for files."""
    name, _, rest = task.partition(":")
    split, mark, options = rest.partition("?")
    return f"{name}{mark}{options}" if name in SPLIT and split == "train" else None
