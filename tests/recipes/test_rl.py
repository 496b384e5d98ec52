"""Reinforcement learning on embedded tasks: phases of rollouts, steps, several tasks, resumed bit for bit."""

from __future__ import annotations

import hashlib
import json
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.warm import two_ranks

from flatout.config import from_mapping
from flatout.config.settings import RlSettings, Settings
from flatout.engine.step import Engine
from flatout.engine.trained import open_trained
from flatout.errors import EnvironmentLacks, UsageError
from flatout.recipes import rl, rollouts, run
from flatout.recipes.experience import Experience
from flatout.recipes.levels import Levels
from flatout.recipes.rollouts import RolloutBatches
from flatout.record import Run
from flatout.record.events import MemoryRanOut, Notice, RowsHalved, TasksScored
from flatout.record.rollouts import RolloutsGraded, TaskRollouts
from flatout.sample import sampler_of
from flatout.sample.vllm import Vllm
from flatout.tasks import Graded, open_task

TRAIN, SHOWN = "sums:train?prompt=bare", "sums:shown?prompt=bare"
CONFIG: dict[str, Any] = {
    "recipe": "rl",
    "model": {"layers": 2, "hidden": 32, "heads": 2},
    "data": {"sequence_length": 64},
    "rl": {"tasks": [TRAIN, SHOWN], "prompts": 4, "samples": 3, "updates": 2},
    "sample": {"max_tokens": 8},
    "train": {"steps": 6, "lr": 1e-3},
    "plan": {"precision": "fp32", "threads": 1, "micro_batch": 2},
    "save": {"every": 2},
}


def settings(**changes: Any) -> Settings:
    return from_mapping({**CONFIG, **{key: {**CONFIG.get(key, {}), **value} for key, value in changes.items()}})


def weights(folder: Path) -> str:
    newest = max((folder / "checkpoints").glob("step-*"))
    return hashlib.sha256((newest / "weights-rank00000.safetensors").read_bytes()).hexdigest()


def phases(folder: Path) -> list[RolloutsGraded]:
    return [event for event in Run.open(folder).events() if isinstance(event, RolloutsGraded)]


