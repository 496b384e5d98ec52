"""Recipe router: the three phases end to end, exact after kills, and clear about mistakes."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.recipes.recipes_processes import trajectory, weights_hash
from tests.waiting import wait_until
from tests.warm import Started, flatout

from flatout.config import from_mapping
from flatout.data.packed import Packed
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import UsageError
from flatout.model import Router, lora
from flatout.model.router import documents_of, mixed
from flatout.recipes.mixture import ADAPTER, EXAMPLE, NOISE, PROMPT, SHARE, Source, Steps, open_mixture
from flatout.recipes.routing import choice_losses
from flatout.record import Run
from flatout.record.routed import PhaseScored

Call = Callable[..., subprocess.CompletedProcess[str]]
VALUES: dict[str, Any] = {
    "recipe": "router",
    "model": {"layers": 1, "hidden": 32, "heads": 2},
    "data": {
        "sequence_length": 128,
        "sources": [{"task": "sentiment", "size": 60}, {"task": "qa", "size": 60}, {"task": "translation", "size": 60}],
    },
    "router": {"teach_steps": 4, "router_steps": 4, "joint_steps": 4, "hidden": 16, "questions": 4, "answer_tokens": 8},
    "train": {"batch_tokens": 1024, "steps": 4, "lr": 3e-3},
    "lora": {"rank": 2},
    "plan": {"precision": "fp32", "threads": 1},
    "eval": {"every": 2, "tokens": 2048},
    "save": {"every": 2},
}


def changed(**sections: Any) -> dict[str, Any]:
    return {**VALUES, **{name: {**VALUES.get(name, {}), **value} for name, value in sections.items()}}


def written(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "job.yaml").write_text(json.dumps(values))  # JSON is YAML
    return folder / "job.yaml"


# -- the data ------------------------------------------------------------------------------------------------


def mixture(**sections: Any) -> Any:
    settings = from_mapping(changed(**sections))
    return open_mixture(settings, load_tokenizer("byte", documents=None, cache=Path()))


def test_every_token_knows_its_adapter_and_prompt() -> None:
    found = mixture()
    examples, tokenizer = found.train, found.tokenizer
    assert found.names == ("sentiment", "qa", "translation")
    for i in range(0, len(examples), 7):
        begin, end = int(examples.ends[i] - examples.lengths[i]), int(examples.ends[i])
        assert set(examples.columns[ADAPTER][begin:end]) == {i // 60}
        # A column is stored where a token is the target.
        prompt = examples.columns[PROMPT][begin + 1 : end] > 0
        text = tokenizer.decode(examples.tokens[begin : end - 1][prompt].tolist())
        assert text.startswith("Question:")
        assert text.endswith("Answer:")
        assert examples.columns[SHARE][begin:end].sum() == pytest.approx(1.0)


def test_weights_are_shares_of_the_examples() -> None:
    sources = [
        {**source, "weight": weight} for source, weight in zip(VALUES["data"]["sources"], (3, 2, 1), strict=True)
    ]
    found = mixture(data={"sources": sources})
    starts = found.train.ends - found.train.lengths
    counts = np.bincount(found.train.columns[ADAPTER][starts])
    assert counts.tolist() == [90, 60, 30]  # the first is repeated, the last is cut


def test_steps_are_a_pure_function_of_the_step() -> None:
    settings = from_mapping(changed(router={"mode": "hard"}))
    found = mixture()

    def steps(singles: bool = False) -> Steps:
        packed = Packed(found.train, sequence_length=128, batch_sequences=8, seed=0, shuffle=True)
        alone = [Packed(each, sequence_length=128, batch_sequences=8, seed=0, shuffle=True) for each in found.each]
        return Steps(packed, settings.router, num_adapters=3, seed=0, singles=alone if singles else (), total=100)

    whole, halves = steps().micro_batches(5, micro_batch=8), steps().micro_batches(5, micro_batch=4)
    noise: list[dict[int, list[float]]] = []
    for batches in (whole, halves):
        by_example: dict[int, list[float]] = {}
        for batch in batches:
            assert batch.cu_seqlens is not None
            begins = batch.cu_seqlens[:-1].long()
            for at, begin in enumerate(begins.tolist()):
                if begin < batch.tokens.numel() and batch.columns[PROMPT][begin] > 0:
                    by_example[int(batch.columns[EXAMPLE][begin])] = batch.columns[NOISE][at].tolist()
        noise.append(by_example)
    assert noise[0] == noise[1], "noise depends on the example, not on its place"
    packed = Packed(found.train, sequence_length=128, batch_sequences=8, seed=0, shuffle=True)
    assert packed.counts(5) == (len(noise[0]), sum(batch.num_target_tokens for batch in whole))
    assert steps().temperature(0) == 1.0
    assert steps().temperature(99) == pytest.approx(0.1)
    single = [steps(singles=True).single(step) for step in range(100)]
    assert sum(one is not None for one in single[:50]) > sum(one is not None for one in single[50:])
    assert {one for one in single if one is not None} == {0, 1, 2}
    lone = next(step for step, one in enumerate(single) if one == 1)
    [batch] = steps(singles=True).micro_batches(lone, micro_batch=8)
    assert set(batch.columns[ADAPTER][batch.columns[PROMPT] > 0].tolist()) == {1}


# -- the router ----------------------------------------------------------------------------------------------


def test_the_losses_of_a_choice() -> None:
    real, own = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.eye(2)[[0, 0, 1, 0]]
    own[3] = 0
    sure = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.3, 0.7]])
    found = choice_losses(sure, real, own)
    assert found["sparsity"] == pytest.approx(0.0)
    assert found["consistency"] == pytest.approx(0.0)
    assert found["entropy"] == pytest.approx(0.0, abs=1e-5)
    assert found["balance"] == pytest.approx(2 * (2 / 3 * 2 + 1 / 3 * 1))
    single = choice_losses(sure, real, torch.eye(2)[[0, 0, 0, 0]] * real[:, None])
    assert single["balance"] == 0.0, "a batch of one task belongs to one adapter"
    even = torch.full((4, 2), 0.5, requires_grad=True)
    found = choice_losses(even, real, own)
    assert found["entropy"].item() == pytest.approx(3 * np.log(2), rel=1e-5)
    assert found["sparsity"].item() == pytest.approx(1.5)
    sum(found.values()).backward()  # type: ignore[union-attr]
    assert even.grad is not None
    assert even.grad.isfinite().all()
    torn = choice_losses(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]]), real, own)
    assert torn["consistency"] == pytest.approx(1.0)


def test_a_hard_choice_has_the_gradient_of_the_soft_one() -> None:
    logits = torch.tensor([[0.2, 1.0, -0.5]], requires_grad=True)
    temperature = torch.tensor([0.5])
    soft, hard = mixed(logits, temperature, hard=False), mixed(logits, temperature, hard=True)
    assert hard.tolist() == [pytest.approx([0.0, 1.0, 0.0])]
    weights = torch.tensor([[1.0, 2.0, 4.0]])
    (one,) = torch.autograd.grad((soft * weights).sum(), logits, retain_graph=True)
    (other,) = torch.autograd.grad((hard * weights).sum(), logits)
    assert torch.allclose(one, other)
    noisy = mixed(logits, temperature, hard=True, noise_DE=torch.tensor([[5.0, 0.0, 0.0]]))
    assert noisy.tolist() == [pytest.approx([1.0, 0.0, 0.0])]


def test_a_learned_temperature_stays_in_its_range() -> None:
    router = Router(("a", "b"), width=4, hidden=4, temperature=1.0, lowest=0.2, learned=True)
    assert "log_temperature" in dict(router.named_parameters())
    with torch.no_grad():
        router.log_temperature.fill_(-9.0)
    assert router.temperature.item() == pytest.approx(0.2)
    assert documents_of(torch.tensor([0, 2, 5, 5], dtype=torch.int32), 5).tolist() == [0, 0, 1, 1, 1]


# -- the phases ----------------------------------------------------------------------------------------------


def scores(folder: Path) -> list[Any]:
    found = [event for event in Run.open(folder).events() if isinstance(event, PhaseScored)]
    return [(event.phase, event.scores, event.confusion, event.confidence) for event in found]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("router")
    done = flatout("train", written(folder, VALUES), "--run", folder / "whole", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "routed" in done.stdout
    return folder / "whole"


def test_all_phases(whole: Path) -> None:
    found = scores(whole)
    assert [phase for phase, *_ in found] == [1, 2, 3]
    hows = [{score.how for score in marks} for _, marks, *_ in found]
    assert hows == [{"base", "own"}, {"routed"}, {"joint", "joint own"}]
    assert all(sum(map(sum, confusion)) == 12 for _, _, confusion, _ in found[1:])
    assert {score.metric for score in found[0][1]} == {"accuracy", "F1", "chrF"}
    for phase in ("phase-1", "phase-2"):
        assert Run.is_at(whole / phase)
    metrics = [record.extra.metrics for record in Run.open(whole / "phase-2").latest_steps()]
    assert {"task", "balance", "sparsity", "consistency", "entropy", "temperature", "load_qa"} <= set(metrics[0])
    assert metrics[0]["temperature"] == 1.0
    assert metrics[-1]["temperature"] == pytest.approx(0.1)
    joint = [record.extra.metrics["temperature"] for record in Run.open(whole).latest_steps()]
    assert joint == [pytest.approx(0.1)] * 4


def test_each_phase_trains_what_it_should(whole: Path) -> None:
    from flatout.engine.opening import open_model

    one, two, three = (
        open_model(str(folder), bank=True).model for folder in (whole / "phase-1", whole / "phase-2", whole)
    )
    learnt = [[torch.cat([p.flatten() for pair in lora.adapters(m, e).values() for p in pair]) for e in range(3)]
              for m in (one, two, three)]  # type: ignore[arg-type]  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(learnt[0], learnt[1], strict=True)), "phase 2 leaves the adapters"
    assert not any(torch.equal(a, b) for a, b in zip(learnt[1], learnt[2], strict=True)), "phase 3 trains them"
    assert isinstance(two.router, Router)  # type: ignore[union-attr]
    assert isinstance(three.router, Router)  # type: ignore[union-attr]
    assert not torch.equal(two.router.out.weight, three.router.out.weight)  # type: ignore[union-attr]


def test_the_finished_run_is_used(whole: Path, tmp_path: Path) -> None:
    from flatout.cli.chat import Conversation, Lines
    from flatout.cli.chat import run as chat
    from flatout.engine.opening import open_model
    from flatout.sample import Sampling, sampler_of

    done = flatout("eval", whole, "--tasks", "qa", "--limit", "2", "--max-tokens", "4", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sum(json.loads(done.stdout)["tasks"][0]["details"]["adapters"].values()) == 2
    opened = open_model(str(whole))
    sampling = Sampling(max_tokens=4, stop_ids=opened.stop_ids)
    talk = Conversation(sampler_of(opened), opened.tokenizer, sampling=sampling, system=None)
    asked, notes = iter(["Who has the tea?"]), list[str]()

    def ask() -> str:
        try:
            return next(asked)
        except StopIteration:
            raise EOFError from None

    chat(talk, Lines(ask=ask, say=lambda text: None, note=notes.append))
    assert any("answered, confidence" in note for note in notes)
    one = flatout("eval", whole, "--tasks", "qa", "--limit", "1", "--max-tokens", "2", "--adapter", "no", cwd=tmp_path)
    assert (one.returncode, "sentiment, qa, translation, base" in one.stderr) == (2, True)
    none = flatout("eval", whole / "phase-1", "--tasks", "qa", "--limit", "1", cwd=tmp_path)
    assert (none.returncode, "no router yet" in none.stderr) == (2, True)
    base = flatout("eval", whole / "phase-1", "--tasks", "qa", "--limit", "1", "--adapter", "base", cwd=tmp_path)
    assert base.returncode == 0, base.stderr
    page = flatout("report", whole, "--output", tmp_path / "page.html", cwd=tmp_path)
    assert page.returncode == 0, page.stderr
    text = (tmp_path / "page.html").read_text()
    for words in (
        "Adapters and routing",
        "base alone",
        "routed (phase 2)",
        "own adapter (phase 3)",
        "Parts of the loss",
    ):
        assert words in text


def test_adapters_go_out_and_in_by_name(whole: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from flatout.engine.opening import open_model

    done = flatout("export", whole, "--to", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sentiment, qa, translation" in done.stdout
    ours = open_model(str(whole), adapter="qa").model
    base = AutoModelForCausalLM.from_pretrained(str(whole / "base"), dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "out" / "qa"))
    tokens = torch.arange(3, 23)
    from flatout.model import Rectangular

    found = ours(tokens, torch.arange(20), Rectangular(batch=1), lambda hidden, weight: hidden @ weight.t())
    with torch.no_grad():
        assert torch.allclose(found, theirs(tokens[None]).logits[0], atol=1e-4)
    values = changed(router={"phase": "2", "start": str(tmp_path / "out"), "teach_steps": None})
    values["model"] = {"name": str(whole / "base")}
    values["data"]["tokenizer"] = "byte"
    values["lora"]["alpha"] = 4.0
    done = flatout("train", written(tmp_path, values), "--run", tmp_path / "again", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    taken = open_model(str(tmp_path / "again"), adapter="qa").model
    assert torch.equal(
        taken(tokens, torch.arange(20), Rectangular(batch=1), lambda hidden, weight: hidden @ weight.t()), found
    )


SCRIPT = """
import time
from pathlib import Path
from flatout.cli import main
from flatout.engine.step import Engine

