"""Sentiment, question answering, summaries and translation: their metrics, their generators and published files."""

import json
import random
from pathlib import Path

import pytest

from flatout.errors import UsageError
from flatout.tasks import Grader, Measured, Worked, open_task, overlap
from flatout.tasks.language import READERS, SIZES

NAMES = tuple(READERS)
SENTENCES = [
    ("The cat sat on the mat.", "A cat sat on the mat!"),
    ("Tu ne peux pas changer Tom.", "Tu ne peux pas compter sur son aide."),
    ("12,5 % of all, 3-4 (some) & more", "12.5 % of all, 3-4 of some & more"),
    ("", "something"),
    ("one", "one"),
    ("a b c d e f g", "g f e d c b a"),
    ("naïve façade — déjà vu…", "naive facade, déjà vu"),
    ("the the the the", "the cat"),
]


def noise(seed: int) -> str:
    chance = random.Random(seed)
    words = ["the", "a", "cat", "dog,", "runs.", "fast", "12", "3.5", "(x)", "é-ü"]
    return " ".join(chance.choice(words) for _ in range(chance.randint(1, 30)))


PAIRS = [*SENTENCES, *((noise(i), noise(i + 1000)) for i in range(40))]


def test_chrf_is_sacrebleus() -> None:
    theirs = pytest.importorskip("sacrebleu").CHRF()
    for found, wanted in PAIRS:
        assert overlap.chrf(found, [wanted]) == pytest.approx(theirs.sentence_score(found, [wanted]).score / 100)


def test_bleu_is_sacrebleus() -> None:
    theirs = pytest.importorskip("sacrebleu").BLEU()
    found, wanted = zip(*PAIRS, strict=True)
    counts = [overlap.bleu_counts(a, [b]) for a, b in PAIRS]
    assert overlap.bleu(counts) == pytest.approx(theirs.corpus_score(found, [wanted]).score / 100)
    few = PAIRS[:2]
    score = theirs.corpus_score([a for a, _ in few], [[b for _, b in few]]).score
    assert overlap.bleu([overlap.bleu_counts(*pair[:1], pair[1:]) for pair in few]) == pytest.approx(score / 100)


def test_rouge_l_is_that_of_rouge_score() -> None:
    theirs = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    for found, wanted in PAIRS:
        assert overlap.rouge_l(found, [wanted]) == pytest.approx(theirs.score(wanted, found)["rougeL"].fmeasure)


def test_squads_metrics() -> None:
    assert overlap.exact_match("The October, 1973!", ["in 1973", "october 1973"]) == 1.0
    assert overlap.exact_match("1974", ["1973"]) == 0.0
    assert overlap.f1("in October 1973", ["October 1973"]) == pytest.approx(0.8)
    assert overlap.f1("", ["x"]) == 0.0


@pytest.mark.parametrize("name", [*NAMES, "code"])
def test_generated_questions_are_solved_by_their_solutions_and_disjoint(name: str) -> None:
    options = "?level=1&form=short" if name == "code" else ""
    train, valid = open_task(f"{name}:train{options}"), open_task(f"{name}{options}")
    assert isinstance(train, Worked)
    assert isinstance(valid, Worked)
    if name != "code":
        assert (train.size, valid.size) == (SIZES["train"], SIZES["valid"])
        texts = [{task.prompt(i)[-1]["content"] for i in range(task.size)} for task in (train, valid)]  # type: ignore[attr-defined]
        assert not texts[0] & texts[1]
        assert [len(found) for found in texts] == [SIZES["train"], SIZES["valid"]]
    with Grader(f"{name}:train{options}") as grader:
        right = [grader.grade(i, f" {train.solution(i)}").reward for i in range(5)]
        wrong = [grader.grade(i, "zzz").reward for i in range(5)]
    assert right == [1.0] * 5
    assert wrong == [0.0] * 5