@pytest.fixture(autouse=True)
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that a random model can get: the share of letters in a completion."""

    def grade(self: object, i: int, text: str) -> Future[Graded]:
        done: Future[Graded] = Future()
        share = sum(c.isascii() and c.isalpha() for c in text) / max(1, len(text))
        done.set_result(Graded(reward=share, answered=True))
        return done

    monkeypatch.setattr(rollouts.Graders, "grade", grade)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mtl": {"method": "equal"}, "rl": {"algorithm": "gspo", "kl": 0.1, "dynamic_sampling": 1}},
        {"mtl": {"method": "pcgrad"}, "rl": {"algorithm": "dapo", "epochs": 2, "updates": 1}},
        {"rl": {"algorithm": "ppo", "samples": 1, "critic_warmup": 1}},
        {"rl": {"algorithm": "ppo", "critic": "own", "updates": 1, "teach": 1}, "save": {"every": 1}},
        pytest.param(
            {"lora": {"rank": 4}, "rl": {"algorithm": "rloo", "kl": 0.1}, "mtl": {"method": "cagrad"}},
            marks=pytest.mark.long,
        ),
        {"rl": {"updates": 1, "ahead": 2}},
    ],
    ids=str,
)
def test_cut_off_inside_a_phase_it_resumes_to_the_same_bits(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(**changes)
    run(chosen, folder=tmp_path / "whole")
    plain = RolloutBatches.next

    def fails(self: RolloutBatches, step: int) -> Any:
        if step == 3:
            raise ConnectionResetError
        return plain(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(RolloutBatches, "next", fails)
        with pytest.raises(ConnectionResetError):
            run(chosen, folder=tmp_path / "cut")
    run(chosen, folder=tmp_path / "cut", resume=True)
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    losses = [[s.loss for s in Run.open(tmp_path / name).latest_steps()] for name in ("whole", "cut")]
    assert losses[0] == losses[1]
    assert any(losses[0]), "something was learnt"


def test_grades_of_a_phase_may_come_after_later_phases_are_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here they come only then: without `rl.ahead`, the first phase would wait for ever."""
    waiting: dict[int, list[tuple[Future[Graded], float]]] = {}
    order: list[tuple[str, int]] = []
    plain, step = RolloutBatches._generated, Engine.step
    last, now = 4, [0]

    def grade(self: object, i: int, text: str) -> Future[Graded]:
        done: Future[Graded] = Future()
        share = sum(c.isascii() and c.isalpha() for c in text) / max(1, len(text))
        waiting.setdefault(now[0], []).append((done, share))
        return done

    def generated(self: RolloutBatches, prompts: Any, *, phase: int) -> Any:
        now[0] = phase
        order.append(("generate", phase))
        found = plain(self, prompts, phase=phase)
        for early in [one for one in waiting if one <= phase - 2 or phase == last]:
            for done, share in waiting.pop(early):
                done.set_result(Graded(reward=share, answered=True))
        return found

    def stepped(self: Engine, number: int, batches: Any) -> None:
        order.append(("step", number))
        step(self, number, batches)

    monkeypatch.setattr(rollouts.Graders, "grade", grade)
    monkeypatch.setattr(RolloutBatches, "_generated", generated)
    monkeypatch.setattr(Engine, "step", stepped)
    chosen = settings(rl={"updates": 1, "ahead": 2}, train={"steps": 5}, save={"every": None})
    run(chosen, folder=tmp_path / "run")
    numbers = [("generate", 0), ("generate", 1), ("generate", 2), ("step", 0), ("generate", 3), ("step", 1)]
    assert order == [*numbers, ("generate", 4), ("step", 2), ("step", 3), ("step", 4)]
    metrics = [one.extra.metrics for one in Run.open(tmp_path / "run").latest_steps()]
    assert metrics[0]["mismatch"] < 1e-5, "the first phase is that of the weights"
    assert metrics[2]["mismatch"] > 1e-4, "the third came from weights that are two steps old"
    assert len(phases(tmp_path / "run")) == 5


def test_mixed_and_equal_batches_ask_the_same_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[tuple[str, int]]] = {}
    plain = RolloutBatches._prompts
    for method in ("mixed", "equal", "pcgrad"):
        seen = asked.setdefault(method, [])

        def prompts(self: RolloutBatches, phase: int, *, round_: int = 0, seen: Any = seen) -> Any:
            found = plain(self, phase, round_=round_)
            seen.append([(one.task, one.question) for one in found])
            return found

        monkeypatch.setattr(RolloutBatches, "_prompts", prompts)
        run(settings(mtl={"method": method}), folder=tmp_path / method)
    flat = {method: [one for phase in seen for one in phase] for method, seen in asked.items()}
    assert flat["equal"] == flat["pcgrad"]
    assert sorted(flat["mixed"]) == sorted(flat["equal"])
    assert len(set(flat["equal"])) == 12, "no question twice"
    for phase in asked["equal"]:
        assert [task for task, _ in phase] == [TRAIN] * 2 + [SHOWN] * 2
    events = phases(tmp_path / "pcgrad")
    assert [event.step for event in events] == [0, 2, 4]
    assert all(one.prompts == 2 for event in events for one in event.tasks)
    metrics = [step.extra.metrics for step in Run.open(tmp_path / "pcgrad").latest_steps()]
    assert all(-1 <= found[f"cosine/{TRAIN}/{SHOWN}"] <= 1 for found in metrics)


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("ppo", marks=pytest.mark.long)])
def test_the_reward_rises_where_it_can(algorithm: str, tmp_path: Path) -> None:
    longer = settings(
        rl={"prompts": 8, "samples": 8, "updates": 1, "algorithm": algorithm},
        train={"steps": 24, "lr": 1e-2},
        save={"every": None},
        plan={"micro_batch": 16},
    )
    run(longer, folder=tmp_path / "run")
    rewards = [phase.reward or 0.0 for phase in phases(tmp_path / "run")]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.1


