"""A search by measuring: how near it comes to the best plan, what it says, and what it writes into the user's file."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tests.insight.simulated import Simulated
from tests.insight.stand_in import PLANNED, does_not_fit, factor
from typer.testing import CliRunner

from flatout.cli import app
from flatout.cli.tune import _print_rates
from flatout.config import load
from flatout.errors import UsageError
from flatout.hardware import parse
from flatout.insight import lr
from flatout.insight import trials as trials_module
from flatout.insight.lr import Rates
from flatout.insight.trials import Measured, Trial
from flatout.insight.tune import Model, _as_heavy, _needed, _worth, knobs_of, tune
from flatout.plan import Job, job_of

ROOT = Path(__file__).parents[2]
CONFIG = """# my job
recipe: pretrain
model: {layers: 2, hidden: 64, heads: 2, positions: 128}
data: {sequence_length: 64}
train: {batch_tokens: 1024, steps: 100, lr: 1.0e-3}
plan:
  precision: fp32  # slow
  recompute: full
  micro_batch: 1
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stand_in = [sys.executable, "-m", "tests.insight.stand_in"]
    monkeypatch.setattr(trials_module, "flatout_command", lambda *_: stand_in)
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = tmp_path / "job.yaml"
    path.write_text(CONFIG)
    return path


def job(config: Path, *, on: str = "H200") -> Job:
    return job_of(load(config).settings, hardware=parse(on), num_ranks=1)


class Slow(Simulated):
    """The user's own pins count where a trial sets nothing else."""

    def _whole(self, trial: Trial) -> Trial:
        mine = {"plan.precision": "fp32", "plan.recompute": "full", "plan.micro_batch": 1}
        return Trial(settings={**mine, **trial.settings}, seed=trial.seed)

    def known(self, trial: Trial) -> bool:
        return super().known(self._whole(trial))

    def run(self, trial: Trial, *, name: str, again: bool = False) -> Measured:
        return super().run(self._whole(trial), name=name)


def test_an_unconfirmed_plan_is_not_written(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: Any = Slow(config, chance=random.Random(0))
    found = tune(simulated, job(config), most=6)
    assert found.unconfirmed is None
    assert found.gain is not None
    worse = replace(found, gain=replace(found.gain, verdict="too noisy to tell"))
    assert worse.unconfirmed == "the pairs do not show that the best plan is faster (too noisy to tell)"
    assert replace(found, loss_verdict="different").unconfirmed == "its loss is different"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--apply", "train.lr=1e-4"], "overrides are not in the file"),
        (["--search", "lr", "--budget", "5m"], "are for --search plan"),
    ],
)
def test_bad_input(config: Path, words: list[str], told: str, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["tune", str(config), *words, "--run", str(tmp_path / "search")])
    assert isinstance(found.exception, UsageError)
    assert told in str(found.exception)


@pytest.mark.parametrize("seed", range(5))
def test_the_search_comes_near_the_best_plan_and_says_what_helped(config: Path, seed: int) -> None:
    simulated: Any = Slow(config, chance=random.Random(seed), noise=0.005)
    cpu = job(config, on="cpu") if seed == 4 else job(config)
    found = tune(simulated, cpu, most=20)
    names, choices = zip(*knobs_of(cpu).items(), strict=True)
    assert "precision" in names
    every = [
        PLANNED | {key.removeprefix("plan."): value for choice in one for key, value in choice.items()}
        for one in itertools.product(*choices)
    ]
    best = min(factor(decisions) for decisions in every if not does_not_fit(decisions))
    assert factor(found.best.decisions) < 1.05 * best
    assert len(found.trials) <= 20
    assert found.gain is not None
    assert found.gain.verdict == "faster"
    assert found.loss_verdict == "equal"
    assert found.changes["plan.precision"] == ("fp32", "bf16")
    assert found.without["precision"] == pytest.approx(2.0, rel=0.05)
    assert not any(key.startswith(("train.", "data.")) for key in found.changes), "the batch and the lengths stay"
    assert json.loads(json.dumps(found.to_json()))["changes"]


