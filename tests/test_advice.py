"""Settings that a message tells people to write are settings: the loader takes every one of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import flatout
from flatout.config import load
from flatout.config.load import keys

SECTIONS = {key.partition(".")[0] for key in keys() if "." in key}
# A value ends with the word; a list runs to its bracket. What is filled in at run time stands as HOLE.
HOLE = "\N{WHITE SQUARE}"
ADVICE = re.compile(rf"(?<![\w./-])((?:{'|'.join(sorted(SECTIONS))})\.[a-z_0-9]+)(?:=|: )(\[[^\]]*\]|[^\s,;)`'\"|]+)")
# What some settings need beside them, and what their place in a sentence stands for.
NEEDS = {
    "rl": ["recipe=rl", "rl.tasks=[math]"],
    "lora": ["recipe=sft", "data.source=jsonl", "data.path=rows.jsonl", "lora.rank=8"],
    "rft": ["recipe=rft", "rft.task=units:train", "rft.teach=units:train"],
    "save": ["eval.every=5"],
    "dpo": ["recipe=dpo", "data.path=rows.jsonl"],
    "data.as_chat": ["recipe=sft", "data.path=rows.jsonl"],
}
LIKE = {"DIR": "folder", "FILE": "file", "N": "2"}
# Keys in front of a message about their value, which is no advice to write that word.
PROSE = re.compile(
    r"(the|a|an|not|no|it|its|is|this|with|of|for|at|as|in|one|needs|only|must|leave|item|there|adapter)\b"
)


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text of a module, parts that are written one after the other as one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def advice() -> dict[str, str]:
    """`key=value` to the file that says it."""
    found: dict[str, str] = {}
    root = Path(flatout.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for text in texts(ast.parse(path.read_text())):
            for key, value in ADVICE.findall(text):
                value = LIKE.get(value, value.rstrip(".:"))
                if HOLE not in value and value and not PROSE.match(value):
                    found[f"{key}={value}"] = str(path.relative_to(root))
    return found


FOUND = advice()


def test_there_is_advice_to_check() -> None:
    assert {"plan.compile=none", "plan.recompute=full", "plan.preset=safe", "data.packing=concat"} <= FOUND.keys()


@pytest.mark.parametrize("setting", FOUND)
def test_the_loader_takes_what_a_message_advises(setting: str) -> None:
    base = ["model.layers=1", "model.hidden=64", "model.heads=1", "train.steps=100"]
    section, key = setting.partition(".")[0], setting.partition("=")[0]
    load(None, overrides=[*base, *NEEDS.get(key, NEEDS.get(section, ())), setting], environ={})