def test_sampled_and_recomputed_log_probabilities_agree_in_fp32(tmp_path: Path) -> None:
    found = {}
    for old in ("sampler", "trainer"):
        run(settings(rl={"old_logprobs": old}), folder=tmp_path / old)
        found[old] = [step.loss for step in Run.open(tmp_path / old).latest_steps()]
        metrics = [step.extra.metrics for step in Run.open(tmp_path / old).latest_steps()]
        assert all(one["mismatch"] < 1e-5 for one in metrics[::2]), "in the first step of a phase nothing has moved"
    assert found["sampler"] == pytest.approx(found["trainer"], abs=1e-5)


def test_a_step_that_runs_out_of_memory_is_taken_once_in_smaller_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(settings(), folder=tmp_path / "whole")
    plain, failed = Engine._gradients, []

    def fails(self: Engine, batches: Sequence[Any], *rest: Any, **options: Any) -> Any:
        if batches[0].num_sequences > 1 and not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, batches, *rest, **options)

    monkeypatch.setattr(Engine, "_gradients", fails)
    run(settings(), folder=tmp_path / "less")
    events = [event for event in Run.open(tmp_path / "less").events() if isinstance(event, MemoryRanOut)]
    assert [(event.step, event.micro_batch, event.now) for event in events] == [(0, 2, 1)]
    assert len(phases(tmp_path / "less")) == 3, "no phase was generated twice"
    ours, theirs = ([s.loss for s in Run.open(tmp_path / name).latest_steps()] for name in ("less", "whole"))
    assert ours == pytest.approx(theirs, abs=1e-5)


def test_generation_that_runs_out_of_memory_is_done_again_with_fewer_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(settings(), folder=tmp_path / "whole")
    plain = RolloutBatches._sampler

    class Cramped:
        """Out of memory after some completions, if it has more than three rows."""

        def __init__(self, sampler: Any, rows: int) -> None:
            self.sampler, self.rows = sampler, rows

        def generate(self, *arguments: Any, **named: Any) -> Iterator[Any]:
            for at, done in enumerate(self.sampler.generate(*arguments, **named)):
                if at == 2 and self.rows > 3:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                yield done

    monkeypatch.setattr(RolloutBatches, "_sampler", lambda self, rows: Cramped(plain(self, rows), rows))
    run(settings(), folder=tmp_path / "less")
    halved = [event for event in Run.open(tmp_path / "less").events() if isinstance(event, RowsHalved)]
    assert [(event.rows, event.now) for event in halved] == [(12, 6), (6, 3)]
    ours, theirs = (phases(tmp_path / name) for name in ("less", "whole"))
    assert [one.step for one in ours] == [0, 2, 4], "every phase is reported and learnt from once"
    assert [(one.tokens, one.reward) for one in ours] == [(one.tokens, one.reward) for one in theirs]
    assert [one.rows for one in ours] == [3, 3, 3]
    losses = [[s.loss for s in Run.open(tmp_path / name).latest_steps()] for name in ("less", "whole")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_dynamic_sampling_replaces_prompts_without_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grade(self: object, i: int, text: str) -> Future[Graded]:
        done: Future[Graded] = Future()
        share = 0.0 if i % 2 else sum(c.isalpha() for c in text) / max(1, len(text))
        done.set_result(Graded(reward=share, answered=True))
        return done

    monkeypatch.setattr(rollouts.Graders, "grade", grade)
    learnt: list[list[bool]] = []
    plain = Experience.updates

    def updates(self: Experience, groups: Sequence[Any], *, phase: int) -> Any:
        learnt.append([group.has_signal for group in groups])
        return plain(self, groups, phase=phase)

    monkeypatch.setattr(Experience, "updates", updates)
    run(settings(rl={"dynamic_sampling": 12, "prompts": 8}, train={"steps": 2}), folder=tmp_path / "run")
    assert all(all(groups) for groups in learnt)
    assert len(learnt[0]) == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"rl": {"algorithm": "gspo", "prompts": 8, "updates": 1}, "mtl": {"method": "pcgrad"}, "train": {"steps": 2}},
        # The second rank has no prompt of the first update.
        {"rl": {"algorithm": "ppo", "samples": 2}, "mtl": {"method": "equal"}, "train": {"steps": 4}},
    ],
    ids=str,
)
def test_two_ranks_learn_what_one_learns(changes: dict[str, Any], tmp_path: Path) -> None:
    run(settings(**changes, plan={"micro_batch": 1}), folder=tmp_path / "one")
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.recipes import test_rl\n"
        "test_rl.one_rank(sys.argv[1], sys.argv[2])\n"
    )
    two_ranks(str(tmp_path / "two"), json.dumps(changes), cwd=tmp_path, script=script)
    one, two = ([(s.loss, s.extra.grad_norm) for s in Run.open(tmp_path / n).latest_steps()] for n in ("one", "two"))
    assert np.array(two) == pytest.approx(np.array(one), rel=1e-3, abs=1e-5)
    rewards = [[one.reward for phase in phases(tmp_path / n) for one in phase.tasks] for n in ("one", "two")]
    assert rewards[1] == pytest.approx(rewards[0], abs=1e-6), "the record counts the completions of both ranks"