@pytest.mark.parametrize("log_factor", [-0.7, 0.7])
@pytest.mark.parametrize("after", [2, 3, 4, 5, 6, 7, *range(9, 19, 3)])
def test_killed_and_continued_on_another_machine_it_says_the_same(config: Path, after: int, log_factor: float) -> None:
    class Killed(Slow):
        def run(self, trial: Trial, *, name: str, again: bool = False) -> Measured:
            if not self.known(trial) and self.call == 0 and self.spent_s == after:
                raise KeyboardInterrupt
            return super().run(trial, name=name)

    simulated: Any = Killed(config, chance=random.Random(0), noise=0.002)
    with pytest.raises(KeyboardInterrupt):
        tune(simulated, job(config), most=8)
    simulated.call_again(log_factor=log_factor)
    found = tune(simulated, job(config), most=8)
    every = [factor(one.decisions) for one in found.trials if one.problem is None]
    assert factor(found.best.decisions) < 1.02 * min(every)
    assert found.gain is not None
    assert found.gain.pairs == 4
    assert found.gain.ratio == pytest.approx(factor(found.best.decisions) / factor(found.start.decisions), rel=0.03)
    assert found.without["precision"] == pytest.approx(2.0, rel=0.05)
    assert found.without["recomputation"] == pytest.approx(1.3, rel=0.05)


def test_a_second_call_confirms_a_new_plan_in_eight_trials_within_its_budget(config: Path) -> None:
    simulated: Any = Slow(config, chance=random.Random(0), noise=0.002)
    first = tune(simulated, job(config), most=2)
    simulated.call_again(log_factor=0.7)
    second = tune(simulated, job(config), most=6, budget_s=40.0)
    assert factor(second.best.decisions) < factor(first.best.decisions)
    assert second.gain is not None
    assert second.gain.pairs == 4
    searched, undone = 4, len(second.without) + len(second.dropped)
    assert simulated.spent_s <= searched + 1 + 8 + (1 + undone + 1), (
        "the search, its first trial again, the pairs, the best plan again with what each change brought"
    )
    simulated.call_again(log_factor=0.0)
    tune(simulated, job(config), most=7, budget_s=1.0)
    assert simulated.spent_s <= 1.0


def test_the_learning_rate_is_searched_by_loss(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0))
    simulated.steps = 60
    found = lr.search(simulated)
    assert found.best == pytest.approx(4e-3)
    assert found.difference is not None
    assert found.difference.ratio < 1
    assert found.to_json()["difference"]["verdict"] == "lower"


class Warming(Simulated):
    """A loss that is lower by a tenth of a per mille for each step of warm-up that is nearer to ten."""

    def run(self, trial: Trial, *, name: str, again: bool = False) -> Measured:
        found = super().run(trial, name=name)
        away = abs(10 - trial.settings.get("train.warmup_steps", 10)) * self.each
        return replace(found, last_loss=found.last_loss * (1 + away))


