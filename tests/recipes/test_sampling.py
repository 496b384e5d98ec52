"""What is kept depends on draws and grades, never on time, memory or kills; hostile completions are worth nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.config.settings import RftSettings
from flatout.data.tokenizer import ByteTokenizer
from flatout.errors import EnvironmentLacks, RunFailed, UsageError
from flatout.recipes import sampling, sealed
from flatout.recipes.sampling import Chunk, Fitting, Sampled, Stopped, sample_counts
from flatout.recipes.sealed import Seals
from flatout.sample import Completion, Sampling
from flatout.tasks import open_task

Says = Callable[[int, int], str]  # (question, sample) to a completion
SPEC = "sums:train?prompt=bare"


def right(question: int) -> str:
    task = open_task("sums:train")
    return f"so <answer>{sum(task.numbers(question))}</answer>"  # type: ignore[union-attr]


class Scripted:
    """A sampler that says what it is told to, finished in any order."""

    window = 512

    def __init__(self, says: Says, *, order: int = 0, status: str = "stopped") -> None:
        self.says, self.order, self.status = says, order, status
        self.drawn: list[tuple[int, int]] = []

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling,
        samples: int = 1,
        first: int = 0,
        keys: Sequence[int] | None = None,
    ) -> Iterator[Completion]:
        assert keys is not None
        asked = [(at, sample) for at in range(len(prompts)) for sample in range(first, first + samples)]
        random.Random(self.order).shuffle(asked)
        for at, sample in asked:
            self.drawn.append((keys[at], sample))
            ids = tuple(self.says(keys[at], sample).encode())
            yield Completion(prompt=at, sample=sample, ids=ids, logprobs=(), status=self.status)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _one_grader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MOST_GRADERS", 1)


def sampled(sampler: Any, *, spec: str = SPEC, rows: int = 8, **changes: Any) -> Sampled:
    rft = replace(RftSettings(task=spec, oversample=6, first=2, chunk=3), **changes)
    task = open_task(spec)
    return Sampled(
        task=task,  # type: ignore[arg-type]
        spec=spec,
        tokenizer=ByteTokenizer(),
        sampling=Sampling(max_tokens=64),
        rft=rft,
        fitting=Fitting(lambda rows: sampler, rows=rows),
        identity="one",
    )


def kept(chunks: Sequence[Chunk]) -> list[tuple[int, int, str]]:
    return [(one.question, one.sample, one.text) for chunk in chunks for one in chunk.kept]


def test_looks_add_up_to_what_was_asked_for() -> None:
    assert list(sample_counts(RftSettings(oversample=30, first=4))) == [4, 4, 8, 14]
    assert list(sample_counts(RftSettings(oversample=3, first=4))) == [3]
    assert list(sample_counts(RftSettings(oversample=30, adaptive=False))) == [30]


def test_solved_questions_are_asked_no_more_and_the_first_right_sample_is_kept(tmp_path: Path) -> None:
    solved_at = {0: 1, 1: 0, 2: 3, 3: 9}  # 3 is never solved: six samples are drawn at most

    def says(question: int, sample: int) -> str:
        return right(question) if sample >= solved_at[question] else "no idea"

    results = []
    for order in (1, 2):  # whatever is finished first
        sampler = Scripted(says, order=order)
        chunks = sampled(sampler).collect(range(4), folder=tmp_path / str(order))
        results.append(kept(chunks))
        drawn = {i: sum(question == i for question, _ in sampler.drawn) for i in range(4)}
        assert drawn == {0: 2, 1: 2, 2: 4, 3: 6}
    assert results[0] == results[1] == [(0, 1, right(0)), (1, 0, right(1)), (2, 3, right(2))]
    assert [len(chunk.questions) for chunk in chunks] == [3, 1]
    counts = chunks[0].counts + chunks[1].counts
    assert (counts.questions, counts.solved, counts.samples, counts.kept) == (4, 3, 14, 3)
    assert counts.success_rate == 0.75


def test_all_samples_of_every_question_where_nothing_is_adapted(tmp_path: Path) -> None:
    sampler = Scripted(lambda question, sample: right(question))
    chunks = sampled(sampler, adaptive=False).collect(range(2), folder=tmp_path)
    assert len(sampler.drawn) == 12
    assert kept(chunks) == [(0, 0, right(0)), (1, 0, right(1))]


def test_rationales_that_differ_are_kept_up_to_k_and_no_two_alike(tmp_path: Path) -> None:
    said = ["Hm, {}", "hm,   {}", "Well, {}", "no", "Let me see, {}", "Now {}"]
    sampler = Scripted(lambda question, sample: said[sample].format(right(question)))
    chunks = sampled(sampler, keep=3).collect([0], folder=tmp_path)
    assert kept(chunks) == [(0, s, said[s].format(right(0))) for s in (0, 2, 4)]
    assert chunks[0].counts.duplicates == 1
    later = sampled(sampler, keep=4).collect([0], folder=tmp_path / "later", before={0: chunks[0].kept})
    assert [text for _, _, text in kept(later)] == [said[s].format(right(0)) for s in (0, 2, 4, 5)]


def test_what_was_cut_off_is_kept_up_to_its_answer(tmp_path: Path) -> None:
    sampler = Scripted(lambda question, sample: f"{right(question)} and then and th", status="length")
    chunks = sampled(sampler).collect([0], folder=tmp_path)
    assert kept(chunks) == [(0, 0, right(0))]


class Cramped(Scripted):
    """Runs out of memory after a few completions where more rows are in flight than fit."""

    def __init__(self, says: Says, *, rows: int, fits: int) -> None:
        super().__init__(says)
        self.rows, self.fits = rows, fits

    def generate(self, prompts: Any, **how: Any) -> Iterator[Completion]:
        for at, done in enumerate(super().generate(prompts, **how)):
            if at == 3 and self.rows > self.fits:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            yield done


@pytest.mark.parametrize(("fits", "tried"), [(2, [8, 4, 2]), (8, [8])])
def test_out_of_memory_halves_the_rows_and_changes_nothing_else(tmp_path: Path, fits: int, tried: list[int]) -> None:
    def says(question: int, sample: int) -> str:
        return right(question) if (question + sample) % 3 == 0 else f"{sample}"

    plenty = sampled(Scripted(says)).collect(range(5), folder=tmp_path / "plenty")
    rows: list[int] = []

    def opened(size: int) -> Cramped:
        rows.append(size)
        return Cramped(says, rows=size, fits=fits)

    work = replace(sampled(None), fitting=Fitting(opened, rows=8))
    chunks = work.collect(range(5), folder=tmp_path / "cramped")
    assert rows == tried
    assert kept(chunks) == kept(plenty)
    assert [c.counts.samples for c in chunks] == [c.counts.samples for c in plenty]


def test_too_little_memory_for_one_row_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    work = replace(sampled(None), fitting=Fitting(lambda size: Cramped(lambda q, s: "", rows=1, fits=0), rows=1))
    with pytest.raises(RunFailed, match=r"one completion at a time .*Tried to allocate 2 GiB.*sample.max_tokens"):
        work.collect(range(3), folder=tmp_path)


def test_a_stop_gives_up_the_chunk_at_hand_and_the_rest_is_sampled_later(tmp_path: Path) -> None:
    sampler = Scripted(lambda question, sample: right(question))
    whole = sampled(sampler).collect(range(9), folder=tmp_path / "whole")
    sampler.drawn.clear()
    work = replace(sampled(sampler), stop=lambda: len(sampler.drawn) > 8)
    with pytest.raises(Stopped):
        work.collect(range(9), folder=tmp_path / "broken")
    assert [path.name for path in sorted((tmp_path / "broken").iterdir())] == ["00000.json"]
    again = sampled(sampler).collect(range(9), folder=tmp_path / "broken")
    assert kept(again) == kept(whole)


def test_chunks_of_other_settings_are_refused(tmp_path: Path) -> None:
    sampler = Scripted(lambda question, sample: right(question))
    sampled(sampler).collect(range(3), folder=tmp_path)
    with pytest.raises(UsageError, match="another task, model or settings"):
        replace(sampled(sampler), identity="two").collect(range(3), folder=tmp_path)
    (tmp_path / "00000.json").write_text('{"identity": ')
    with pytest.raises(UsageError, match=r"00000.json is not valid JSON.*remove it, and it is rebuilt"):
        sampled(sampler).collect(range(3), folder=tmp_path)


def test_chunks_in_each_others_place_are_refused(tmp_path: Path) -> None:
    sampler = Scripted(lambda question, sample: right(question))
    sampled(sampler).collect(range(6), folder=tmp_path)
    one, other = tmp_path / "00000.json", tmp_path / "00001.json"
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    with pytest.raises(UsageError, match=r"00000.json is not what this run wrote there.*remove it, and it is rebuilt"):
        sampled(sampler).collect(range(6), folder=tmp_path)
    one.unlink()
    other.unlink()
    assert len(kept(sampled(sampler).collect(range(6), folder=tmp_path))) == 6


def test_a_chunk_with_other_figures_or_words_is_refused(tmp_path: Path) -> None:
    sampler = Scripted(lambda question, sample: right(question))
    sampled(sampler).collect(range(3), folder=tmp_path)
    path = tmp_path / "00000.json"
    text = path.read_text()
    for before, after in (
        ('"solved": 3', '"solved": 2'),
        ("so <answer>", "no <answer>"),
        ('"sample": 0', '"sample": 1'),
    ):
        assert before in text
        path.write_text(text.replace(before, after, 1))
        with pytest.raises(UsageError, match=r"00000.json is not what this run wrote there"):
            sampled(sampler).collect(range(3), folder=tmp_path)


def test_a_chunk_of_another_run_is_refused(tmp_path: Path) -> None:
    sampler = Scripted(lambda question, sample: right(question))
    for run in ("one", "two"):
        seals = Seals(root=tmp_path / run, run=run)
        replace(sampled(sampler), seals=seals).collect(range(3), folder=tmp_path / run)
    (tmp_path / "two" / "00000.json").replace(tmp_path / "one" / "00000.json")
    with pytest.raises(UsageError, match=r"one/00000.json is not what this run wrote there"):
        replace(sampled(sampler), seals=Seals(root=tmp_path / "one", run="one")).collect(
            range(3), folder=tmp_path / "one"
        )


def test_what_has_no_seal_is_used_in_a_run_of_an_older_version_only(tmp_path: Path) -> None:
    sampler = Scripted(lambda question, sample: right(question))
    sampled(sampler).collect(range(3), folder=tmp_path)
    path = tmp_path / "00000.json"
    value = json.loads(path.read_text())
    del value["seal"]
    path.write_text(json.dumps(value))
    told: list[str] = []
    work = replace(sampled(sampler), seals=Seals(root=tmp_path, tell=told.append))
    assert len(kept(work.collect(range(3), folder=tmp_path))) == 3
    assert "without a check" in told[0]
    with pytest.raises(UsageError, match="has no seal: remove it"):
        replace(work, seals=Seals(root=tmp_path, run="id")).collect(range(3), folder=tmp_path)


def test_a_full_disk_is_told_and_what_stands_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sealed.write_atomic

    def full(path: Path, data: bytes) -> None:
        if path.name == "00001.json":
            raise OSError(28, "No space left on device")
        whole(path, data)

    monkeypatch.setattr(sealed, "write_atomic", full)
    work = sampled(Scripted(lambda question, sample: right(question)))
    with pytest.raises(
        EnvironmentLacks, match=r"00001.json cannot be written: No space left on device. Free some space"
    ):
        work.collect(range(6), folder=tmp_path)
    assert Chunk.read(tmp_path / "00000.json", Seals(root=tmp_path), identity="one").questions == (0, 1, 2)


HOSTILE = [
    "no tags at all, and the sum is right there",
    "<answer><answer></answer>",
    "<answer><answer>1</answer></answer>",
    "</answer><answer>",
    "<answer>nan</answer>",
    "<answer>inf</answer>",
    "<answer>" + "9" * (1 << 20) + "</answer>",
    "1" * (1 << 20),
    "<answer>" * (1 << 17),
    "<answer>٣٤</answer>",
    "<answer>9**9**9</answer>",
    "<answer>__import__('os').system('touch pwned')</answer>",
    "<answer>\\frac{" * 2000 + "1" + "}{2}" * 2000 + "</answer>",
    "\\boxed{" * 5000 + "}" * 5000,
    "\x00\ud800"[:1] + "\uffff<answer>\x00</answer>",
    "",
]


@pytest.mark.parametrize("grader", ["sums", "math"])
def test_hostile_completions_are_worth_nothing_and_the_run_goes_on(
    tmp_path: Path, grader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec, honest = SPEC, right(0)
    if grader == "math":
        (tmp_path / "q.jsonl").write_text(json.dumps({"question": "x?", "answer": "\\frac{1}{3}"}) + "\n")
        spec, honest = f"jsonl:{tmp_path / 'q.jsonl'}?grader=math", "it is \\boxed{1/3}"
    sampler = Scripted(lambda question, sample: HOSTILE[sample] if sample < len(HOSTILE) else honest)
    work = sampled(sampler, spec=spec, adaptive=False, oversample=len(HOSTILE) + 1)
    [chunk] = work.collect([0], folder=tmp_path / "chunks")
    assert kept([chunk]) == [(0, len(HOSTILE), honest)]
    assert chunk.counts.correct == 1
    assert chunk.counts.samples == len(HOSTILE) + 1
    assert not (tmp_path / "pwned").exists()


def test_the_time_left_counts_questions_under_way() -> None:
    from types import SimpleNamespace

    from flatout.recipes.sampling import _Progress

    of = SimpleNamespace(rft=SimpleNamespace(oversample=8))
    progress = _Progress(of, 100)  # type: ignore[arg-type]
    assert progress._left_s(60.0) is None
    progress.samples = 792  # 99 questions' worth, none of which is settled yet
    left = progress._left_s(60.0)
    assert left is not None
    assert left < 1.0
    progress.settled = 100
    assert progress._left_s(60.0) == 0.0
