from __future__ import annotations

import hashlib
import re

import pytest

from flatout.data.embedded import MEN, UNITS, WOMEN, documents, many, words


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    return list(documents(0, 1.0))


def test_the_text_is_pinned() -> None:
    first = "\n".join(documents(0, 0.11)).encode()[:100_000]
    assert hashlib.sha256(first).hexdigest() == "aec5313624a6743bdf8373566de19fd74f6429cf7347fef13a87abbfe4c030d0"


def test_the_same_seed_gives_the_same_text_and_another_one_another(corpus: list[str]) -> None:
    assert list(documents(0, 0.1)) == corpus[: len(list(documents(0, 0.1)))]
    assert set(documents(0, 0.1)).isdisjoint(documents(1, 0.1))


def test_size_and_lengths(corpus: list[str]) -> None:
    sizes = [len(text.encode()) for text in corpus]
    assert 1_000_000 <= sum(sizes) < 1_005_000
    assert min(sizes) >= 50
    assert max(sizes) <= 4000
    assert sorted(sizes)[len(sizes) // 10] < 250
    assert sorted(sizes)[-len(sizes) // 10] > 1000


def test_documents_hardly_repeat(corpus: list[str]) -> None:
    assert len(set(corpus)) > 0.98 * len(corpus)


def test_nothing_is_left_unfilled(corpus: list[str]) -> None:
    assert not [text for text in corpus if re.search(r"[{}_]|  |\b[Aa] [aeio]|\b[Aa]n [bcdfgjklmnpqrstvwxyz]", text)]


def test_sums_are_true(corpus: list[str]) -> None:
    text = "\n".join(corpus)
    checked = 0
    for a, sign, b, result in re.findall(r"^(\d+) ([+-]) (\d+) = (\d+)$", text, re.MULTILINE):
        assert int(a) + (int(b) if sign == "+" else -int(b)) == int(result)
        checked += 1
    for a, b, result in re.findall(r"^(\d+) times (\d+) is (\d+)\.$", text, re.MULTILINE):
        assert int(a) * int(b) == int(result)
        checked += 1
    for a, b, result in re.findall(r"^(\d+) divided by (\d+) is (\d+)\.$", text, re.MULTILINE):
        assert int(a) == int(b) * int(result)
        checked += 1
    spelled = {words(number): number for number in range(200)}
    for a, b, result in re.findall(r"^([A-Z][a-z-]+) plus ([a-z-]+) is ([a-z -]+)\.$", text, re.MULTILINE):
        assert spelled[a.lower()] + spelled[b] == spelled[result]
        checked += 1
    assert checked > 500


def test_conversions_are_true(corpus: list[str]) -> None:
    text = "\n".join(corpus)
    true = {
        f"So {many(count, large)} make {many(count * factor, small)}."
        for large, small, factor in UNITS
        for count in range(2, 21)
    }
    said = re.findall(r"^So \d+ [a-z]+ make .*$", text, re.MULTILINE)
    assert len(said) > 100
    assert set(said) <= true


def test_purses_add_up(corpus: list[str]) -> None:
    lists = [text for text in corpus if text.startswith("Things ")]
    assert lists
    for text in lists:
        total = sum(map(int, re.findall(r"^- .*: (\d+) coins?$", text, re.MULTILINE)))
        paid, had, left = re.search(r"paid (\d+) coins in all\.\n.* had (\d+) .* has (\d+) coins? left", text).groups()  # type: ignore[union-attr]
        assert total == int(paid)
        assert int(had) - int(paid) == int(left)


def test_ledgers_are_answered_truthfully(corpus: list[str]) -> None:
    ledgers = [text for text in corpus if re.search(r"^Who has the ", text, re.MULTILINE)]
    assert len(ledgers) > 50
    for text in ledgers:
        holder: dict[str, str] = {}
        place: dict[str, str] = {}
        for line in text.splitlines():
            if match := re.fullmatch(r"(\w+) (?:is at|goes to|walks to) the (\S+)\.", line):
                place[match[1]] = match[2]
            elif match := re.fullmatch(r"(\w+) has the (\w+)\.", line):
                holder[match[2]] = match[1]
            elif match := re.fullmatch(r"(\w+) (?:gives|hands) the (\w+) (?:over )?to (\w+)\.", line):
                assert holder[match[2]] == match[1]
                holder[match[2]] = match[3]
            elif match := re.fullmatch(r"Who has the (\w+)\? (\w+) has the \1\.", line):
                assert holder[match[1]] == match[2]
            else:
                match = re.fullmatch(r"Where is the (\w+)\? It is with (\w+), at the (\S+)\.", line)
                assert match is not None, line
                assert (holder[match[1]], place[match[2]]) == (match[2], match[3])


def test_pronouns_agree_with_the_buyer(corpus: list[str]) -> None:
    for text in corpus:
        if match := re.match(r"Things (\w+) bought", text):
            assert ("\nShe bought" in text) == (match[1] in WOMEN)
            assert ("\nHe bought" in text) == (match[1] in MEN)


def test_numbers_in_words() -> None:
    assert [words(n) for n in (0, 13, 20, 47, 100, 115, 999)] == [
        "zero",
        "thirteen",
        "twenty",
        "forty-seven",
        "one hundred",
        "one hundred and fifteen",
        "nine hundred and ninety-nine",
    ]
