"""Sentiment, question answering, summaries and translation: generated for offline use, or from published files.

`sentiment`, `qa`, `summary`, `translation` alone are generated, with a split: `qa:train`. With a file they read what is
published: `qa:dev-v1.1.json`, `summary:test.jsonl?part=valid`. A file can be split into `part=train` and `part=valid`,
by its articles or source sentences, so that nothing of a held-out one is trained on.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flatout.errors import UsageError
from flatout.tasks import overlap
from flatout.tasks.base import Messages, user
from flatout.tasks.files import Row, read_rows, read_text
from flatout.tasks.grade import after_thought, tail

SIZES = {"train": 2000, "valid": 200}
SEED = 20260412
# Held out of a file by `part`, in per cent of its articles or source sentences.
SHARE = 10
PARTS = ("all", "train", "valid")
LABELS = ("negative", "positive")

ASKED = {
    "sentiment": "Is the sentiment of this review positive or negative?\n\n{text}",
    "qa": "Answer the question with words of the text.\n\n{text}\n\nQuestion: {question}",
    "summary": "Summarise the text in one sentence.\n\n{text}",
    "translation": "Translate to {language}.\n\n{text}",
}
# The same for the generated texts: short, for models that are trained from scratch.
SHORT = {
    "sentiment": "Review: {text} Good or bad?",
    "qa": "{text} {question}",
    "summary": "Sum up: {text}",
    "translation": "In Talu: {text}",
}
Measures = Mapping[str, float | Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Item:
    """A question with its right answers, the first of which is trained on. A `group` is never split."""

    text: str
    answers: tuple[str, ...]
    group: str
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Language:
    name: str
    items: Sequence[Item]

    @classmethod
    def open(cls, path: str, name: str, *, part: str = "all", share: str = str(SHARE)) -> Language:
        if path in (*SIZES, ""):
            if (part, share) != ("all", str(SHARE)):
                raise UsageError(f"{name}: part and share are for files; the generated questions have {name}:train")
            return cls(name=name, items=generated(name, path or "valid"))
        items = list(READERS[name](Path(path).expanduser()))
        chosen = in_part([item.group for item in items], part=part, share=share)
        if not chosen:
            raise UsageError(f"{path} has no rows" + ("" if part == "all" else f" in part {part} of {len(items)}"))
        return cls(name=name, items=[items[i] for i in chosen])

    @property
    def size(self) -> int:
        return len(self.items)

    def prompt(self, i: int) -> Messages:
        return [user(self.items[i].text)]

    def solution(self, i: int) -> str:
        return self.items[i].answers[0]

    def choices(self, i: int) -> None:
        return None

    def answer(self, completion: str) -> str | None:
        return after_thought(tail(completion)).strip() or None

    def reward(self, i: int, completion: str) -> float:
        text = self.answer(completion)
        return 0.0 if text is None else REWARDS[self.name](text, self.items[i].answers)

    @property
    def metric(self) -> str:
        """What the mean reward is called."""
        return METRICS[self.name]

    def measures(self, i: int, completion: str) -> Measures:
        """What else is measured; lists are counts, which are summed before `summed` makes a number of them."""
        text, answers = self.answer(completion) or "", self.items[i].answers
        match self.name:
            case "qa":
                return {"exact match": overlap.exact_match(text, answers)}
            case "translation":
                return {"BLEU": overlap.bleu_counts(text, answers)}
        return {}

    def summed(self, counts: Sequence[Sequence[int]]) -> float:
        return overlap.bleu(counts)


def _same_label(text: str, answers: Sequence[str]) -> float:
    """The first word that is one of the labels decides."""
    labels = {answer.lower() for answer in (*answers, *LABELS, "good", "bad")}
    said = next((word for word in re.findall("[a-z]+", text.lower()) if word in labels), None)
    return float(said == answers[0].lower())


REWARDS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "sentiment": _same_label,
    "qa": overlap.f1,
    "summary": overlap.rouge_l,
    "translation": overlap.chrf,
}
METRICS = {"sentiment": "accuracy", "qa": "F1", "summary": "ROUGE-L", "translation": "chrF"}


def in_part(groups: Sequence[str], *, part: str, share: str) -> list[int]:
    """The indices in a part: a group is held out as a whole, by its checksum."""
    if part not in PARTS:
        raise UsageError(f"part={part:.80}: must be one of {', '.join(PARTS)}")
    if not re.fullmatch("[1-9][0-9]?", share):
        raise UsageError(f"share={share:.80}: must be a number of per cent from 1 to 99")
    held = [zlib.crc32(f"{SEED}/{group}".encode()) % 100 < int(share) for group in groups]
    return [i for i, valid in enumerate(held) if part == "all" or valid == (part == "valid")]


# -- files --------------------------------------------------------------------------------------------------


def _rows(path: Path) -> Iterator[Row]:
    """JSON lines or a JSON list, or lines with tabs, by column; a first line with names gives the columns' names."""
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        yield from read_rows(path)
        return
    lines = [(i, line) for i, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f"{path} has no rows")
    names = lines[0][1].rstrip("\r").split("\t")
    named = len(names) > 1 and all(re.fullmatch("[A-Za-z_]{2,20}", name) for name in names)
    for i, line in lines[named:]:
        cells = line.rstrip("\r").split("\t")
        keys = names if named else [str(k) for k in range(len(cells))]
        yield Row(value=dict(zip(keys, cells, strict=False)), where=f"{path}:{i}")


