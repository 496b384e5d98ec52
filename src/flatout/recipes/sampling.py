"""Samples correct completions of questions, chunk by chunk: the first half of recipe rft, and `flatout sample`.

A chunk is written atomically when its last question is done, so a killed run continues with the first missing chunk.
Random draws depend only on (seed, question, sample). Which completions are kept depends only on their sample numbers,
never on the order in which they finished.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from flatout.config.settings import RftSettings
from flatout.data.tokenizer import Tokenizer
from flatout.engine.faults import is_out_of_memory
from flatout.engine.ranks import Ranks
from flatout.errors import FlatoutError, RunFailed, UsageError
from flatout.recipes.sealed import Seals
from flatout.record import Event
from flatout.record.events import ChunkSampled, RowsHalved, SamplingProgress
from flatout.sample import Completion, Sampler, Sampling, prompt_ids, text_of
from flatout.sample.vllm import Vllm
from flatout.tasks import Graded, Grader, Task

# Workers that grade while the sampler runs.
MOST_GRADERS = 8
# The most answers in a request to one of them, and the time that a request should take.
MOST_TOGETHER, REQUEST_S = 32, 0.02
# Seconds between two progress events.
PROGRESS_S = 5.0
END = "</answer>"

T = TypeVar("T")
# An event for the record.
Report = Callable[[Event], None]


def _discard(event: Event) -> None:
    """Used where there is no record."""


class Stopped(Exception):
    """A stop was requested: the current chunk is abandoned, earlier ones are kept."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A correct completion of a question."""

    question: int
    sample: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The counts of sampling. Counts of several chunks are added field by field."""

    questions: int = 0
    solved: int = 0  # questions with a kept completion, from this round or an earlier one
    samples: int = 0
    correct: int = 0
    answered: int = 0  # in the requested format
    duplicates: int = 0  # correct, but the same as an earlier one
    unfinished: int = 0  # correct, but cut off before the end
    cut_short: int = 0
    too_long: int = 0
    killed: int = 0
    kept: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def success_rate(self) -> float | None:
        """Share of the questions that were solved."""
        return self.solved / self.questions if self.questions else None

    def to_json(self) -> dict[str, Any]:
        rates = {
            "success_rate": self.success_rate,
            "correct_share": self.correct / self.samples if self.samples else None,
            "answered_share": self.answered / self.samples if self.samples else None,
            "tokens_per_s": self.tokens / self.seconds if self.seconds else None,
        }
        return asdict(self) | rates


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some questions with their kept completions. All chunks of a dataset share one `identity`."""

    identity: str
    questions: tuple[int, ...]
    kept: tuple[Kept, ...]
    counts: Counts

    def write(self, path: Path, seals: Seals) -> None:
        seals.write(path, asdict(self))

    @classmethod
    def read(cls, path: Path, seals: Seals, *, identity: str) -> Chunk:
        """Reads a chunk; a missing one raises FileNotFoundError."""
        chunk = seals.read(path, cls)
        if chunk.identity == identity:
            return chunk
        raise UsageError(
            f"{path} was sampled with another task, model or settings: give those of config.yaml, or start again "
            "with another --run FOLDER"
        )


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One completion, graded."""

    done: Completion
    text: str
    graded: Graded


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """An answer that is to be graded."""

    question: int
    text: str
    future: Future[Graded]


class Graders:
    """Several workers that grade in parallel; identical answers to a question are graded once.

    Answers that are graded quickly go to a worker several at a time, because a request costs a few milliseconds.
    """

    def __init__(self, spec: str, *, count: int | None = None, ranks: int = 1) -> None:
        """`ranks` share the cores, unless there is a `count`."""
        count = count or max(1, min(MOST_GRADERS, ((os.cpu_count() or 2) - 1) // ranks))
        self._all = [Grader(spec) for _ in range(count)]
        self._free: SimpleQueue[Grader] = SimpleQueue()
        for grader in self._all:
            self._free.put(grader)
        self._threads = ThreadPoolExecutor(count)
        self._known: dict[tuple[int, str], Future[Graded]] = {}
        self._waiting: deque[Waiting] = deque()
        self._together = 1  # answers in the next request
        self._begun = threading.Condition()  # the grading of an answer

    def grade(self, i: int, text: str) -> Future[Graded]:
        if (i, text) not in self._known:
            self._known[i, text] = Future()
            self._waiting.append(Waiting(question=i, text=text, future=self._known[i, text]))
            self._threads.submit(self._grade_some)
        return self._known[i, text]

    def wait_in_queue(self, futures: Sequence[Future[Graded]]) -> None:
        """Waits until the last of these answers is being graded."""
        with self._begun:
            self._begun.wait_for(lambda: all(future.running() or future.done() for future in futures))

    def forget(self) -> None:
        self._known.clear()

    def _grade_some(self) -> None:
        """Grades the answers that have waited longest; as many calls follow as there are answers, or more."""
        grader = self._free.get()
        try:
            some = self._taken(max(1, min(self._together, len(self._waiting) // len(self._all))))
            if some:
                with self._begun:
                    for one in some:
                        one.future.set_running_or_notify_cancel()
                    self._begun.notify_all()
                self._graded(grader, some)
        finally:
            self._free.put(grader)

    def _taken(self, count: int) -> list[Waiting]:
        taken: list[Waiting] = []
        with suppress(IndexError):  # another thread took the rest
            while len(taken) < count:
                taken.append(self._waiting.popleft())
        return taken

    def _graded(self, grader: Grader, some: Sequence[Waiting]) -> None:
        try:
            began = time.monotonic()
            for one, graded in zip(some, grader.grade_each([(one.question, one.text) for one in some]), strict=True):
                # A busy machine may have been the reason, and the kept completions must not depend on that.
                known = graded.status == "graded"
                one.future.set_result(graded if known else grader.grade(one.question, one.text))
            each_s = (time.monotonic() - began) / len(some)
            self._together = max(1, min(2 * len(some), MOST_TOGETHER, int(REQUEST_S / each_s)))
        except BaseException as error:
            for one in some:
                if not one.future.done():
                    one.future.set_exception(error)

    def __enter__(self) -> Graders:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for grader in self._all:
            grader.close()


class Fitting:
    """A sampler with as many concurrent sequences as memory holds. Out of memory, it retries with half as many."""

    def __init__(self, open_sampler: Callable[[int], Sampler], *, rows: int, tell: Report = _discard) -> None:
        self.open_sampler, self.rows, self.tell = open_sampler, rows, tell
        self._sampler: Sampler | None = None

    def run(self, work: Callable[[Sampler], T]) -> T:
        while True:
            self._sampler = self._sampler or self.open_sampler(self.rows)
            try:
                return work(self._sampler)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                said = str(error).splitlines()[0]
            # After the handler, the failed sampler and all its memory are freed.
            self.close()
            if self.rows == 1:
                raise RunFailed(
                    f"sampling ran out of memory even for one completion at a time ({said}): shorten "
                    "sample.max_tokens and the prompt, or use a smaller model"
                )
            free_memory()
            self.rows //= 2
            self.tell(RowsHalved(rows=2 * self.rows, now=self.rows, error=said))

    def close(self) -> None:
        """Frees the sampler, and ends its engine if it has one."""
        sampler, self._sampler = self._sampler, None
        if isinstance(sampler, Vllm):
            sampler.close()


def free_memory() -> None:
    """Frees unused memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Samples a task's questions into a folder of chunks."""

    task: Task
    spec: str
    tokenizer: Tokenizer
    sampling: Sampling
    rft: RftSettings
    fitting: Fitting
    identity: str
    seals: Seals | None = None  # None: for a folder that belongs to no run
    ranks: Ranks = field(default_factory=Ranks)
    tell: Report = _discard
    memory: Callable[[], Mapping[str, float]] = dict
    stop: Callable[[], bool] = bool

    def collect(
        self, questions: Sequence[int], *, folder: Path, before: Mapping[int, Sequence[Kept]] | None = None
    ) -> list[Chunk]:
        """All chunks; existing ones are read from file. `before`: the completions that earlier rounds kept.

        Ranks take chunks in turn, and read those of the others when all are done.
        """
        size, seals, ranks = self.rft.chunk, self.seals or Seals(root=folder), self.ranks
        parts = [questions[at : at + size] for at in range(0, len(questions), size)]
        mine = range(ranks.rank, len(parts), ranks.world)
        progress = _Progress(self, sum(len(parts[number]) for number in mine))
        found, error = dict[int, Chunk](), None

        def read(number: int) -> Chunk:
            return Chunk.read(folder / f"{number:05d}.json", seals, identity=self.identity)

        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))
        try:
            with Graders(self.spec, ranks=here) as graders:
                for number in mine:
                    try:
                        chunk = read(number)
                    except FileNotFoundError:
                        chunk = self._chunk(parts[number], graders, progress, before or {})
                        chunk.write(folder / f"{number:05d}.json", seals)
                        graders.forget()
                        gc.collect()
                    found[number] = chunk
                    progress.finished(chunk)
        except (FlatoutError, Stopped) as raised:
            error = raised
        # All ranks end if one fails or is stopped, with its message.
        failed = ranks.first_text(str(error) if isinstance(error, FlatoutError) else "")
        stopped = ranks.any(isinstance(error, Stopped))
        if error is not None:
            raise error
        if failed:
            raise RunFailed(f"another rank failed: {failed}")
        if stopped:
            raise Stopped("SIGTERM")
        return [found.get(number) or read(number) for number in range(len(parts))]

    def _chunk(
        self, questions: Sequence[int], graders: Graders, progress: _Progress, before: Mapping[int, Sequence[Kept]]
    ) -> Chunk:
        began = time.monotonic()
        tried: dict[int, list[Attempt]] = {i: [] for i in questions}
        kept = {i: list(before.get(i, ())) for i in questions}
        drawn = 0
        for count in sample_counts(self.rft):
            left = [i for i in questions if not self.rft.adaptive or len(kept[i]) < self.rft.keep]
            if not left:
                break
            for i, one in self._draw(left, graders, progress, first=drawn, samples=count):
                tried[i].append(one)
            drawn += count
            for i in left:
                tried[i].sort(key=lambda one: one.done.sample)
                kept[i] = chosen(i, tried[i], before.get(i, ()), most=self.rft.keep)
            progress.checked(kept, keep=self.rft.keep)
        counts = _counts(kept, tried, seconds=time.monotonic() - began)
        self.tell(
            ChunkSampled(
                samples=counts.samples,
                correct=counts.correct,
                tokens=counts.tokens,
                seconds=counts.seconds,
                surprisal=_surprisal(tried),
            )
        )
        return Chunk(
            identity=self.identity,
            questions=tuple(questions),
            kept=tuple(one for i in questions for one in kept[i]),
            counts=counts,
        )

    def _draw(
        self, questions: Sequence[int], graders: Graders, progress: _Progress, *, first: int, samples: int
    ) -> list[tuple[int, Attempt]]:
        prompts = [prompt_ids(self.tokenizer, self.task.prompt(i)) for i in questions]

        def drawn(sampler: Sampler) -> list[tuple[int, Attempt]]:
            done = sampler.generate(prompts, sampling=self.sampling, samples=samples, first=first, keys=questions)
            return self._graded(done, questions, graders, progress)

        return self.fitting.run(drawn)

    def _graded(
        self, drawn: Iterator[Completion], questions: Sequence[int], graders: Graders, progress: _Progress
    ) -> list[tuple[int, Attempt]]:
        waiting = []
        for done in drawn:
            if self.stop():
                raise Stopped
            text = text_of(self.tokenizer, done.ids, self.sampling).strip()
            i = questions[done.prompt]
            waiting.append((i, done, text, graders.grade(i, text)))
            progress.sample(done)
        return [(i, Attempt(done=done, text=text, graded=future.result())) for i, done, text, future in waiting]


