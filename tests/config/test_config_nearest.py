"""Did you mean: the distance against its definition, and every key against every small slip."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.config import from_mapping, keys
from flatout.config.nearest import distance, nearest
from flatout.errors import UsageError


@cache
def by_definition(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    options = [
        by_definition(a[:-1], b) + 1,
        by_definition(a, b[:-1]) + 1,
        by_definition(a[:-1], b[:-1]) + (a[-1] != b[-1]),
    ]
    if len(a) > 1 and len(b) > 1 and a[-2:] == b[-1] + b[-2]:
        options.append(by_definition(a[:-2], b[:-2]) + 1)
    return min(options)


words = st.text(alphabet="abc", max_size=7)


@given(words, words)
def test_distance_is_optimal_string_alignment(a: str, b: str) -> None:
    assert distance(a, b) == by_definition(a, b)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [("stpes", "steps", 1), ("lr", "lrr", 1), ("bf61", "bf16", 1), ("", "lr", 2), ("ca", "abc", 3)],
)
def test_distance_of_known_pairs(a: str, b: str, expected: int) -> None:
    assert distance(a, b) == distance(b, a) == expected


def test_nearest_ignores_case_and_leaves_out_what_is_far() -> None:
    assert nearest("BF61", ["fp32", "bf16", "fp16"]) == ["bf16"]
    assert nearest("int8", ["fp32", "bf16", "fp16"]) == []


def slips(word: str) -> Iterator[str]:
    for i in range(len(word)):
        yield word[:i] + word[i + 1 :]
        yield word[:i] + word[i] + word[i:]
        if i + 1 < len(word):
            yield word[:i] + word[i + 1] + word[i] + word[i + 2 :]


def suggestions(typed: list[str]) -> dict[str, str]:
    """What the loader's one message says for each of many unknown keys."""
    values: dict[str, dict[str, int] | int] = {}
    for key in typed:
        section, _, leaf = key.rpartition(".")
        inside = values.setdefault(section, {}) if section else values
        assert isinstance(inside, dict)
        inside[leaf] = 1
    with pytest.raises(UsageError) as caught:
        from_mapping(values)
    lines = [line.split(": unknown key; did you mean ") for line in str(caught.value).splitlines()]
    return {line[0]: line[1] for line in lines if len(line) == 2}


def test_every_key_survives_a_dropped_doubled_or_swapped_letter() -> None:
    """Every third slip of each key: all of them take half a minute."""
    sections = {key.partition(".")[0] for key in keys() if "." in key}
    valid = {*keys(), *sections}
    meant: list[tuple[str, str]] = []
    for key in sorted(valid):
        section, dot, leaf = key.rpartition(".")
        typed = {section + dot + slip for slip in slips(leaf)} - valid
        meant += [(slip, key) for slip in sorted(typed)[::3]]

    typed_in = [slip for slip, _ in meant]
    said = {}
    for at in range(0, len(typed_in), 10):  # one message shows twenty mistakes, also of other kinds
        said |= suggestions(typed_in[at : at + 10])

    missed = [
        f"{slip}: meant {key}, got {said.get(slip, 'nothing')}"
        for slip, key in meant
        if said.get(slip, "").removesuffix("?").replace(" or ", ", ").split(", ")[0] != key
    ]
    assert len(meant) > 1000
    assert len(missed) <= 0.05 * len(meant), "\n".join(missed)


@pytest.mark.parametrize(
    ("typed", "first"),
    [
        ("steps", "train.steps"),
        ("train.micro_batch", "plan.micro_batch"),
        ("model.lr", "train.lr"),
        ("train.LR", "train.lr"),
        ("plan.microBatch", "plan.micro_batch"),
        ("train.learning_rate", "train.lr"),
        ("model.num_hidden", "model.hidden"),
        ("train.warmup", "train.warmup_steps"),
    ],
)
def test_a_key_in_the_wrong_place_or_by_another_name_is_found(typed: str, first: str) -> None:
    assert suggestions([typed])[typed].removesuffix("?").replace(" or ", ", ").split(", ")[0] == first


def test_a_name_several_sections_have_names_them_all() -> None:
    assert set(suggestions(["every"])["every"].removesuffix("?").replace(" or ", ", ").split(", ")) == {
        "eval.every",
        "save.every",
        "log.every",
    }
