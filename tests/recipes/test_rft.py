"""Recipe rft end to end on a tiny task: before, samples, training, after; killed at any moment, it goes on the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.data.talks import tokenizer_folder
from tests.recipes.recipes_processes import trajectory
from tests.waiting import wait_until
from tests.warm import Started, flatout, two_ranks

from flatout.config import from_mapping
from flatout.config.settings import DataSettings
from flatout.data.examples import Encoder
from flatout.data.tokenizer import ByteTokenizer, load_tokenizer
from flatout.errors import RunFailed, UsageError
from flatout.recipes import rft, stages
from flatout.recipes.setup import dry_run
from flatout.record import Run
from flatout.sample import prompt_ids


def questions(path: Path, numbers: range) -> str:
    """The answer is the number's last digit: half learnt in seconds, and guessed once in ten anyway."""
    rows = ({"question": f"{i}?", "answer": f"#### {i % 10}"} for i in numbers)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"gsm8k:{path}"


def config(folder: Path) -> dict[str, Any]:
    return {
        "recipe": "rft",
        "model": {"layers": 2, "hidden": 32, "heads": 2},
        "data": {"tokenizer": "byte", "sequence_length": 48, "cache": str(folder / "cache")},
        "rft": {
            "teach": questions(folder / "shown.jsonl", range(100, 140)),
            "teach_steps": 80,
            "teach_lr": 6e-3,
            "task": questions(folder / "train.jsonl", range(200, 248)),
            "valid": questions(folder / "valid.jsonl", range(300, 340)),
            "prompt": "bare",
            "oversample": 6,
            "first": 2,
            "chunk": 16,
        },
        "sample": {"max_tokens": 8, "rows": 16},
        "train": {"batch_tokens": 480, "steps": 8, "lr": 3e-3},
        "lora": {"rank": None},
        "plan": {"precision": "fp32", "threads": 1},
    }