def one_rank(folder: str, changes: str) -> None:
    """The body of one of two processes."""
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    letters.__wrapped__(patch)  # type: ignore[attr-defined]
    run(settings(**json.loads(changes), plan={"micro_batch": 1}), folder=Path(folder))


def test_levels_follow_the_accuracy_and_are_recalled_from_the_record() -> None:
    tasks = ("math:train", "logic:train")
    levels = Levels(RlSettings(tasks=tasks, curriculum=True))
    nothing = dict.fromkeys(("reward", "answered", "length", "truncated", "without_signal"), None)

    def phase(step: int, *accuracies: float) -> RolloutsGraded:
        found = [
            TaskRollouts(task=task, prompts=1, accuracy=accuracy, **nothing)
            for task, accuracy in zip(tasks, accuracies, strict=True)
        ]
        return RolloutsGraded(step=step, tasks=tuple(found), tokens=1, seconds=1.0, grading_s=0.0)

    seen = [phase(0, 0.9, 0.5), phase(1, 0.9, 0.8), phase(2, 0.1, 0.0)]
    expected = [(2, 1), (3, 2), (2, 1)]
    for event, now in zip(seen, expected, strict=True):
        levels.see(event)
        assert (levels.level(tasks[0]), levels.level(tasks[1])) == now
    again = Levels(RlSettings(tasks=tasks, curriculum=True))
    again.recall([phase(1, 0.0, 0.0), *seen], before=2)  # the first was repeated after a kill
    assert (again.level(tasks[0]), again.level(tasks[1])) == (3, 2)
    assert again.task(tasks[0], level=3).prompt(0) == open_task("math:train?level=3").prompt(0)


def test_a_run_with_a_critic_is_opened_without_it(tmp_path: Path) -> None:
    run(settings(rl={"algorithm": "ppo", "critic": "own"}, train={"steps": 2}), folder=tmp_path / "run")
    opened = open_trained(Run.open(tmp_path / "run"))
    assert not [name for name, _ in opened.model.named_parameters() if name.startswith("critic")]


def test_a_policy_stays_as_it_is_while_only_its_critic_learns(tmp_path: Path) -> None:
    chosen = settings(rl={"algorithm": "ppo", "critic_warmup": 2}, train={"weight_decay": 0.0}, save={"keep": 3})
    run(chosen, folder=tmp_path / "run")  # of three phases, the last one trains the policy
    found = [load_file(next(place.glob("weights*"))) for place in sorted((tmp_path / "run/checkpoints").glob("step-*"))]
    assert len(found) == 3
    changed = [{name for name, tensor in one.items() if not tensor.equal(found[0][name])} for one in found[1:]]
    assert changed[0] == {"critic.weight", "critic.bias"}
    assert changed[1] == set(found[0])