def sample_counts(rft: RftSettings) -> Iterator[int]:
    """How many samples to generate before each check of what is solved; their running total doubles."""
    total, wanted = 0, rft.first if rft.adaptive else rft.oversample
    while total < rft.oversample:
        count = min(wanted, rft.oversample) - total
        yield count
        total, wanted = total + count, 2 * wanted


def chosen(i: int, tried: Sequence[Attempt], before: Sequence[Kept], *, most: int) -> list[Kept]:
    """The kept completions of a question: earlier ones, then new correct ones by sample number, without duplicates."""
    kept = list(before)
    said = {plain(one.text) for one in kept}
    for one in tried:
        text = finished(one)
        if len(kept) < most and text is not None and plain(text) not in said:
            said.add(plain(text))
            kept.append(Kept(question=i, sample=one.done.sample, text=text))
    return kept


def finished(one: Attempt) -> str | None:
    """The text of a correct completion; one that was cut off, up to its answer; None if it is not usable."""
    if one.graded.reward < 1.0:
        return None
    if one.done.status == "stopped":
        return one.text
    head, mark, _ = one.text.rpartition(END)
    return head + mark or None


def plain(text: str) -> str:
    """Equal for texts that differ only in case and white space."""
    return " ".join(text.casefold().split())


def _counts(kept: Mapping[int, Sequence[Kept]], tried: Mapping[int, Sequence[Attempt]], *, seconds: float) -> Counts:
    every = [one for many in tried.values() for one in many]
    correct = {i: [one for one in many if one.graded.reward >= 1.0] for i, many in tried.items()}
    texts = {i: [text for one in many if (text := finished(one)) is not None] for i, many in correct.items()}
    num_correct, num_whole = (sum(map(len, some.values())) for some in (correct, texts))
    return Counts(
        questions=len(kept),
        solved=sum(bool(many) for many in kept.values()),
        samples=len(every),
        correct=num_correct,
        answered=sum(one.graded.answered for one in every),
        duplicates=sum(len(many) - len(set(map(plain, many))) for many in texts.values()),
        unfinished=num_correct - num_whole,
        cut_short=sum(one.done.status == "length" for one in every),
        too_long=sum(one.done.status == "too_long" for one in every),
        killed=sum(one.graded.status == "killed" for one in every),
        kept=sum(map(len, kept.values())),
        tokens=sum(len(one.done.ids) for one in every),
        seconds=seconds,
    )