@pytest.mark.parametrize(
    ("own", "each", "best", "tried"),
    [
        (0, 0.01, 10, [0, 5, 10, 20]),
        (7, 0.01, 10, [0, 5, 7, 10, 20]),
        (7, 0.0001, 7, [0, 5, 7, 10, 20]),  # hardly better: the configuration's own stays
        (31, 0.01, 31, []),  # too long for trials of 60 steps
    ],
)
def test_the_warm_up_is_searched_with_the_best_rate(
    config: Path, own: int, each: float, best: int, tried: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(CONFIG.replace("lr: 1.0e-3", f"lr: 4.0e-3, warmup_steps: {own}"))
    simulated: Any = Warming(config, chance=random.Random(0), loss_noise=0.0)
    simulated.steps, simulated.each = 60, each
    found = lr.search(simulated)
    assert (found.lr, found.best_warmup, list(found.warmup_losses)) == (4e-3, best, tried)
    assert found.values == ({} if best == own else {"train.warmup_steps": best})
    assert (found.difference is None) == (best == own)
    _print_rates(found)
    assert ("too long for these trials, so it stays" in " ".join(capsys.readouterr().out.split())) == (not tried)


def test_a_trial_has_the_warm_up_that_the_search_gives_it(config: Path, tmp_path: Path) -> None:
    trials = trials_module.Trials(config, [], folder=tmp_path / "search", steps=60)
    given = trials._given(Trial(settings={"train.lr": 1e-3, "train.warmup_steps": 20}, seed=0))
    assert [word for word in given if word.startswith("train.warmup_steps")] == ["train.warmup_steps=20"]


def of_compile(log_time: float, *, compiled: bool, start_s: float | None) -> Measured:
    decisions = {"compile": "default" if compiled else "none"}
    return Measured(key="", settings={}, seed=0, log_time=log_time, start_s=start_s, decisions=decisions)


@pytest.mark.parametrize(
    ("steps", "compiled", "told"),
    [
        (100, False, "delays the first step by 20.0 s, which does not pay off in 100 steps"),
        (10_000, True, None),
        (None, True, None),
    ],
)
def test_compilation_that_does_not_pay_off_is_not_the_best_plan(
    config: Path, steps: int | None, compiled: bool, told: str | None
) -> None:
    """It saves 5 ms a step of 1,024 tokens; a trial that found its code in the cache started almost at once."""
    slow, fast = math.log(0.020 / 1024), math.log(0.015 / 1024)
    measured = [
        of_compile(slow, compiled=False, start_s=3.0),
        of_compile(slow + 0.1, compiled=False, start_s=3.2),
        of_compile(fast + 0.1, compiled=True, start_s=23.1),
        of_compile(fast, compiled=True, start_s=4.0),
    ]
    best, unpaid = _worth(measured, replace(job(config), steps=steps))
    assert (best.decisions["compile"] == "default") == compiled
    assert unpaid is None if told is None else told in unpaid
    only = [one for one in measured if one.decisions["compile"] != "none"]
    assert _worth(only, replace(job(config), steps=100))[1] is None, "there is nothing else to choose"


def test_a_policys_search_has_its_concurrent_sequences(config: Path) -> None:
    knobs = knobs_of(job(config), completions=100)
    assert knobs["concurrent sequences"] == [{"sample.rows": rows} for rows in (8, 16, 32, 64, 128)]
    model = Model(job(config), knobs)
    values = {key: value for choices in knobs.values() for key, value in choices[0].items()}
    assert model.predicted(values) is not None
    assert model.predicted(values) == model.predicted(values | {"sample.rows": 128}), "the plan predicts training only"
    assert "concurrent sequences" not in knobs_of(job(config))
    heavier = {"sample.rows": 64, "plan.micro_batch": 4}
    assert _as_heavy(heavier, {"sample.rows": 64, "plan.micro_batch": 2})
    assert not _as_heavy(heavier, {"sample.rows": 128, "plan.micro_batch": 2})


@pytest.mark.parametrize(("best", "said"), [(1e-3, False), (2e-3, True), (5e-4, True)])
def test_a_rate_at_the_end_of_the_grid_is_said_to_be_there(
    best: float, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {5e-4: 3.0, 1e-3: 2.9, 2e-3: 2.8}
    warmup: dict[str, Any] = {"warmup": 0, "best_warmup": 0, "warmup_losses": {}}
    _print_rates(Rates(lr=1e-3, best=best, losses=losses, difference=None, steps=60, **warmup))
    assert ("a better one may lie beyond" in " ".join(capsys.readouterr().out.split())) == said


@pytest.mark.parametrize("pinned", ["math", None])
def test_a_pinned_attention_is_part_of_the_search_on_a_cpu(config: Path, pinned: str | None) -> None:
    cpu = job(config, on="cpu")
    knobs = knobs_of(replace(cpu, pins=replace(cpu.pins, attention=pinned)))
    wanted = None if pinned is None else [{"plan.attention": "flash"}, {"plan.attention": "math"}]
    assert knobs.get("attention") == wanted


def test_a_budget_ends_the_search(config: Path) -> None:
    simulated: Any = Slow(config, chance=random.Random(0))
    found = tune(simulated, job(config), budget_s=21.0)
    assert found.left == "the budget was spent"
    assert found.gain is not None
    assert simulated.spent_s <= 21.0
    again = tune(simulated, job(config), budget_s=21.0)
    assert len(again.trials) >= len(found.trials), "a second call has what the first one measured"


class Pinned(Simulated):
    """What the user's file pins counts where a trial sets nothing else; `cost` is added to the time of some plans."""

    def _whole(self, trial: Trial) -> Trial:
        pins = {f"plan.{name}": value for name, value in asdict(self.settings.plan).items() if value is not None}
        return Trial(settings={**pins, **trial.settings}, seed=trial.seed)

    def known(self, trial: Trial) -> bool:
        return super().known(self._whole(trial))

    def run(self, trial: Trial, *, name: str, again: bool = False) -> Measured:
        new, found = not self.known(trial), super().run(self._whole(trial), name=name)
        if new and found.log_time is not None:
            found = self.found[found.key] = replace(found, log_time=found.log_time + self.cost(found, name))
        return found

    def cost(self, found: Measured, name: str) -> float:
        return 0.0


class Lucky(Pinned):
    """Two workers cost a little, and the first trial with them is too fast by chance."""

    lucky = True

    def cost(self, found: Measured, name: str) -> float:
        if found.decisions["workers"] != 2:
            return 0.0
        first, self.lucky = self.lucky, False
        return -0.3 if first else 0.05


def test_a_change_that_its_own_undo_refutes_is_not_applied(config: Path) -> None:
    config.write_text(CONFIG.replace("recompute: full", "workers: 3"))
    simulated: Any = Lucky(config, chance=random.Random(0), noise=0.002)
    found = tune(simulated, job(config))
    assert "plan.workers" not in found.changes
    assert found.dropped["workers"] < 1
    assert found.changes["plan.precision"] == ("fp32", "bf16")
    assert found.unconfirmed is None
    assert found.best.decisions["workers"] == 3


class Threaded(Pinned):
    """One thread takes nearly twice as long as two."""

    def cost(self, found: Measured, name: str) -> float:
        return 0.6 if found.decisions["threads"] == 1 else 0.0


@pytest.mark.parametrize("budget_s", [None, 30.0])
def test_every_pin_is_tried_the_number_of_threads_too(config: Path, budget_s: float | None) -> None:
    config.write_text(CONFIG.replace("precision: fp32  # slow", "threads: 1"))
    simulated: Any = Threaded(config, chance=random.Random(0), noise=0.002)
    cpu = job_of(load(config).settings, hardware=replace(parse("CPU"), num_cpus=2), num_ranks=1)
    found = tune(simulated, cpu, budget_s=budget_s)
    assert found.changes["plan.threads"] == (1, 2)
    assert found.without["threads"] == pytest.approx(math.exp(0.6), rel=0.05)
    assert found.gain is not None
    assert found.gain.verdict == "faster"


def test_a_pin_that_the_plan_agrees_with_is_tried_too(config: Path) -> None:
    """As on a machine where another process uses one of two cores while the plan is made."""
    config.write_text(CONFIG.replace("precision: fp32  # slow", "threads: 1"))
    simulated: Any = Threaded(config, chance=random.Random(0), noise=0.002)
    busy = replace(parse("CPU"), num_cpus=2, free_cpus=1)
    found = tune(simulated, job_of(load(config).settings, hardware=busy, num_ranks=1), budget_s=20.0)
    assert found.changes["plan.threads"] == (1, 2)


def test_each_pin_is_tried_alone_where_the_plans_own_choice_is_slower(config: Path) -> None:
    config.write_text(
        CONFIG.replace("micro_batch: 1", "micro_batch: 1\n  workers: 3\n  prefetch: 7\n  manual_gc: false")
    )

    class Picky(Pinned):
        """Only collecting garbage as the plan does is slow, so the plan's own choice as a whole is."""

        def cost(self, found: Measured, name: str) -> float:
            return 3.0 if found.decisions["manual_gc"] else 0.0

    simulated: Any = Picky(config, chance=random.Random(0), noise=0.002)
    found = tune(simulated, job(config))
    tried = [one.settings for one in found.trials]
    for name, pin in (("workers", 3), ("prefetch", 7), ("precision", "fp32"), ("recompute", "full")):
        assert any(one.get(f"plan.{name}", pin) not in (None, pin) for one in tried), name
    assert found.changes["plan.precision"] == ("fp32", "bf16")
    assert "plan.manual_gc" not in found.changes


@pytest.mark.parametrize("budget_s", [14.0, 16.0, 20.0, 30.0])
def test_a_small_budget_is_used_and_ends_in_a_verdict(config: Path, budget_s: float) -> None:
    simulated: Any = Slow(config, chance=random.Random(0), noise=0.002)
    found = tune(simulated, job(config), budget_s=budget_s)
    assert 0.8 * budget_s <= simulated.spent_s <= budget_s
    assert found.gain is not None
    assert (found.gain.verdict, found.gain.pairs) == ("faster", 4)
    assert len(found.trials) >= 2 + (budget_s >= 20), "a larger budget searches longer"


def test_a_budget_that_cannot_pay_for_pairs_is_still_used(config: Path) -> None:
    simulated: Any = Slow(config, chance=random.Random(0), noise=0.002)
    found = tune(simulated, job(config), budget_s=6.0)
    assert simulated.spent_s == 6.0
    assert found.unconfirmed == "it takes 4 pairs of trials, and 2 fit the budget; the same --run continues"


@pytest.mark.parametrize("budget_s", [None, 200.0])
def test_pairs_are_added_while_they_can_still_decide(config: Path, budget_s: float | None) -> None:
    class Noisy(Slow):
        """The best plan takes longer in one pair and less long in the next, so that the first look cannot decide."""

        def run(self, trial: Trial, *, name: str, again: bool = False) -> Measured:
            new, found = not self.known(trial), super().run(trial, name=name)
            if new and found.log_time is not None and name == "confirming, the best plan":
                found = replace(found, log_time=found.log_time + (1.4 if found.seed % 2 else -1.4))
                self.found[found.key] = found
            return found

    simulated: Any = Noisy(config, chance=random.Random(3), noise=0.002)
    found = tune(simulated, job(config), budget_s=budget_s)
    assert found.gain is not None
    assert found.gain.pairs in (8, 16)
    assert found.gain.verdict == "faster"


def test_the_command_applies_and_reverts(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    before = config.read_bytes()
    words = ["tune", str(config), "--trials", "3", "--run", str(tmp_path / "search")]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert "+  precision: " in found.output.replace('"', "")
    assert "times as fast" in found.output
    assert config.read_bytes() == before, "nothing is written without --apply"
    again = CliRunner().invoke(app, [*words, "--apply"])
    assert again.exit_code == 0, again.output
    assert "# slow" in config.read_text(), "comments stay"
    assert load(config).settings.plan.precision != "fp32"
    assert len((tmp_path / "started").read_text().split()) == len(list((tmp_path / "search" / "trials").iterdir()))
    assert CliRunner().invoke(app, ["tune", str(config), "--revert"]).exit_code == 0
    assert config.read_bytes() == before
    twice = CliRunner().invoke(app, ["tune", str(config), "--revert"])
    assert isinstance(twice.exception, UsageError)


def test_interrupted_it_leaves_no_process(config: Path, tmp_path: Path) -> None:
    import os
    import signal

    import psutil
    from tests.insight.test_insight_ablate import SEARCH
    from tests.waiting import wait_until

    environment = os.environ | {"FAILS": json.dumps({"seed=0": "hang"})}
    command = [sys.executable, "-c", SEARCH, "tune", str(config), "--run", str(tmp_path / "search")]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    started = tmp_path / "started"
    wait_until(lambda: started.exists() and started.read_text().endswith("\n"))
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130
    assert f"repeat the command with --run {tmp_path / 'search'}" in said
    assert not psutil.pid_exists(int(started.read_text()))


def test_a_start_that_ran_out_of_memory_rules_out_only_what_needs_as_much() -> None:
    for name, size in (("sample.rows", "sample.rows"), ("micro_batch", "plan.micro_batch")):
        failed = Measured(key="", settings={}, seed=0, problem="out of memory", decisions={name: 64})
        assert _as_heavy({size: 64}, _needed(failed))
        assert not _as_heavy({size: 32}, _needed(failed))