def test_a_critic_with_its_own_model_has_its_own_mfu(tmp_path: Path) -> None:
    found = []
    for critic in ("shared", "own"):
        chosen = settings(rl={"algorithm": "ppo", "critic": critic}, train={"steps": 10})
        found.append(run(chosen, folder=tmp_path / critic).speed)
    shared, own = found
    assert shared.critic_mfu is None
    assert own.critic_mfu is not None
    assert own.actor_mfu is not None
    # A critic has no head: 6N + 12LHT without it, each in its own seconds.
    width, length, vocab = 32, 64, 320
    blocks = 6 * 2 * (4 * width * width + 3 * width * 128) + 12 * 2 * width * length
    actor_s, critic_s = (
        sum(own.phases_s[f"{role}/{phase}"] for phase in ("forward", "backward", "reduce", "optimize"))
        for role in ("actor", "critic")
    )
    ratio = own.critic_mfu * critic_s / (own.actor_mfu * actor_s)
    assert ratio == pytest.approx(blocks / (blocks + 6 * vocab * width))


def test_vllm_is_asked_for_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EnvironmentLacks, match="vLLM is not installed"):
        run(settings(rl={"sampler": "vllm"}), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_vllm_generates_with_its_share_of_the_memory_and_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float]] = []

    class Engine(Vllm):
        """Counts its ends, and generates as flatout's own sampler."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def generate(self, *prompts: Any, **options: Any) -> Any:
            return self.inner.generate(*prompts, **options)

        def close(self) -> None:
            asked.append(("ended", 0.0))

    def opened(live: Any, *, backend: str = "auto", memory: float | None = None, **options: Any) -> Any:
        if backend == "vllm":
            assert memory is not None
            asked.append((backend, memory))
        inner = sampler_of(live, **options)
        return Engine(inner) if backend == "vllm" else inner

    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setattr(rollouts, "sampler_of", opened)
    run(settings(rl={"sampler": "vllm", "vllm_memory": 0.2}, train={"steps": 2}), folder=tmp_path / "run")
    assert asked == [("vllm", 0.2), ("ended", 0.0)]


def test_what_vllm_cannot_sample_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    with pytest.raises(UsageError, match=r"temperature 3: vLLM takes 0, or 0\.01 to 2"):
        run(settings(rl={"sampler": "vllm"}, sample={"temperature": 3.0}), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def questions(path: Path, count: int) -> str:
    rows = [{"question": f"Say {i}.", "answer": str(i), "how": f"It is <answer>{i}</answer>"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}?prompt=bare&solution=how"


def test_an_epoch_asks_as_many_prompts_as_the_tasks_have_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    prompts = RolloutBatches._prompts

    def seen(self: RolloutBatches, phase: int, *, round_: int = 0) -> Any:
        found = prompts(self, phase, round_=round_)
        asked.extend(prompt.question for prompt in found)
        return found

    monkeypatch.setattr(RolloutBatches, "_prompts", seen)
    task = questions(tmp_path / "q.jsonl", 10)
    own = {"rl": {"tasks": [task], "samples": 2}, "train": {"steps": None, "epochs": 2}}
    own |= {"data": {"sequence_length": 192}}
    own |= {"save": {"every": "epoch", "keep": 9}}
    assert run(settings(**own), folder=tmp_path / "run").steps == 10  # 20 prompts, 4 and 2 steps a phase
    # An epoch is five steps, and the weights are saved where the phase after its end begins.
    assert [path.name for path in sorted((tmp_path / "run/checkpoints").glob("step-*"))] == [
        "step-00000006",
        "step-00000010",
    ]
    assert sorted(asked) == sorted([*range(10), *range(10)])


def test_solutions_of_a_file_are_learnt_from_first(tmp_path: Path) -> None:
    task = questions(tmp_path / "q.jsonl", 8)
    own = {"sample": {"max_tokens": 32}, "data": {"sequence_length": 192}, "train": {"steps": 6}}
    run(settings(rl={"tasks": [task], "teach": 2}, **own), folder=tmp_path / "run")
    assert [event.step for event in phases(tmp_path / "run")] == [4]
    unnamed = task.replace("&solution=how", "")
    with pytest.raises(UsageError, match=r"jsonl:FILE\?solution=FIELD"):
        run(settings(rl={"tasks": [unnamed], "teach": 2}, **own), folder=tmp_path / "other")


def test_held_out_guru_rows_are_scored_by_domain_during_training(tmp_path: Path) -> None:
    rows = [
        {"data_source": source, "prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": gold}}
        for source, gold in [
            ("math__a", "1"),
            ("stem__gpqa", "C"),
            ("zebra_puzzle_dataset", {"header": ["House"], "rows": [["1"]]}),
        ]
    ]
    (tmp_path / "valid.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = settings(eval={"tasks": [f"guru:{tmp_path}/valid.jsonl"], "task_tokens": 4}, train={"steps": 2})
    run(chosen, folder=tmp_path / "run")
    events = [event for event in Run.open(tmp_path / "run").events() if isinstance(event, TasksScored)]
    metrics = {task.task: (task.metric, task.n) for task in events[-1].tasks}
    assert metrics == {"guru math": ("accuracy", 1), "guru stem": ("accuracy", 1), "guru logic": ("right cells", 1)}


def test_questions_that_do_not_fit_are_reported_once(tmp_path: Path) -> None:
    rows = [{"question": "x" * (20 if i % 2 else 200), "answer": "1"} for i in range(64)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = settings(rl={"tasks": [f"jsonl:{tmp_path}/q.jsonl?prompt=bare"]}, data={"sequence_length": 128})
    run(chosen, folder=tmp_path / "run")
    told = [event.text for event in Run.open(tmp_path / "run").events() if isinstance(event, Notice)]
    assert len([text for text in told if "such questions are left out" in text]) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rl": {"tasks": []}}, "rl.tasks: missing"),
        ({"rl": {"prompts": 5}}, "5 must be a multiple"),
        ({"rl": {"samples": 1}}, "rl.samples"),
        ({"sample": {"temperature": 0}}, "identical"),
        ({"train": {"steps": 5}}, "5 must be a multiple"),
        ({"train": {"steps": None}}, "train.epochs over the questions"),
        ({"rl": {"tasks": ["math:train"]}, "save": {"every": "epoch"}}, "save.every: epoch: math:train makes new"),
        ({"train": {"steps": None, "epochs": 1}, "rl": {"tasks": ["math:train"]}}, "math:train makes new questions"),
        ({"rl": {"tasks": ["sums:train"]}, "mtl": {"method": "pcgrad"}}, "at least two tasks"),
        ({"rl": {"tasks": ["unitz", "sums:train"]}}, "unitz"),
        ({"rl": {"tasks": ["sums:train", "sums:train"]}}, "twice"),
        ({"sample": {"max_tokens": 64}}, "no room for a prompt"),
        ({"sample": {"max_tokens": 55}}, "do not fit data.sequence_length"),
        ({"rl": {"curriculum": True}}, "levels"),
        ({"rl": {"teach_lr": 1e-3}}, "because rl.teach is 0"),
        ({"rl": {"ahead": 1, "dynamic_sampling": 1}}, "cannot wait for grades"),
        ({"rl": {"ahead": 1, "correction": None}}, "need importance weights"),
        ({"rl": {"ahead": 1}, "sample": {"temperature": 0.7}}, "need importance weights"),
        ({"rl": {"overlong_buffer": 9}}, "at most sample.max_tokens"),
        ({"rl": {"old_logprobs": "sampler"}, "sample": {"temperature": 0.7}}, "temperature 1"),
    ],
    ids=str,
)
def test_mistakes_are_named_before_anything_is_made(changes: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        rl.run(settings(**changes), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