plain, calls = Engine._gradients, []
def method(*arguments, **named):
    calls.append(1)
    if len(calls) == AT:
        Path("there").touch()
        time.sleep(600)
    return plain(*arguments, **named)
Engine._gradients = method
main()
"""


@pytest.mark.parametrize(
    "phase", [2, pytest.param(1, marks=pytest.mark.faults), pytest.param(3, marks=pytest.mark.faults)]
)
def test_killed_in_each_phase_it_goes_on_exactly(whole: Path, tmp_path: Path, phase: int) -> None:
    job, broken = written(tmp_path, VALUES), tmp_path / "broken"
    at = 4 * phase + 4  # four steps before phase 1; the last step of a phase, after its checkpoint
    started = Started("train", job, "--run", broken, cwd=tmp_path, script=SCRIPT.replace("AT", str(at)))
    wait_until((tmp_path / "there").exists, process=started)
    started.send_signal(signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL
    resumed = flatout("train", job, "--run", broken, "--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    for part in ("phase-1", "phase-2", "."):
        assert trajectory(broken / part) == trajectory(whole / part)
        assert weights_hash(broken / part) == weights_hash(whole / part)
    assert scores(broken) == scores(whole)
    again = flatout("train", job, "--run", broken, "--resume", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert weights_hash(broken) == weights_hash(whole)


def test_restarted_by_a_launcher_the_last_phase_starts_anew(whole: Path, tmp_path: Path) -> None:
    """The launcher gives no --resume: the run goes on, but its last phase had not begun."""
    job, broken, launched = written(tmp_path, VALUES), tmp_path / "broken", {"FLATOUT_JOB": "one"}
    script = SCRIPT.replace("AT", "8")
    started = Started(
        "train", job, "--run", broken, cwd=tmp_path, script=script, environment=launched | {"FLATOUT_RESTARTS": "0"}
    )
    wait_until((tmp_path / "there").exists, process=started)
    started.send_signal(signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL
    again = Started("train", job, "--run", broken, cwd=tmp_path, environment=launched | {"FLATOUT_RESTARTS": "1"})
    _, said = again.communicate()
    assert again.wait() == 0, said
    assert weights_hash(broken) == weights_hash(whole)
    assert scores(broken) == scores(whole)
    assert Run.open(broken).plan["job"]["base"] == str(broken.absolute() / "base")


def test_a_phase_that_stopped_early_is_not_trained_further(tmp_path: Path) -> None:
    values = changed(train={"steps": 12, "lr": 1e-12}, eval={"every": 2, "patience": 1}, router={"phase": "1"})
    job = written(tmp_path, values)
    for more in ([], ["--resume"]):
        done = flatout("train", job, "--run", tmp_path / "run", *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert len(trajectory(tmp_path / "run")) < 12


@pytest.mark.parametrize("options", [{"mode": "hard"}, {"temperature_mode": "learned"}, {"temperature_mode": "fixed"}])
def test_phase_2_alone_in_every_mode(whole: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    router = {"phase": "2", "start": str(whole / "phase-1"), "teach_steps": None, **options}
    job = written(tmp_path, changed(router=router))
    done = flatout("train", job, "--run", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [phase for phase, *_ in scores(tmp_path / "run")] == [2]
    records = list(Run.open(tmp_path / "run").latest_steps())
    assert all(np.isfinite(record.extra.grad_norm) and record.extra.grad_norm > 0 for record in records)


@pytest.mark.long
def test_a_bpe_of_the_sources(tmp_path: Path) -> None:
    values = changed(data={"tokenizer": "bpe:300"})
    done = flatout("train", written(tmp_path, values), "--run", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    saved = [load_tokenizer(str(tmp_path / "run" / part), documents=None, cache=Path()) for part in ("bpe", "base")]
    assert saved[0].fingerprint == saved[1].fingerprint
    assert saved[0].vocab_size == 300
    [ids] = saved[0].encode_batch(["Question: Who has the tea?"])
    assert len(ids) < 20
    # A phase alone takes the tokenizer of the run that it continues.
    router = {"phase": "2", "start": str(tmp_path / "run" / "phase-1"), "teach_steps": None}
    alone = changed(data={"tokenizer": "bpe:300"}, router=router)
    done = flatout("train", written(tmp_path, alone), "--run", tmp_path / "alone", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert trajectory(tmp_path / "alone") == trajectory(tmp_path / "run" / "phase-2")


def test_a_base_that_learns_the_form_of_answers_only(whole: Path, tmp_path: Path) -> None:
    values = changed(router={"phase": "1", "teach_answers": "shuffled"})
    done = flatout("train", written(tmp_path, values), "--run", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    own, other = (
        [json.loads(line) for line in (run / "samples" / "solutions.jsonl").read_text().splitlines()]
        for run in (whole, tmp_path / "run")
    )
    assert [row["prompt"] for row in own] == [row["prompt"] for row in other]
    for start in range(0, 180, 60):  # within each source
        answers = [[row["completion"] for row in rows[start : start + 60]] for rows in (own, other)]
        assert answers[0] != answers[1]
        assert sorted(answers[0]) == sorted(answers[1])


# -- mistakes ------------------------------------------------------------------------------------------------

SOURCES = VALUES["data"]["sources"]


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"data": {"sources": [*SOURCES, {"task": "sentimen"}]}}, "did you mean sentiment"),
        ({"data": {"sources": [{"task": "qa"}]}}, "at least two"),
        ({"data": {"sources": [*SOURCES, {"name": "x"}]}}, "has no task"),
        ({"data": {"sources": [*SOURCES, {"task": "qa"}]}}, "another source is"),
        ({"data": {"sources": [*SOURCES, {"task": "qa:train", "name": "b"}]}}, "leave the split out"),
        ({"data": {"sources": [*SOURCES, {"task": "code", "name": "../x"}]}}, "letters, digits"),
        ({"data": {"sources": [{**one, "weight": 0} for one in SOURCES]}}, "greater than 0"),
        ({"data": {"sources": [{**SOURCES[0], "weight": 1}, *SOURCES[1:]]}}, "some have none"),
        ({"data": {"sources": [{**SOURCES[0], "wieght": 1}, *SOURCES[1:]]}}, "did you mean weight"),
        ({"router": {"phase": "2", "teach_steps": None}}, "phase 2 alone continues a run of phase 1"),
        ({"router": {"phase": "3", "teach_steps": None}}, "phase 3 alone continues a run of phase 2"),
        ({"router": {"start": "x"}}, "only with phase 2 or 3"),
        ({"router": {"teach_steps": None}}, "random weights"),
        ({"router": {"teach_steps": None, "teach_answers": "shuffled"}}, "no effect without router.teach_steps"),
        ({"router": {"temperature_end": 3.0}}, "at most router.temperature"),
        ({"lora": {"rank": None}}, "needs adapters"),
        ({"eval": {"tasks": ["qa"]}}, "scores the task of each source"),
    ],
)
def test_mistakes_in_the_configuration(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        from_mapping(changed(**sections))


def test_sources_are_for_this_recipe() -> None:
    with pytest.raises(UsageError, match="only with recipe sft or dpo or router"):
        from_mapping({**VALUES, "recipe": "pretrain", "router": {}, "lora": {}})


def refused(done: subprocess.CompletedProcess[str], says: str, run: Path) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert says in done.stderr
    assert not run.exists()


def test_mistakes_that_need_files(flatout: Call, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "texts.txt").write_text("text")
    empty = [*SOURCES, {"task": "summary", "path": str(tmp_path / "empty.jsonl")}]
    refused(flatout("train", written(tmp_path, changed(data={"sources": empty})), "--run", run), "empty.jsonl", run)
    unworked = [*SOURCES, {"task": "perplexity", "path": str(tmp_path / "texts.txt")}]
    job = written(tmp_path, changed(data={"sources": unworked}))
    refused(flatout("train", job, "--run", run), "texts.txt", run)
    more = [*SOURCES, {"task": "summary", "size": 20}]
    alone = {"phase": "2", "teach_steps": None}
    job = written(tmp_path, changed(data={"sources": more}, router={**alone, "start": str(whole / "phase-1")}))
    refused(flatout("train", job, "--run", run), "no adapter for summary", run)
    job = written(tmp_path, changed(router={**alone, "phase": "3", "start": str(whole / "phase-1")}))
    refused(flatout("train", job, "--run", run), "has no router", run)
    job = written(tmp_path, changed(router={**alone, "start": "nowhere"}))
    refused(flatout("train", job, "--run", run), "no run and no folder nowhere", run)
    job = written(tmp_path, changed(router={**alone, "start": str(whole / "taught")}))
    refused(flatout("train", job, "--run", run), "not of recipe router", run)


def test_a_source_becomes_two_specs() -> None:
    settings = from_mapping(
        changed(data={"sources": [{"name": "a", "task": "code?level=1"}, {"name": "b", "task": "mbpp", "path": "x"}]})
    )
    first, second = (Source.of(given) for given in settings.data.sources)
    assert (first.name, second.name) == ("a", "b")
    assert (first.train, first.valid) == ("code:train?level=1", "code:valid?level=1")
    assert (second.train, second.valid) == ("mbpp:x?part=train", "mbpp:x?part=valid")
    assert replace(first, name="c").name == "c"
