"""Where the time of a step of reinforcement learning goes: every reader of a run folder has the same numbers."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
import yaml
from tests.command import Command, flatout
from tests.waiting import HANG_S
from tests.warm import flatout as alone

from flatout.data.stream import Batch
from flatout.engine.step import Engine
from flatout.recipes import sampling
from flatout.recipes.sampling import Graders
from flatout.tasks import Graded

__all__ = ["flatout"]

CONFIG: dict[str, Any] = {
    "recipe": "rl",
    "model": {"layers": 2, "hidden": 64, "heads": 2},
    "data": {"sequence_length": 64},
    "rl": {
        "tasks": ["sums:train?prompt=bare"],
        **{"prompts": 4, "samples": 2, "updates": 2, "algorithm": "ppo", "critic": "own", "kl": 0.01},
    },
    "sample": {"max_tokens": 8, "temperature": 1.0},
    "train": {"steps": 12, "lr": 1e-3},
    "plan": {"precision": "fp32", "threads": 1, "micro_batch": 2},
    "criteria": {"actor_mfu": 1e-12, "critic_mfu": 1e-12},
}
BESIDE = ("eval", "save", "profile")
WARM_STEPS = 3


def write(folder: Path, **changes: dict[str, Any]) -> Path:
    config = {**CONFIG, **{key: {**CONFIG.get(key, {}), **value} for key, value in changes.items()}}
    path = folder / "rl.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]


def spent(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for span in (span for step in steps for span in step["spans"]):
        role = span.get("role", "train")
        found[span["phase"] if role == "train" else f"{role}/{span['phase']}"] += span["seconds"]
    return found


def ended(run: Path) -> dict[str, Any]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return next(event for event in reversed(events) if event["kind"] == "end")


def weights(run: Path) -> str:
    newest = max((run / "checkpoints").glob("step-*"))
    return hashlib.sha256((newest / "weights-rank00000.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run of PPO, and what it printed."""
    folder = tmp_path_factory.mktemp("ppo")
    done = alone("train", write(folder), "--run", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stdout + done.stderr


def report_of(flatout: Command, run: Path) -> Any:
    [found] = json.loads(flatout("report", str(run), "--json").out)
    return found


def test_all_parts_of_a_ppo_step_are_timed_apart_and_sum_to_the_step(trained: tuple[Path, str], flatout: Command):
    run, printed = trained
    steps = steps_of(run)[WARM_STEPS:]
    phases = spent(steps)
    for phase in (
        *("data", "sampler/sync", "sampler/generate", "grader/queue", "grader/grade"),
        *("actor/old_logprobs", "reference/logprobs", "critic/values"),
        *(f"{role}/{phase}" for role in ("actor", "critic") for phase in ("forward", "backward", "optimize")),
    ):
        assert phases[phase] > 0, phase
    assert sum(phases.values()) == pytest.approx(sum(step["seconds"] for step in steps), rel=0.02)

    report = report_of(flatout, run)
    parts = {part["name"]: part for part in report["step_parts"]}
    assert list(parts) == [
        *("wait for prompts", "weight sync", "generate", "grade: queue", "grade: work", "old log-probs", "reference"),
        *("values", "actor update", "critic update", "rest"),
    ]
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1, abs=0.02)
    update = sum(phases[f"critic/{phase}"] for phase in ("forward", "backward", "reduce", "optimize"))
    assert parts["critic update"]["seconds"] == pytest.approx(update / len(steps))
    assert parts["wait for prompts"]["seconds"] == pytest.approx(phases["data"] / len(steps))
    in_words = flatout("report", str(run), "-o", "-", "--format", "md").out
    for name in parts:
        assert name in printed
        assert name in in_words


def test_actor_and_critic_have_the_mfu_of_their_own_seconds_in_every_place(trained: tuple[Path, str], flatout: Command):
    run, _ = trained
    steps, plan, end = steps_of(run)[WARM_STEPS:], json.loads((run / "plan.json").read_text()), ended(run)
    report = report_of(flatout, run)
    phases, rates, tokens = spent(steps), plan["rates"], sum(step["tokens"] for step in steps)
    for role, flops in (("actor", rates["flops"]["common"]), ("critic", rates["flops"]["critic"])):
        seconds = sum(phases[f"{role}/{phase}"] for phase in ("forward", "backward", "reduce", "optimize"))
        expected = flops * tokens / (seconds * rates["peak_flops"])
        assert end["data"]["outcome"]["speed"][f"{role}_mfu"] == pytest.approx(expected)
        assert report["figures"][f"{role}_mfu"]["value"] == pytest.approx(expected)
        [verdict] = [one for one in report["criteria"] if one["criterion"] == f"{role}_mfu"]
        assert verdict["got"] == f"{expected:.4g}"
        if role == "actor":
            assert json.loads(flatout("doctor", str(run), "--json", "-").out)["limit"]["share"] == pytest.approx(
                expected
            )