def _sentiment(path: Path) -> Iterator[Item]:
    """SST-2 (`sentence`, `label`), or UCI's sentences with a label at the end of the line."""
    for row in _rows(path):
        if "0" in row.value:  # without names: in a few lines of UCI's files the tab is missing
            whole = "\t".join(map(str, row.value.values()))
            text, label = whole[:-1].strip(), whole[-1:]
        else:
            text, label = row.text("sentence", "text", "review"), row.text("label", "sentiment")
        index = {"0": 0, "1": 1, "negative": 0, "positive": 1, "neg": 0, "pos": 1}.get(label.strip().lower())
        if index is None or not text:
            raise UsageError(f"{row.where}: a sentence and its label, 0 or 1, are needed; the label is {label!r:.40}")
        yield Item(text=ASKED["sentiment"].format(text=text), answers=(LABELS[index],), group=text, where=row.where)


def _qa(path: Path) -> Iterator[Item]:
    """SQuAD as published, or rows with `context`, `question` and `answers`. Articles are never split."""
    if (value := _squad(path)) is not None:
        for article in value:
            for paragraph in article.get("paragraphs", []):
                for asked in paragraph.get("qas", []):
                    answers = tuple(dict.fromkeys(str(one["text"]) for one in asked.get("answers", [])))
                    if answers:
                        text = ASKED["qa"].format(text=paragraph["context"], question=asked["question"])
                        yield Item(text=text, answers=answers, group=str(article.get("title")), where=str(path))
        return
    for row in _rows(path):
        answers = row.value.get("answers", row.value.get("answer"))
        found = answers.get("text") if isinstance(answers, dict) else answers
        several = tuple(dict.fromkeys(map(str, found if isinstance(found, list) else [found])))
        if not several or found is None:
            raise UsageError(f"{row.where}: has no answers")
        context = row.text("context")
        text = ASKED["qa"].format(text=context, question=row.text("question"))
        yield Item(text=text, answers=several, group=str(row.value.get("title", context)), where=row.where)


def _squad(path: Path) -> list[Mapping[str, Any]] | None:
    """The articles of a file of SQuAD; None if it is another file."""
    text = read_text(path)
    if not text.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None  # JSON lines
    found = value.get("data")
    if isinstance(found, list) and all(isinstance(one, dict) for one in found):
        return found
    return None


def _summary(path: Path) -> Iterator[Item]:
    """XSum (`document`, `summary`), SciTLDR (`source`, `target`), dialogues (`dialogue`, `summary`), and alike."""
    for row in _rows(path):
        text = _joined(row, "document", "source", "dialogue", "article", "text")
        summary = row.value.get("summary", row.value.get("target", row.value.get("highlights")))
        answers = tuple(str(one) for one in (summary if isinstance(summary, list) else [summary]) if one)
        if not answers:
            raise UsageError(f"{row.where}: needs summary, target or highlights; has {', '.join(row.value)[:200]}")
        group = str(row.value.get("paper_id") or row.value.get("id") or text)
        yield Item(text=ASKED["summary"].format(text=text), answers=answers, group=group, where=row.where)


def _joined(row: Row, *keys: str) -> str:
    for key in keys:
        if isinstance(value := row.value.get(key), list) and all(isinstance(one, str) for one in value):
            return " ".join(value)
    return row.text(*keys)


def _translation(path: Path) -> Iterator[Item]:
    """Tatoeba (source, tab, target), Multi30k (`train.en` beside `train.de`), or rows with two languages."""
    if (languages := _beside(path)) is not None:
        mine, others = (read_text(one).splitlines() for one in (path, languages))
        if len(mine) != len(others):
            raise UsageError(f"{path} has {len(mine)} lines and {languages} has {len(others)}: they must be parallel")
        for i, (source, target) in enumerate(zip(mine, others, strict=True), 1):
            yield _translated(source, target, languages.suffix[1:], where=f"{path}:{i}")
        return
    for row in _rows(path):
        inner = row.value.get("translation")
        value = {key: one for key, one in (inner if isinstance(inner, dict) else row.value).items() if key != "2"}
        if len(value) < 2:
            raise UsageError(f"{row.where}: needs a sentence and its translation; has {', '.join(value)[:200]}")
        (_, source), (key, target) = list(value.items())[:2]
        yield _translated(str(source), str(target), "French" if key == "1" else key, where=row.where)