def test_measures_come_with_the_reward() -> None:
    task = open_task("translation")
    assert isinstance(task, Measured)
    assert isinstance(task, Worked)
    with Grader("translation") as grader:
        graded = grader.grade(0, task.solution(0))
    assert task.metric == "chrF"
    assert task.summed([graded.measures["BLEU"]]) == pytest.approx(1.0)


def test_published_files(tmp_path: Path) -> None:
    written = {
        "sentiment:sst2.tsv": "sentence\tlabel\nit works\t1\nit fails\t0\n",
        "sentiment:uci.txt": "Great.\t1\nno tab here 0\n",
        "qa:rows.jsonl": json.dumps({"context": "c", "question": "q?", "answers": {"text": ["x", "y"]}}),
        "summary:xsum.jsonl": json.dumps({"document": "d", "summary": "s", "id": "1"}),
        "summary:samsum.json": json.dumps([{"dialogue": "A: hi", "summary": "s", "id": 1}]),
        "summary:scitldr.jsonl": json.dumps({"source": ["a", "b"], "target": ["s", "t"]}),
        "translation:pairs.tsv": "Hi.\tSalut.\tCC-BY\n",
        "translation:rows.jsonl": json.dumps({"translation": {"en": "Hi", "de": "Hallo"}}),
    }
    for spec, content in written.items():
        name, _, file = spec.partition(":")
        (tmp_path / file).write_text(content)
        task = open_task(f"{name}:{tmp_path / file}")
        assert task.prompt(0)[-1]["content"]  # type: ignore[union-attr]
        assert task.solution(0)  # type: ignore[union-attr]
    (tmp_path / "train.en").write_text("Hi\nYes\n")
    (tmp_path / "train.de").write_text("Hallo\nJa\n")
    parallel = open_task(f"translation:{tmp_path / 'train.en'}")
    assert parallel.solution(1) == "Ja"  # type: ignore[union-attr]
    assert "German" in parallel.prompt(1)[0]["content"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("spec", "file", "content", "says"),
    [
        ("sentiment", "a.tsv", "sentence\tlabel\nx\t7\n", "0 or 1"),
        ("qa", "a.jsonl", '{"context": "c", "question": "q"}', "no answers"),
        ("summary", "a.jsonl", '{"document": "d"}', "needs summary"),
        ("translation", "a.tsv", "alone\n", "translation"),
        ("translation", "a.en", "alone\n", "another language"),
        ("sentiment", "a.txt", "\n", "no rows"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, spec: str, file: str, content: str, says: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(UsageError, match=says):
        open_task(f"{spec}:{tmp_path / file}")


def test_options_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Great.\t1\n")
    for options, says in (("part=some", "part"), ("share=200&part=train", "per cent"), ("size=3", "unknown")):
        with pytest.raises(UsageError, match=says):
            open_task(f"sentiment:{tmp_path / 'a.txt'}?{options}")
    with pytest.raises(UsageError, match="for files"):
        open_task("sentiment:train?part=train")


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        ("sentiment:{}/uci_sentiment/amazon_cells_labelled.txt", 1000),
        ("sentiment:{}/uci_sentiment/yelp_labelled.txt", 1000),
        ("qa:{}/squad/dev-v1.1.rebuilt.json", 10570),
        ("summary:{}/scitldr/train.jsonl", 1992),
        ("translation:{}/tatoeba_fra_eng/fra_eng_20k.tsv", 20000),
    ],
)
def test_real_files(real_data: Path, spec: str, size: int) -> None:
    task = open_task(spec.format(real_data))
    assert task.size == size
    parts = [open_task(f"{spec.format(real_data)}?part={part}") for part in ("train", "valid")]
    assert sum(part.size or 0 for part in parts) == size
    groups = [{item.group for item in part.items} for part in parts]  # type: ignore[union-attr]
    assert not groups[0] & groups[1]
    for i in range(0, size, size // 20):
        assert task.reward(i, task.solution(i)) == 1.0  # type: ignore[union-attr]
