"""How much a text has in common with its references: SQuAD's exact match and F1, ROUGE-L, chrF and BLEU.

They equal the usual libraries (`rouge-score`, `sacrebleu`), against which they are tested, and need none of them: every
text here is untrusted, and is only split and counted.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence

CHRF_ORDER, CHRF_BETA, BLEU_ORDER = 6, 2, 4
# Longer texts are cut: the longest common subsequence takes the product of both lengths.
MOST_WORDS = 2000
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WORD = re.compile(r"[a-z0-9]+")
# The tokenization of mteval-v13a, as in sacrebleu.
_SYMBOLS = re.compile(r"([\{-\~\[-\` -\&\(-\+\:-\@\/])")
_AFTER_NO_DIGIT, _BEFORE_NO_DIGIT = re.compile(r"([^0-9])([\.,])"), re.compile(r"([\.,])([^0-9])")
_DASH = re.compile(r"([0-9])(-)")


def normalised(text: str) -> str:
    """As SQuAD compares answers: lower case, without punctuation, articles and extra spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(text: str, references: Sequence[str]) -> float:
    return float(any(normalised(text) == normalised(reference) for reference in references))


def f1(text: str, references: Sequence[str]) -> float:
    """The F1 of the words, with the reference that agrees most."""
    return max(_f1(normalised(text).split(), normalised(reference).split()) for reference in references)


def _f1(found: list[str], wanted: list[str]) -> float:
    if not found or not wanted:
        return float(found == wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted))


def rouge_l(text: str, references: Sequence[str]) -> float:
    """F1 of the longest common subsequence of words, without stemming, with the reference that agrees most."""
    words = _WORD.findall(text.lower())[:MOST_WORDS]
    return max(_rouge_l(words, _WORD.findall(reference.lower())[:MOST_WORDS]) for reference in references)


def _rouge_l(found: list[str], wanted: list[str]) -> float:
    if not found or not wanted:
        return 0.0
    common = _longest_common(found, wanted)
    return 2 * common / (len(found) + len(wanted))


def _longest_common(a: list[str], b: list[str]) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def chrf(text: str, references: Sequence[str]) -> float:
    """F2 of character n-grams up to 6 without spaces, from 0 to 1, with the reference that agrees most."""
    return max(_chrf("".join(text.split()), "".join(reference.split())) for reference in references)


def _chrf(found: str, wanted: str) -> float:
    precisions, recalls = [], []
    for n in range(1, CHRF_ORDER + 1):
        ours, theirs = _grams(found, n), _grams(wanted, n)
        if not ours or not theirs:
            continue
        common = sum((ours & theirs).values())
        precisions.append(common / sum(ours.values()))
        recalls.append(common / sum(theirs.values()))
    if not precisions or not (total := sum(precisions) + sum(recalls)):
        return 0.0
    precision, recall = sum(precisions) / len(precisions), sum(recalls) / len(recalls)
    factor = CHRF_BETA**2
    return (1 + factor) * precision * recall / (factor * precision + recall) if total else 0.0


def bleu_counts(text: str, references: Sequence[str]) -> list[int]:
    """The counts of one sentence, to be summed over a corpus: both lengths, then common and all n-grams by order."""
    found, many = _words(text), [_words(reference) for reference in references]
    nearest = min((abs(len(words) - len(found)), len(words)) for words in many)[1]
    counts = [len(found), nearest]
    for n in range(1, BLEU_ORDER + 1):
        ours, theirs = _grams(found, n), Counter[object]()
        for words in many:
            theirs |= _grams(words, n)
        counts += [sum((ours & theirs).values()), sum(ours.values())]
    return counts


def bleu(counts: Sequence[Sequence[int]]) -> float:
    """BLEU of a corpus from 0 to 1, from the counts of its sentences, with exponential smoothing as in sacrebleu."""
    length, wanted, *grams = map(sum, zip(*counts, strict=True))
    logs, smoothing = [], 1.0
    for common, total in zip(grams[::2], grams[1::2], strict=True):
        if not total:
            return 0.0
        if not common:
            smoothing *= 2
        logs.append(math.log(common / total if common else 1 / (smoothing * total)))
    if not any(grams[::2]):
        return 0.0
    brevity = 1.0 if length >= wanted else math.exp(1 - wanted / length)
    return brevity * math.exp(sum(logs) / len(logs))


def _words(text: str) -> list[str]:
    line = f" {text.replace('<skipped>', '').replace('-' + chr(10), '').replace(chr(10), ' ')} "
    for entity, sign in (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")):
        line = line.replace(entity, sign)
    line = _AFTER_NO_DIGIT.sub(r"\1 \2 ", _SYMBOLS.sub(r" \1 ", line))
    return _DASH.sub(r"\1 \2 ", _BEFORE_NO_DIGIT.sub(r" \1 \2", line)).split()


def _grams(items: str | list[str], n: int) -> Counter[object]:
    return Counter(tuple(items[i : i + n]) for i in range(len(items) - n + 1))