def _surprisal(tried: Mapping[int, Sequence[Attempt]]) -> float | None:
    """The mean negative log-probability of all tokens."""
    found = [one.done.logprobs for many in tried.values() for one in many]
    tokens = sum(map(len, found))
    return -sum(map(sum, found)) / tokens if tokens else None


class _Progress:
    """Reports the progress of sampling at intervals."""

    def __init__(self, of: Sampled, questions: int) -> None:
        self.of, self.questions = of, questions
        self.total = Counts()  # of the finished chunks
        self.chunk = Counts()  # of the current chunk, at the last check
        self.settled = self.fresh = self.fresh_samples = self.samples = self.tokens = 0
        self.began = self.told = time.monotonic()

    def sample(self, done: Completion) -> None:
        self.samples += 1
        self.tokens += len(done.ids)
        if time.monotonic() - self.told >= PROGRESS_S:
            self.tell()

    def checked(self, kept: Mapping[int, Sequence[Kept]], *, keep: int) -> None:
        self.settled = sum(len(many) >= keep for many in kept.values())
        solved, rows = sum(bool(many) for many in kept.values()), sum(map(len, kept.values()))
        self.chunk = Counts(questions=len(kept), solved=solved, kept=rows)

    def finished(self, chunk: Chunk) -> None:
        self.total += chunk.counts
        if self.samples:  # not read from file
            self.fresh += len(chunk.questions)
            self.fresh_samples += self.samples
        self.chunk, self.settled, self.samples = Counts(), 0, 0
        self.tell()

    def _left_s(self, took: float) -> float | None:
        """Counts questions whose samples are still coming by their share: all of a chunk are under way at once."""
        each = self.fresh_samples / self.fresh if self.fresh else self.of.rft.oversample
        under_way = max(self.settled, self.samples / each)
        here, open_questions = self.fresh + under_way, self.questions - self.total.questions
        return took / here * max(0.0, open_questions - under_way) if here else None

    def tell(self) -> None:
        self.told = time.monotonic()
        took, done = self.told - self.began, self.total.questions + self.settled
        sofar = self.total + self.chunk
        self.of.tell(
            SamplingProgress(
                questions=done,
                of=self.questions,
                samples=self.total.samples + self.samples,
                kept=sofar.kept,
                success_rate=sofar.success_rate,
                tokens_per_s=self.tokens / took if took and self.tokens else None,
                left_s=self._left_s(took),
                rows=self.of.fitting.rows,
                memory=dict(self.of.memory()),
            )
        )