def _translated(source: str, target: str, language: str, *, where: str) -> Item:
    names = {"de": "German", "fr": "French", "en": "English", "es": "Spanish", "cs": "Czech"}
    text = ASKED["translation"].format(language=names.get(language, language), text=source)
    return Item(text=text, answers=(target,), group=source, where=where)


def _beside(path: Path) -> Path | None:
    """The file of the other language of a parallel corpus."""
    if not re.fullmatch(r"\.[a-z]{2}", path.suffix):
        return None
    others = [one for one in sorted(path.parent.glob(f"{path.stem}.??")) if one != path]
    if not others:
        raise UsageError(f"{path} has no file of another language beside it, such as {path.stem}.de")
    return others[0]


READERS: dict[str, Callable[[Path], Iterator[Item]]] = {
    "sentiment": _sentiment,
    "qa": _qa,
    "summary": _summary,
    "translation": _translation,
}


# -- generated texts ----------------------------------------------------------------------------------------

GOOD = (
    "fine", "great", "lovely", "superb", "sweet", "neat", "bright", "solid", "clean", "fresh", "warm", "crisp",
    "smart", "sharp", "grand", "calm", "brave", "pure", "rich", "smooth", "kind", "swift", "proud", "tidy",
)  # fmt: skip
BAD = (
    "poor", "awful", "dull", "broken", "bitter", "weak", "ugly", "stale", "dirty", "rotten", "cold", "soggy",
    "stupid", "blunt", "grim", "noisy", "cheap", "nasty", "bland", "rough", "mean", "slow", "vile", "messy",
)  # fmt: skip
THINGS = ("soup", "film", "phone", "room", "song", "book", "chair", "lamp", "cake", "game", "shoe", "tea")
PEOPLE = ("Ann", "Bob", "Eve", "Tom", "Kim", "Lea", "Max", "Zoe")
COLOURS = ("red", "blue", "green", "black", "white", "pink", "gold", "grey")
VERBS = ("has", "sells", "wants", "finds", "lost", "made")
# The words of an invented language; a sentence is translated word by word.
TALU = dict(
    zip(
        (*COLOURS, *THINGS, *PEOPLE, *VERBS, "the"),
        (
            "ro", "bi", "gu", "ka", "wa", "pi", "do", "ge", "supa", "fimo", "teko", "rumi", "sona", "buko", "kari",
            "lumo", "keka", "gima", "suto", "teya", "Ani", "Bobu", "Evi", "Tomo", "Kimi", "Leya", "Masu", "Zoya",
            "ha", "se", "wo", "fi", "lo", "ma", "ti",
        ),
        strict=True,
    )
)  # fmt: skip


@cache
def generated(name: str, split: str) -> tuple[Item, ...]:
    """Disjoint by their texts: a text belongs to one split by its checksum."""
    chance, seen, items = random.Random(f"{SEED}/{name}/{split}"), set[str](), list[Item]()
    while len(items) < SIZES[split]:
        text, answer = GENERATORS[name](chance)
        if text not in seen and (zlib.crc32(text.encode()) % 5 == 0) == (split == "valid"):
            seen.add(text)
            items.append(Item(text=text, answers=(answer,), group=text))
    return tuple(items)


def _make_sentiment(chance: random.Random) -> tuple[str, str]:
    """One of many words decides, so that each must be learnt."""
    good = chance.random() < 0.5
    first, second = chance.sample(THINGS, 2)
    text = f"the {first} and the {second} are {chance.choice(GOOD if good else BAD)}."
    return SHORT["sentiment"].format(text=text), "good" if good else "bad"


def _make_qa(chance: random.Random) -> tuple[str, str]:
    """Who has the thing: one of two people, each with a thing."""
    people, things = chance.sample(PEOPLE, 2), chance.sample(THINGS, 2)
    which = chance.randrange(2)
    text = f"{people[0]} has the {things[0]}. {people[1]} has the {things[1]}."
    return SHORT["qa"].format(text=text, question=f"Who has the {things[which]}?"), people[which]


def _make_summary(chance: random.Random) -> tuple[str, str]:
    """A report of who did what, with a colour and a day that a summary leaves out."""
    who, verb, thing, colour = (chance.choice(words) for words in (PEOPLE, VERBS, THINGS, COLOURS))
    day = chance.choice(("Monday", "Tuesday", "Friday", "Sunday"))
    return SHORT["summary"].format(text=f"On {day} {who} {verb} a {colour} {thing}."), f"{who} {verb} {thing}."


def _make_translation(chance: random.Random) -> tuple[str, str]:
    said = [chance.choice(words) for words in (PEOPLE, VERBS, COLOURS, THINGS)]
    return SHORT["translation"].format(text=" ".join(said)), " ".join(TALU[word] for word in said)


GENERATORS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "sentiment": _make_sentiment,
    "qa": _make_qa,
    "summary": _make_summary,
    "translation": _make_translation,
}