def write(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_generated_domain_is_taught_sampled_and_measured(tmp_path: Path) -> None:
    values = config(tmp_path)
    values["rft"] |= {
        "task": "math:train?level=1",
        "questions": 12,
        "teach": "math:train?level=1&size=40",
        "valid": None,
    }
    tasks = stages.RunTasks.of(from_mapping(values))
    assert (tasks.measured, tasks.questions) == ("math?level=1&prompt=bare", list(range(12)))
    values["rft"]["teach"] = "math:train"
    with pytest.raises(UsageError, match="math:train has no worked solutions, or is endless"):
        stages.RunTasks.of(from_mapping(values))


def rows_of(run: Path, number: int = 1) -> list[dict[str, Any]]:
    lines = (Run.open(run).samples_dir / f"round-{number}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A whole run, and what it printed."""
    folder = tmp_path_factory.mktemp("rft")
    file = write(folder / "rft.yaml", config(folder))
    done = flatout("train", file, "--run", folder / "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.slow
def test_a_run_measures_samples_trains_and_measures_again(trained: tuple[Path, str]) -> None:
    folder, said = trained
    run = Run.open(folder / "run")
    events = [event for event in run.events() if event.kind in ("stage", "score", "dataset", "end", "rft")]
    assert [event.kind for event in events] == ["stage", "score", "dataset", "end", "score", "rft"]
    counts, verdict = events[2].data, events[-1].data
    rows = rows_of(run.path)
    assert len(rows) == counts["kept"] == counts["solved"] > 0
    for row in rows:
        number = 200 + row["index"]
        # By the template that the taught student keeps, which writes `Question: ...` and `Answer:`.
        assert row["prompt"] == [{"role": "user", "content": f"{number}?"}]
        [answer] = row["completion"]
        assert answer["role"] == "assistant"
        assert str(number % 10) in answer["content"]
    assert verdict["accuracy"] == [events[1].data["value"], events[4].data["value"]]
    assert verdict["difference"]["n"] == 40
    assert sum(1 for _ in run.latest_steps()) == 8
    assert "questions 48/48" in said
    assert said.rstrip().splitlines()[-1].startswith("accuracy ")


def test_the_run_is_a_model_like_any_other(trained: tuple[Path, str]) -> None:
    folder, said = trained
    asked = ("--tasks", f"gsm8k:{folder}/valid.jsonl?prompt=bare", "--json", "--max-tokens", "8")
    done = flatout("eval", folder / "run", *asked, cwd=folder)
    assert done.returncode == 0, done.stderr
    events = {event.kind: event.data for event in Run.open(folder / "run").events()}
    assert json.loads(done.stdout)["tasks"][0]["value"] == events["rft"]["accuracy"][-1]
    report = flatout("report", folder / "run", "-o", "-", cwd=folder)
    assert report.returncode == 0
    assert "questions solved" in report.stdout
    assert said.rstrip().splitlines()[-1][:24] in report.stdout


@pytest.fixture
def damaged(trained: tuple[Path, str], tmp_path: Path) -> Iterator[Path]:
    """The whole run in its own place, for a test to damage; a copy of it, in `whole` beside, is put back later."""
    run = trained[0] / "run"
    shutil.copytree(run, tmp_path / "whole")
    yield run
    shutil.rmtree(run)
    shutil.copytree(tmp_path / "whole", run)


def go_on(run: Path, *overrides: str) -> None:
    from flatout.config import load

    settings = load(run / "config.yaml", overrides=overrides, environ={}).settings
    rft.run(settings, folder=run, resume=True)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def exchange(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda run: flip(run / "student/model.safetensors"), "student/model.safetensors"),
        (lambda run: (run / "student/chat_template.jinja").write_text("{{ messages }}"), "student/chat_template.jinja"),
        (lambda run: edit(run / "samples/score-0.json", '"samples": 1', '"samples": 2'), "score-0.json"),
        (lambda run: edit(run / "samples/score-1.json", '"n": 40', '"n": 41'), "score-1.json"),
        (lambda run: exchange(run / "samples/score-0.json", run / "samples/score-1.json"), "score-0.json"),
        (lambda run: exchange(run / "samples/round-1/00000.json", run / "samples/round-1/00002.json"), "00000.json"),
        (lambda run: edit(run / "samples/round-1.jsonl", "?", "!"), "round-1.jsonl"),
    ],
)
def test_what_a_stage_left_for_a_later_one_is_checked_before_it_is_used(
    damaged: Path, damage: Callable[[Path], object], named: str
) -> None:
    damage(damaged)
    before = [event for event in Run.open(damaged).events() if event.kind == "rft"]
    with pytest.raises(UsageError, match=rf"{named} is not what this run wrote there.*remove .*it is rebuilt"):
        go_on(damaged)
    assert [event for event in Run.open(damaged).events() if event.kind == "rft"] == before


@pytest.mark.long
@pytest.mark.slow
def test_killed_between_stages_it_goes_on_by_the_same_command(damaged: Path, tmp_path: Path) -> None:
    """While the student was written, while the folder of a stage was made, and while rows were written."""
    (damaged / "student").rename(damaged / ".student.tmp")
    (damaged / ".student.tmp/model.safetensors").write_bytes(b"half")
    shutil.rmtree(damaged / "checkpoints")
    for path in (damaged / "taught").iterdir():
        if path.name not in ("plan.json", "hardware.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (damaged / "samples/round-1.jsonl").unlink()
    (damaged / "samples/.round-1.jsonl.999999.tmp").write_text("half")
    (damaged / "samples/round-1/.00001.json.999999.tmp").write_text("half")
    go_on(damaged)
    whole = tmp_path / "whole"
    assert rows_of(damaged) == rows_of(whole)
    assert not list(damaged.rglob("*.tmp"))
    verdicts = [[e.data["accuracy"] for e in Run.open(run).events() if e.kind == "rft"][-1] for run in (whole, damaged)]
    assert verdicts[0] == verdicts[1]

    # More steps make other weights: what was measured before does not stand for them.
    measured = len([event for event in Run.open(damaged).events() if event.kind == "score"])
    go_on(damaged, "train.steps=9")
    assert len([event for event in Run.open(damaged).events() if event.kind == "score"]) == measured + 1

    # Solutions that were edited are not taught.
    shutil.rmtree(damaged / "student")
    edit(damaged / "samples/solutions.jsonl", "?", "!")
    with pytest.raises(UsageError, match=r"solutions.jsonl is not what this run wrote there"):
        go_on(damaged)


@pytest.fixture
def sampling(trained: tuple[Path, str], tmp_path: Path) -> Path:
    """Sixteen chunks of four questions, by the student of the whole run."""
    values = config(tmp_path)
    values["model"] = {"name": str(trained[0] / "run" / "student")}
    values["data"].pop("tokenizer")
    values["rft"] |= {"task": questions(tmp_path / "many.jsonl", range(400, 464)), "chunk": 4, "adaptive": False}
    for name in ("teach", "teach_steps", "teach_lr"):
        del values["rft"][name]
    return write(tmp_path / "sample.yaml", values)


# The command, which goes on to its last chunk only when there is a file `go` in its folder: however late a signal
# comes, it comes during the sampling.
HELD = """
import time
from pathlib import Path
from flatout.cli import main
from flatout.recipes.sampling import Sampled
plain = Sampled._chunk
def chunk(self, questions, *others):
    while 63 in questions and not Path("go").exists():
        time.sleep(0.01)
    return plain(self, questions, *others)
Sampled._chunk = chunk
main()
"""


def wait_for_chunks(run: Path, count: int, process: Started) -> None:
    wait_until(lambda: len(list((run / "samples" / "round-1").glob("*.json"))) >= count, process=process)


@pytest.mark.faults
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sampling_killed_and_stopped_goes_on_to_the_same_dataset(
    sampling: Path, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    if device == "cpu":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert flatout("sample", sampling, "--run", whole, cwd=tmp_path).returncode == 0

    killed = Started("sample", sampling, "--run", broken, cwd=tmp_path, script=HELD)
    wait_for_chunks(broken, 2, killed)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    standing = {path.name: path.stat().st_mtime_ns for path in (broken / "samples" / "round-1").glob("*.json")}
    assert 2 <= len(standing) < 16
    assert not (broken / "samples" / "round-1.jsonl").exists()

    stopped = Started("sample", sampling, "--run", broken, "--resume", cwd=tmp_path, script=HELD)
    wait_for_chunks(broken, min(15, len(standing) + 1), stopped)
    stopped.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    _, said = stopped.communicate()
    assert stopped.returncode == 75, said
    assert f"flatout sample {broken}/config.yaml --run {broken} --resume" in said

    resumed = flatout("sample", sampling, "--run", broken, "--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "recipe sft" in resumed.stdout
    for name, written_ns in standing.items():  # what stood was not sampled again
        assert (broken / "samples" / "round-1" / name).stat().st_mtime_ns == written_ns
    results = [(run / "samples" / "round-1.jsonl").read_bytes() for run in (whole, broken)]
    if device == "cpu":  # a GPU may round differently from run to run
        assert results[0] == results[1]
    indices = [row["index"] for row in rows_of(broken)]
    assert indices == sorted(set(indices))
    asked = [
        i for n in range(16) for i in json.loads((broken / f"samples/round-1/{n:05d}.json").read_text())["questions"]
    ]
    assert asked == list(range(64))


@pytest.mark.long
@pytest.mark.slow
def test_adapters_on_a_run_of_our_own_in_two_rounds(trained: tuple[Path, str], tmp_path: Path) -> None:
    values = config(tmp_path)
    values["model"] = {"name": str(trained[0] / "run")}
    values["data"].pop("tokenizer")
    for name in ("teach", "teach_steps", "teach_lr"):
        del values["rft"][name]
    values["rft"] |= {"rounds": 2, "keep": 2, "generator": str(trained[0] / "run" / "student")}
    values["lora"] = {"rank": 4, "alpha": 16}
    settings = from_mapping(values)
    planned = dry_run(settings).job
    assert (planned.shape.layers, planned.shape.hidden, planned.generator) == (2, 32, planned.shape)
    done = rft.run(settings, folder=tmp_path / "run")
    assert done.steps == 8
    run = Run.open(tmp_path / "run")
    assert run.plan["job"]["base"] == str(tmp_path / "run" / "student")
    models = [event.data["model"] for event in run.events() if event.kind == "sample"]
    assert models == [str(trained[0] / "run" / "student"), str(tmp_path / "run" / "round-1")]
    first, second = rows_of(run.path), rows_of(run.path, 2)
    # What was kept stays, and questions that have enough are not asked again.
    kept = {(row["index"], row["completion"]) for row in first}
    assert kept <= {(row["index"], row["completion"]) for row in second}
    assert max([row["index"] for row in second].count(i) for i in range(48)) <= 2
    assert len([event for event in run.events() if event.kind == "score"]) == 3


def test_nothing_solved_ends_the_run_with_the_figures(trained: tuple[Path, str], tmp_path: Path) -> None:
    values = config(tmp_path)
    values["model"] = {"name": str(trained[0] / "run" / "student")}
    values["data"].pop("tokenizer")
    (tmp_path / "never.jsonl").write_text('{"question": "1?", "answer": "#### 123456789"}\n')
    values["rft"] |= {"task": f"gsm8k:{tmp_path}/never.jsonl"}
    for name in ("teach", "teach_steps", "teach_lr"):
        del values["rft"][name]
    settings = from_mapping(values)
    with pytest.raises(RunFailed, match="0 of 1 questions solved in 6 samples"):
        rft.run(
            settings,
            folder=tmp_path / "run",
            train=False,
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "arc-challenge:{}/choice.jsonl"}, "answers are generated"),
        ({"task": "perplexity:{}/text.txt"}, "has no questions"),
        ({"task": "gsm8k:{}/nowhere.jsonl"}, "there is no file"),
        ({"prompt": "{}/nowhere.yaml"}, "there is no file"),
        ({"valid": "unitz"}, "did you mean units"),
        ({"teach": "units:endless"}, "units:endless has no worked solutions, or is endless"),
        ({"teach": "perplexity:{}/text.txt"}, "has no worked solutions"),
    ],
)
def test_mistakes_are_told_before_anything_is_made(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    values = config(tmp_path)
    row = {"question": "Which?", "choices": ["no", "yes"], "answer": 1}
    (tmp_path / "choice.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "text.txt").write_text("Once upon a time.")
    values["rft"] |= {key: value.format(tmp_path) for key, value in changes.items()}
    with pytest.raises(UsageError, match=message):
        rft.run(from_mapping(values), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("template", [True, False])
def test_a_row_is_learnt_after_the_very_prompt_it_was_sampled_with(tmp_path: Path, template: bool) -> None:
    tokenizer = (
        ByteTokenizer()
        if not template
        else load_tokenizer(str(tokenizer_folder(tmp_path)), documents=None, cache=Path())
    )
    task = stages.questions_of("units:train")
    encoder = Encoder(DataSettings(source="jsonl", path="x"), tokenizer)
    row = stages.row(tokenizer, task.prompt(0), "It is <answer>3</answer>")
    [(ids, trained)] = encoder.encode([encoder.draft(json.loads(json.dumps(row)))])
    prompt = prompt_ids(tokenizer, task.prompt(0))
    assert ids.tolist()[: len(prompt)] == prompt
    assert trained.tolist() == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    answer = tokenizer.decode(ids[len(prompt) :].tolist())
    assert answer in (" It is <answer>3</answer><|endoftext|>", "It is <answer>3</answer><|im_end|>\n")


@pytest.mark.slow
def test_two_ranks_share_the_chunks(trained: tuple[Path, str], tmp_path: Path) -> None:
    """The same dataset, the same training, the same scores."""
    folder, _ = trained
    values = config(tmp_path) | {"model": {"name": str(folder / "run/student")}}
    values["data"].pop("tokenizer")
    values["rft"] |= {"teach": None, "teach_steps": 1, "teach_lr": None}
    values["plan"]["micro_batch"] = 5
    file = write(tmp_path / "rft.yaml", values)
    assert flatout("train", file, "--run", tmp_path / "one", cwd=tmp_path).returncode == 0
    two_ranks("train", file, "--run", tmp_path / "two", cwd=tmp_path)
    assert rows_of(tmp_path / "one") == rows_of(tmp_path / "two")
    ones, twos = trajectory(tmp_path / "one"), trajectory(tmp_path / "two")
    assert [row[1] for row in ones] == pytest.approx([row[1] for row in twos], abs=1e-5)
    ends = [[e for e in Run.open(tmp_path / name).events() if e.kind == "rft"][-1].data for name in ("one", "two")]
    assert ends[0]["accuracy"] == ends[1]["accuracy"]
    # Each rank sampled its own chunks: three of 16 questions.
    sampled = [
        sum(json.loads(line)["kind"] == "chunk" for line in path.read_text().splitlines())
        for path in (Run.open(tmp_path / "two").file("events", rank) for rank in (0, 1))
    ]
    assert sampled == [2, 1]


@pytest.mark.slow
def test_two_ranks_teach_and_shard(tmp_path: Path) -> None:
    values = config(tmp_path)
    file = write(tmp_path / "rft.yaml", values | {"plan": {"precision": "fp32", "threads": 1, "sharding": "full"}})
    outcome = Started("sample", file, "--run", tmp_path / "alone", cwd=tmp_path)
    assert "does not work with one rank" in outcome.communicate()[1]
    two_ranks("sample", file, "--run", tmp_path / "two", cwd=tmp_path)
    assert rows_of(tmp_path / "two")


def test_other_settings_than_those_begun_with_are_refused(sampling: Path, tmp_path: Path) -> None:
    from flatout.config import load

    settings = load(sampling, environ={}).settings
    how = {"folder": tmp_path / "run", "train": False}
    settings = replace(settings, rft=replace(settings.rft, questions=4))
    rft.run(settings, **how)  # type: ignore[arg-type]
    warmer = replace(settings, sample=replace(settings.sample, temperature=0.9))
    with pytest.raises(UsageError, match="another task, model or settings"):
        rft.run(warmer, resume=True, **how)  # type: ignore[arg-type]


def test_only_recipe_rft_samples(tmp_path: Path) -> None:
    file = write(tmp_path / "p.yaml", {"model": {"layers": 1, "hidden": 8, "heads": 2}, "train": {"steps": 1}})
    done = flatout("sample", file, cwd=tmp_path)
    assert done.returncode == 2
    assert "has recipe pretrain, which samples nothing" in done.stderr
    assert "Traceback" not in done.stderr