def test_only_prompts_and_copies_count_as_waiting_for_data(trained: tuple[Path, str], flatout: Command):
    run, _ = trained
    speed, phases = ended(run)["data"]["outcome"]["speed"], spent(steps_of(run)[WARM_STEPS:])
    training = sum(seconds for phase, seconds in phases.items() if phase not in BESIDE)
    assert speed["data_share"] == pytest.approx(phases["data"] / training, rel=0.02)


def test_the_values_of_a_critic_of_its_own_do_not_need_the_pass_of_the_policy(
    flatout: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = str(write(tmp_path, train={"steps": 4}))
    assert flatout("train", config, "--run", "short").code == 0

    def by_the_policys_pass(self: Engine, batch: Batch) -> torch.Tensor:
        return self.measure(batch, lambda _, head: head.values())

    monkeypatch.setattr(Engine, "values", by_the_policys_pass)
    assert flatout("train", config, "--run", "plain").code == 0
    assert weights(tmp_path / "short") == weights(tmp_path / "plain")


def test_a_value_head_on_the_policys_trunk_has_time_but_no_mfu(flatout: Command, tmp_path: Path):
    config = write(tmp_path, rl={"critic": "shared"}, train={"steps": 6}, criteria={"critic_mfu": None})
    assert flatout("train", str(config), "--run", "run").code == 0
    phases, speed = spent(steps_of(tmp_path / "run")), ended(tmp_path / "run")["data"]["outcome"]["speed"]
    assert phases["critic/forward"] > 0
    assert phases["critic/backward"] > 0
    assert speed["critic_mfu"] is None
    assert speed["actor_mfu"] > 0


def test_the_prediction_of_each_part_stands_beside_its_measurement(trained: tuple[Path, str], flatout: Command):
    run, printed = trained
    report = report_of(flatout, run)
    rows = {row["name"]: row for row in report["predictions"]}
    parts = {part["name"]: part["seconds"] for part in report["step_parts"]}
    for name in ("generate", "old log-probs", "reference", "values", "actor update", "critic update"):
        assert rows[name]["measured"] == pytest.approx(parts[name]), name
    assert rows["grade"]["measured"] == pytest.approx(parts["grade: queue"] + parts["grade: work"])
    assert rows["actor_mfu"]["measured"] == pytest.approx(report["figures"]["actor_mfu"]["value"])
    assert rows["generate"]["predicted"] is None  # on a CPU
    assert "generation on a CPU is not predicted" in printed
    assert "how long answers take to grade depends on the tasks" in printed


def planned(flatout: Command, folder: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    model = {"layers": 30, "hidden": 576, "heads": 9, "kv_heads": 3, "intermediate": 1536, "vocab": 49152}
    plan, train = {"precision": "bf16", "micro_batch": None, "threads": None}, {"batch_tokens": 65536}
    config = write(
        folder, **({"model": model, "data": {"sequence_length": 512}, "plan": plan, "train": train} | changes)
    )
    done = flatout("plan", str(config), "--on", "H200", "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)["predicted"]
    return found


def test_a_plan_predicts_generation_and_passes_and_says_that_grading_is_unknown(flatout: Command, tmp_path: Path):
    rl = {**CONFIG["rl"], "prompts": 64, "samples": 4}
    sample = {"max_tokens": 128, "temperature": 1.0}
    plain = planned(flatout, tmp_path, rl=rl, sample=sample)
    parts = plain["parts_s"]
    assert parts["grade"] is None
    assert "depends on the tasks" in plain["parts_unknown"]["grade"]
    assert plain["step_s"] == pytest.approx(sum(seconds for seconds in parts.values() if seconds is not None))
    assert min(parts[part] for part in ("generate", "reference", "values", "actor update", "critic update")) > 0
    longer = planned(flatout, tmp_path, rl=rl, sample={"max_tokens": 256, "temperature": 1.0})["parts_s"]
    assert 1.9 < longer["generate"] / parts["generate"] < 2.5  # twice the tokens, with a longer cache
    once = planned(flatout, tmp_path, rl={**rl, "updates": 1}, sample=sample)["parts_s"]
    assert once["generate"] == pytest.approx(2 * parts["generate"])  # two steps share a phase
    assert once["old log-probs"] == 0  # one step: the policy that learns is the one that generated
    assert planned(flatout, tmp_path, rl={**rl, "kl": 0.0}, sample=sample)["parts_s"]["reference"] == 0
    grpo = planned(flatout, tmp_path, rl={**rl, "algorithm": "grpo"}, sample=sample)
    assert (grpo["parts_s"]["values"], grpo["parts_s"]["critic update"], grpo["critic_mfu"]) == (0, 0, None)
    vllm = planned(flatout, tmp_path, rl={**rl, "sampler": "vllm"}, sample=sample)
    assert vllm["parts_s"]["generate"] is None
    assert vllm["step_s"] is None
    assert "generation by vllm is not predicted" in vllm["unknown"]


class Blocking:
    """A grader that grades one answer when it is let go on."""

    began, go = Event(), Event()

    def __init__(self, spec: str) -> None:
        self.spec = spec

    def grade_each(self, answers: Sequence[tuple[int, str]]) -> list[Graded]:
        self.began.set()
        assert self.go.wait(HANG_S)
        self.go.clear()
        return [Graded(reward=1.0, answered=True) for _ in answers]

    def close(self) -> None:
        pass


def test_an_answer_waits_in_the_queue_until_a_grader_has_taken_it(monkeypatch: pytest.MonkeyPatch):
    Blocking.began, Blocking.go = Event(), Event()
    monkeypatch.setattr(sampling, "Grader", Blocking)
    with Graders("sums:train", count=1) as graders:
        first = graders.grade(0, "1")
        assert Blocking.began.wait(HANG_S)
        second = graders.grade(1, "2")
        waiting = Thread(target=graders.wait_in_queue, args=([first, second],))
        waiting.start()
        assert not second.running()  # behind the first one, with one grader
        assert waiting.is_alive()
        Blocking.began.clear()
        Blocking.go.set()
        assert first.result(HANG_S).reward == 1.0
        assert Blocking.began.wait(HANG_S)
        waiting.join(HANG_S)
        assert not waiting.is_alive()
        assert not second.done()
        Blocking.go.set()
        assert second.result(HANG_S).reward == 1.0


def test_what_a_profiler_costs_counts_nowhere_else(flatout: Command, tmp_path: Path):
    changes = {"train": {"steps": 12}, "profile": {"steps": [5, 6]}, "rl": {"algorithm": "grpo", "kl": 0.0}}
    config = write(tmp_path, criteria={"actor_mfu": None, "critic_mfu": None}, **changes)
    assert flatout("train", str(config), "--run", "run").code == 0
    run = tmp_path / "run"
    steps, speed = steps_of(run), ended(run)["data"]["outcome"]["speed"]
    traced = [step for step in steps if step["step"] in (5, 6)]
    assert [[span["phase"] for span in step["spans"]] for step in traced] == [["profile"], ["profile"]]
    counted = [step for step in steps[WARM_STEPS:] if step not in traced]
    phases, tokens = spent(counted), sum(step["tokens"] for step in counted)
    training = sum(step["seconds"] for step in counted) - sum(phases.get(phase, 0.0) for phase in BESIDE)
    assert speed["steps"] == len(counted)
    assert speed["data_share"] == pytest.approx(phases["data"] / training)
    assert speed["tokens_per_s"] == pytest.approx(tokens / training)
    report = report_of(flatout, run)
    assert report["figures"]["tokens_per_s"]["value"] == pytest.approx(speed["tokens_per_s"])
    profile = next(phase for phase in report["phases"] if phase["name"] == "profile")
    assert profile["seconds"] == pytest.approx(sum(step["seconds"] for step in traced))
    assert flatout("report", "run").code == 0


@pytest.mark.gpu
def test_on_a_gpu_the_parts_sum_to_the_step_and_every_phase_has_its_peak(flatout: Command, tmp_path: Path):
    model = {"layers": 4, "hidden": 256, "heads": 4}
    config = write(tmp_path, model=model, plan={"precision": "bf16", "graphs": False}, train={"steps": 24})
    done = flatout("train", str(config), "--run", "run")
    assert done.code == 0, done.err
    run = tmp_path / "run"
    steps = steps_of(run)
    counted = steps[2 * WARM_STEPS :]
    phases = spent(counted)
    assert sum(phases.values()) == pytest.approx(sum(step["seconds"] for step in counted), rel=0.02)
    assert all(phases[f"{role}/{phase}"] > 0 for role in ("actor", "critic") for phase in ("forward", "backward"))
    peaks = {key: value for step in steps for key, value in step["memory"].items() if key.startswith("peak_gib/")}
    assert {"peak_gib/sampler/generate", "peak_gib/actor/forward", "peak_gib/critic/backward"} <= peaks.keys()
    assert max(peaks.values()) <= steps[-1]["memory"]["peak_gib"]
    report = report_of(flatout, run)
    peak = next(phase for phase in report["phases"] if phase["name"] == "critic/backward")["peak_gib"]
    assert peak == pytest.approx(peaks["peak_gib/critic/backward"])
