"""Did you mean: the names nearest to a mistyped one.

The loader uses it for keys, for the values of a choice and for file names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MAX_SHOWN = 3
# No name is this long, so anything longer is not a typo.
LONGEST = 100


def distance(a: str, b: str) -> int:
    """Optimal string alignment: an insertion, deletion, substitution or swap of neighbours costs one each."""
    before: list[int] = []
    above = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        row = [i]
        for j, y in enumerate(b, start=1):
            cost = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, above = above, row
    return above[-1]


def nearest(word: str, candidates: Iterable[str]) -> list[str]:
    """The candidates that a typo could have turned into `word`, nearest first."""
    reach = _reach(word)
    alike = [name for name in candidates if abs(len(name) - len(word)) <= reach]
    distances = {name: distance(word.lower(), name.lower()) for name in alike}
    within = [name for name in distances if distances[name] <= reach]
    return sorted(within, key=distances.__getitem__)[:MAX_SHOWN]


def suggest(key: str, *, known: Mapping[str, str]) -> list[str]:
    """The known dotted keys (key to help line) that may have been meant by an unknown one, most likely first.

    In this order: a typo in this section, the same name in another section, a larger typo in this section,
    a typo in another section, and finally the same words (`learning_rate`, `num_layers`).
    """
    if len(key) > LONGEST:
        return []
    key = key.lower()
    section, _, leaf = key.rpartition(".")
    if any(_section(name) == section for name in known):
        home = {name: distance(leaf, _leaf(name)) for name in known if _section(name) == section}
    else:  # the section itself may be mistyped, so compare whole keys
        home = {name: distance(key, name) for name in known}

    if slips := _best(key, home, reach=1):
        return slips
    # An abbreviation: lora.r is lora.rank.
    if begun := [name for name in known if _section(name) == section and leaf and _leaf(name).startswith(leaf)]:
        return begun[:MAX_SHOWN]
    if same_name := [name for name in known if _leaf(name) == leaf]:
        return _best(key, dict.fromkeys(same_name, 0), reach=0)
    if slips := _best(key, home, reach=_reach(leaf)):
        return slips
    if slips := _best(key, {name: distance(leaf, _leaf(name)) for name in known}, reach=_reach(leaf)):
        return slips
    return _sharing_words(key, known=known)


def _best(key: str, distances: Mapping[str, int], *, reach: int) -> list[str]:
    """The names at the smallest distance within reach; ties are sorted by similarity to the whole key."""
    least = min(distances.values(), default=reach + 1)
    if least > reach:
        return []
    ties = [name for name, d in distances.items() if d == least]
    return sorted(ties, key=lambda name: distance(key, name))[:MAX_SHOWN]


def _sharing_words(key: str, *, known: Mapping[str, str]) -> list[str]:
    """Keys whose name is part of the typed one, or whose name and help contain every typed word."""
    section, _, leaf = key.rpartition(".")
    typed = _words(leaf)
    found = []
    for name, help in known.items():
        own = _words(_leaf(name))
        if own <= typed or (typed and typed <= own | _words(help)):
            found.append(name)
    # Same section first, then the name that shares the most.
    found.sort(key=lambda name: (_section(name) != section, -len(_words(_leaf(name)) & typed)))
    return found[:MAX_SHOWN]


def _reach(word: str) -> int:
    """The largest distance that still counts as a typo, by the length of the word."""
    return 1 if len(word) <= 4 else 2 if len(word) <= 8 else 3


def _section(key: str) -> str:
    return key.rpartition(".")[0]


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))
