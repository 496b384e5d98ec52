"""Tasks are measured as they say, by any sampler: here one whose answers are known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from flatout.data.tokenizer import ByteTokenizer
from flatout.errors import UsageError
from flatout.evaluate import Score, chosen, compare, evaluate
from flatout.sample import Completion, Sampling
from flatout.sample.request import Prompt
from flatout.tasks.domains import DOMAINS, Generated
from flatout.tasks.units import Units

TOKENIZER = ByteTokenizer()


class Scripted:
    """A sampler that says what it is told to: `says(prompt text, sample)`; likes early letters of choices."""

    window = 4096

    def __init__(self, says: Callable[[str, int], str], likes: Callable[[str, str], float] | None = None) -> None:
        self.says, self.likes = says, likes

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: Sampling, samples: int = 1, keys: Sequence[int] | None = None
    ) -> Iterator[Completion]:
        for i, prompt in reversed(list(enumerate(prompts))):  # out of order, as samplers may
            for sample in range(samples):
                ids = tuple(self.says(TOKENIZER.decode(prompt), sample).encode())
                yield Completion(prompt=i, sample=sample, ids=ids, logprobs=(0.0,) * len(ids), status="stopped")

    def stream(self, prompt: Prompt, *, sampling: Sampling) -> Iterator[int]:
        yield from self.says(TOKENIZER.decode(prompt), 0).encode()

    def likelihoods(self, items: Sequence[tuple[Prompt, Sequence[Prompt]]]) -> list[list[float]]:
        assert self.likes is not None
        return [[self.likes(TOKENIZER.decode(p), TOKENIZER.decode(c)) for c in many] for p, many in items]

    def surprisals(self, sequences: Sequence[Prompt]) -> Iterator[list[float]]:
        return ([math.log(4.0)] * (len(sequence) - 1) for sequence in sequences)


def scores(specs: list[str], sampler: Scripted, **options: object) -> list[Score]:
    sampling = Sampling(max_tokens=64)
    return list(evaluate(specs, sampler=sampler, tokenizer=TOKENIZER, sampling=sampling, **options))  # type: ignore[arg-type]


def solver(share_right: float) -> Scripted:
    """Solves unit conversions, but only the first share of every thousand."""
    units = Units()
    answers = {units.question(i).text: (i, units.question(i).answer) for i in range(1000)}

    def says(prompt: str, sample: int) -> str:
        question = prompt.rpartition("Question: ")[2].removesuffix("\nAnswer:")
        i, answer = answers[question]
        return f"<answer>{answer:.5g}</answer>" if i < 1000 * share_right else "who knows"

    return Scripted(says)


def test_written_answers_are_graded() -> None:
    [score] = scores(["units"], solver(0.25), limit=200)
    right = sum(i < 250 for i in score.indices)
    assert (score.metric, score.n, score.of, score.samples) == ("accuracy", 200, 1000, 1)
    assert score.value == right / 200
    assert score.details["answered"] == right / 200
    assert score.low is not None
    assert score.high is not None
    assert score.low < score.value < score.high
    assert all(reward == float(i < 250) for i, reward in zip(score.indices, score.rewards, strict=True))


@pytest.mark.parametrize("name", DOMAINS)
def test_worked_solutions_of_every_domain_score_in_full(name: str) -> None:
    task = Generated(name=name)
    solutions = {task.question(i).text: task.solution(i) for i in range(200)}
    [score] = scores([name], Scripted(lambda prompt, _: next(s for q, s in solutions.items() if q in prompt)), limit=20)
    assert (score.task, score.metric, score.value, score.n, score.of) == (name, "accuracy", 1.0, 20, 200)
    assert score.details["answered"] == 1.0


def test_several_samples_are_averaged_by_question() -> None:
    units = Units()
    wanted = {units.question(i).text: units.question(i).answer for i in range(1000)}

    def says(prompt: str, sample: int) -> str:
        question = prompt.rpartition("Question: ")[2].removesuffix("\nAnswer:")
        return f"<answer>{wanted[question]:.5g}</answer>" if sample == 0 else "<answer>-1</answer>"

    [score] = scores(["units"], Scripted(says), limit=5, samples=4)
    assert score.rewards == (0.25,) * 5
    assert score.details["solved_once"]["value"] == 1.0
    assert score.details["answered"] == 1.0


def test_choices_are_weighed_per_byte(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    rows = [{"question": f"{i}?", "choices": ["x", "y", "z"], "answer": i % 3} for i in range(30)]
    path.write_text("\n".join(map(json.dumps, rows)))

    def likes(prompt: str, choice: str) -> float:
        assert choice in (" A", " B", " C")
        return {"A": -1.0, "B": -2.0, "C": -3.0}[choice.strip()]

    [score] = scores([f"choice:{path}"], Scripted(lambda *_: "", likes))
    assert score.value == pytest.approx(1 / 3)
    assert score.n == 30


def test_perplexity_counts_every_token_once(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("a" * 2500 + "<|endoftext|>" + "b" * 10)
    [score] = scores([f"perplexity:{path}"], Scripted(lambda *_: ""))
    assert score.n == 2499 + 9
    assert score.value == pytest.approx(4.0)
    assert score.details["bits_per_byte"] == pytest.approx(2.0)
    assert score.details["windows"] == 4
    assert score.low == pytest.approx(4.0)


def test_a_limit_takes_the_same_questions_for_every_model() -> None:
    assert chosen(1000, limit=50) == chosen(1000, limit=50)
    assert len(set(chosen(1000, limit=50))) == 50
    assert max(chosen(1000, limit=50)) > 800, "spread over the file"
    assert chosen(10, limit=50) == list(range(10))
    assert chosen(None, limit=3) == [0, 1, 2]
    with pytest.raises(UsageError, match="is endless"):
        chosen(None, limit=None)


def test_two_models_are_compared_on_the_same_questions() -> None:
    [worse], [better] = (scores(["units"], solver(share), limit=150) for share in (0.2, 0.5))
    difference = compare(worse, better)
    assert difference is not None
    assert difference.value == pytest.approx(better.value - worse.value)
    assert difference.low > 0
    [other] = scores(["units"], solver(0.5), limit=100)
    assert compare(worse, other) is None


def test_a_mistake_in_the_last_task_costs_nothing() -> None:
    asked: list[str] = []

    def says(prompt: str, sample: int) -> str:
        asked.append(prompt)
        return ""

    with pytest.raises(UsageError, match="did you mean units"):
        scores(["units", "unitss"], Scripted(says), limit=2)
    with pytest.raises(UsageError, match="is endless"):
        scores(["units", "units:endless"], Scripted(says))
    assert not asked


def test_perplexity_is_compared_by_loss_where_the_tokens_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("a" * 2500 + "<|endoftext|>" + "b" * 1500)

    class Surer(Scripted):
        def surprisals(self, sequences: Sequence[Prompt]) -> Iterator[list[float]]:
            return ([math.log(4.0) - 0.25] * (len(sequence) - 1) for sequence in sequences)

    [first] = scores([f"perplexity:{path}"], Scripted(lambda *_: ""))
    [second] = scores([f"perplexity:{path}"], Surer(lambda *_: ""))
    found = compare(first, second)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((-0.25, -0.25, -0.25))
    assert (found.n, found.p) == (first.n, None)
    assert "tokens" not in first.brief()
    path.write_text("other text " * 400)
    [other] = scores([f"perplexity:{path}"], Surer(lambda *_: ""))
    assert compare(first, other) is None
