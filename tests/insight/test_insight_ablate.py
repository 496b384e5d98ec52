"""Optimizations one at a time: what each brings, what fails, what a killed search keeps."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from tests.insight.simulated import Noise, Simulated
from tests.waiting import wait_until
from typer.testing import CliRunner

from flatout import gallery, parity
from flatout.cli import app
from flatout.cli.ablate import _tables, seconds_of
from flatout.config import load, to_mapping
from flatout.config.settings import Settings
from flatout.errors import RunFailed, UsageError
from flatout.insight import processes
from flatout.insight import trials as trials_module
from flatout.insight.ablate import BEFORE, PLAN, _variants, ablate, compared, not_in_effect
from flatout.insight.compare import flatten
from flatout.insight.payback import paybacks
from flatout.insight.processes import Process
from flatout.insight.report.ablation import html
from flatout.insight.rows import HEADS, HL, Ablation, Row
from flatout.insight.switches import (
    FOLLOW_SIZES,
    SWITCHES,
    Switch,
    applies,
    before_of,
    of_baseline,
    recipe_changes,
)
from flatout.insight.trials import Measured, Trial, Trials
from flatout.optim import schedule
from flatout.record import Run, StepRecord
from flatout.record.records import Span

ROOT = Path(__file__).parents[2]
STAND_IN = [sys.executable, "-m", "tests.insight.stand_in"]
CONFIG = """recipe: pretrain
model: {layers: 2, hidden: 64, heads: 2, positions: 128}
data: {sequence_length: 64}
train: {batch_tokens: 1024, steps: 100, lr: 1.0e-3}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration whose trials are the stand-in's."""
    monkeypatch.setattr(trials_module, "flatout_command", lambda *_: STAND_IN)
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(processes, "GRACE_S", 1.0)
    path = tmp_path / "job.yaml"
    path.write_text(CONFIG)
    return path


SOME = ("mixed precision", "no recomputation", "fused optimizer", "expandable segments", "cudnn.benchmark")


def test_each_switch_has_its_row_and_its_verdict(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0), noise=0.002)
    found = ablate(simulated, only=SOME)
    rows = {row.name: row for row in found.rows}
    assert rows[BEFORE].verdict == "reference"
    assert rows[PLAN].verdict == "faster"
    for name, gain in (("mixed precision", 2.0), ("no recomputation", 1.3), ("fused optimizer", 1.1)):
        alone, without = rows[f"+ {name}"], rows[f"- {name}"]
        assert alone.time is not None
        assert without.time is not None
        assert 1 / alone.time.ratio == pytest.approx(gain, rel=0.02)
        assert without.time.ratio == pytest.approx(gain, rel=0.02)
        assert (alone.verdict, without.verdict) == ("faster", "slower")
        assert alone.loss_verdict == "equal"
        assert alone.blocks == 4
    assert rows["+ cudnn.benchmark"].verdict == "no difference above 3%"
    assert "- cudnn.benchmark" not in rows, "the full plan does not have it"
    assert found.left_out["expandable segments"] == "not part of the plan here"
    steps = [row.name for row in found.rows if row.question == "cumulative"]
    assert steps[:3] == ["first mixed precision", "then no recomputation", "then fused optimizer"]
    assert json.loads(json.dumps(found.to_json()))["rows"][0]["name"] == BEFORE


def test_the_last_table_leads_to_the_full_plan_even_if_little_is_decided_alone(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0), noise=0.5, kind="iid")
    found = ablate(simulated, only=SOME)
    alone = {row.name[2:]: row for row in found.rows if row.question == "alone" and row.name.startswith("+ ")}
    assert {row.verdict for row in alone.values()} == {"faster", "not enough evidence"}
    in_order = sorted((row.time.ratio, name) for name, row in alone.items() if row.time and name != IDLE)
    steps = [row for row in found.rows if row.question == "cumulative"]
    assert [row.name.split(" ", 1)[1] for row in steps] == [name for _, name in in_order]
    last = {"plan.precision": "bf16", "plan.recompute": "none", "plan.fused_optimizer": True}
    trials = [one for one in simulated.found.values() if one.seed >= 1000 and last.items() <= one.settings.items()]
    assert len(trials) == steps[-1].blocks == 4


@pytest.mark.parametrize(("active", "there"), [({}, False), ({"fused_optimizer": "off: fp32"}, True)])
def test_the_last_table_leaves_out_what_does_not_help_unless_another_switch_can_change_that(
    config: Path, active: dict[str, str], there: bool
) -> None:
    class Idle(Simulated):
        """A machine on which the fused optimizer makes no difference."""

        def run(self, trial: Trial, *, name: str, again: bool = False) -> Measured:
            found = super().run(trial, name=name, again=again)
            fused = found.settings.get("plan.fused_optimizer") is not False
            time = (found.log_time or 0.0) + (math.log(1.1) if fused else 0.0)
            return replace(found, log_time=time, log_total=time, active=active)

    simulated: Any = Idle(config, chance=random.Random(0), noise=0.002)
    found = ablate(simulated, only=("mixed precision", "no recomputation", USEFUL))
    steps = [row.name for row in found.rows if row.question == "cumulative"]
    assert (f"then {USEFUL}" in steps) == there


IDLE, USEFUL = "cudnn.benchmark", "fused optimizer"


@pytest.mark.parametrize(
    ("first", "lacks"),
    [
        ({"only": [USEFUL]}, 4),
        ({"only": [USEFUL, IDLE], "budget_s": 14}, 4),
        ({"only": [USEFUL, IDLE], "blocks": 1}, 6),
    ],
    ids=["not asked for", "left out by the budget", "one block of each"],
)
def test_a_second_call_on_a_faster_machine_calls_nothing_faster(config: Path, first: Any, lacks: int) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0), noise=0.002)
    ablate(simulated, tables=["alone"], **first)
    before = dict(simulated.found)
    for _ in range(2):
        simulated.call_again(log_factor=-0.1)
        rows = {row.name: row for row in ablate(simulated, only=[USEFUL, IDLE], tables=["alone"]).rows}
        assert rows[f"+ {IDLE}"].verdict == "no difference above 3%"
        assert rows[f"+ {USEFUL}"].verdict == "faster"
        assert [rows[f"+ {name}"].time.pairs for name in (USEFUL, IDLE)] == [4, 4]
        for row in rows.values():
            if row.time is not None:
                assert row.tokens_per_s == pytest.approx(rows[BEFORE].tokens_per_s / row.time.ratio, rel=1e-6)
        assert simulated.spent_s == 2 * lacks, "the row and its reference"
        assert before.items() <= simulated.found.items(), "nothing was measured again"
        lacks = 0


def test_a_row_that_is_missing_is_measured_with_its_own_reference_only(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0), noise=0.002)
    ablate(simulated, only=[USEFUL], tables=["alone", "without"])
    for only, tables, spent in (
        ("no recomputation", ["alone"], 8),  # the starting point and the row
        ("mixed precision", ["alone", "without"], 16),
        ("mixed precision", ["without"], 0),
        ("no recomputation", ["alone", "without"], 8),  # the plan and the row
    ):
        simulated.call_again(log_factor=0.0)
        ablate(simulated, only=[only], tables=tables)
        assert simulated.spent_s == spent, (only, tables)


def test_a_reference_that_fails_late_does_not_use_up_the_budget(config: Path) -> None:
    class Failing(Simulated):
        def run(self, trial: Trial, *, name: str, again: bool = False) -> Measured:
            found = super().run(trial, name=name)
            return replace(found, problem="exit 1") if name == f"block 5, {BEFORE}" else found

    simulated: Any = Failing(config, chance=random.Random(0), noise=0.2)
    ablate(simulated, only=[IDLE], tables=["alone"], budget_s=300)
    assert simulated.spent_s < 40


def test_a_continued_call_keeps_its_budget(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0), noise=0.2)
    for budget_s in (12, 20, 3, 40):
        ablate(simulated, only=SOME, budget_s=budget_s)
        assert simulated.spent_s <= budget_s
        simulated.call_again(log_factor=0.1)


def test_a_row_that_was_stopped_once_is_measured_with_a_larger_limit_and_stays(config: Path) -> None:
    class Limited(Simulated):
        limit_s = 1.0

        def known(self, trial: Trial) -> bool:
            found = self.found.get(trial.key)
            return found is not None and not (found.stopped_s is not None and found.stopped_s < self.limit_s)

        def run(self, trial: Trial, *, name: str, again: bool = False) -> Measured:
            if self.known(trial):
                return self.found[trial.key]
            self.found.pop(trial.key, None)
            found = super().run(trial, name=name)
            if name.endswith(f"+ {USEFUL}") and self.limit_s < 5:
                found = replace(found, problem="it did not end", stopped_s=self.limit_s, log_time=None)
                self.found[trial.key] = found
            return found

    simulated: Any = Limited(config, chance=random.Random(0), noise=0.002)
    verdicts = []
    for limit_s in (1.0, 10.0, 1.0):
        simulated.limit_s = limit_s
        rows = {row.name: row for row in ablate(simulated, only=[USEFUL], tables=["alone"]).rows}
        verdicts.append(rows[f"+ {USEFUL}"].verdict)
        simulated.call_again(log_factor=0.0)
    assert verdicts == ["it did not end", "faster", "faster"]


def test_failures_are_rows_and_the_rest_goes_on(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(Trials):
        """Waits briefly for the trial that hangs, and long for the others, however busy the machine is."""

        def run(self, trial: Trial, *, name: str, again: bool = False) -> Measured:
            self.limit_s = 1.0 if trial.settings.get("plan.recompute") == "none" else 600.0
            return super().run(trial, name=name, again=again)

    fails = {"plan.recompute=none": "hang", "plan.precision=bf16": "memory", "plan.workers=2": "crash"}
    monkeypatch.setenv("FAILS", json.dumps(fails))
    found = ablate(
        Impatient(config, [], folder=tmp_path / "search"),
        blocks=1,
        only=("mixed precision", "no recomputation", "data loader", "fused optimizer"),
    )
    rows = {row.name: row for row in found.rows}
    assert rows["+ no recomputation"].problem == "it did not end within 1 s and was stopped"
    assert str(rows["+ mixed precision"].problem).startswith("out of memory: torch.OutOfMemoryError: CUDA")
    assert rows["+ data loader"].problem == "exit 1: ValueError: this is the last line"
    assert rows["+ fused optimizer"].time is not None
    alive = [int(line) for line in (tmp_path / "started").read_text().split() if psutil.pid_exists(int(line))]
    assert not alive


def test_a_trial_that_was_stopped_is_tried_again_with_a_larger_limit(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(settings={}, seed=0)
    for limit_s, fails, stopped in ((1.0, True, True), (0.5, False, True), (600.0, False, False)):
        monkeypatch.setenv("FAILS", json.dumps({"seed=0": "hang"} if fails else {}))
        found = Trials(config, [], folder=tmp_path / "search", limit_s=limit_s).run(trial, name="")
        assert (found.problem is not None) == stopped


def test_all_calls_use_the_threads_of_the_first(config: Path, tmp_path: Path) -> None:
    """The plan leaves out cores that are in use at the moment, and trials must differ in their settings only."""
    first = Trials(config, [], folder=tmp_path / "search", base={"plan.threads": 1})
    first.run(Trial(settings={}, seed=0), name="")
    del first
    second = Trials(config, [], folder=tmp_path / "search", base={"plan.threads": 2})
    assert second.known(Trial(settings={}, seed=0))
    assert "plan.threads=1" in second._given(Trial(settings={}, seed=1))


def test_a_search_on_a_cpu_pins_its_threads(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys.modules["flatout.hardware.measure"], "free_cores", lambda allowed: 1)
    words = ["ablate", str(config), "--only", "data loader", "--blocks", "1", "--run", str(tmp_path / "search")]
    assert CliRunner().invoke(app, words).exit_code == 0
    with pytest.raises(UsageError, match=r"results are ablation\.html"):
        Run.open(tmp_path / "search")
    base = json.loads((tmp_path / "search" / "search.json").read_text())["base"]
    assert base.get("plan.threads") == (None if torch.cuda.is_available() else 1)


def test_a_folder_that_cannot_be_used_is_named(config: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be created"):
        Trials(config, [], folder=Path("/proc/search"))
    Trials(config, [], folder=tmp_path / "search").run(Trial(settings={}, seed=0), name="")
    (damaged,) = (tmp_path / "search" / "trials").iterdir()
    damaged.write_text(damaged.read_text()[:100])
    with pytest.raises(UsageError, match=f"{damaged.name}.*delete the file to measure that trial again"):
        Trials(config, [], folder=tmp_path / "search")
    damaged.unlink()
    Trials(config, [], folder=tmp_path / "search")


def test_switches_that_cannot_be_measured_here_are_no_ablation(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0))
    with pytest.raises(UsageError, match=r"no switch to measure: expandable segments \(not part of the plan here\)"):
        ablate(simulated, only=["expandable segments"])
    assert simulated.spent_s == 1


def test_what_differs_from_the_trials_of_a_folder_is_named(config: Path, tmp_path: Path) -> None:
    Trials(config, [], folder=tmp_path / "search")
    with pytest.raises(
        UsageError, match="a different configuration and a different number of steps: name another --run"
    ):
        Trials(config, ["train.lr=1e-2"], folder=tmp_path / "search", steps=7)


def test_a_configuration_that_cannot_run_says_so(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", json.dumps({"seed=0": "crash"}))
    with pytest.raises(RunFailed, match="cannot be measured: exit 1: ValueError: this is the last line"):
        ablate(Trials(config, [], folder=tmp_path / "search"))


def test_a_loss_that_is_one_percent_worse_is_called_different(config: Path) -> None:
    found = []
    for number in range(20):
        simulated: Any = Simulated(config, chance=random.Random(number), broken=True)
        rows = {row.name: row for row in ablate(simulated, only=("no recomputation",)).rows}
        found.append(rows["+ no recomputation"].loss_verdict)
        assert rows["+ no recomputation"].loss_difference is not None
        assert rows["+ no recomputation"].loss_difference.ratio == pytest.approx(1.01, abs=0.005)
    assert found.count("different") >= 19


def test_losses_that_differ_by_chance_are_seldom_called_different(config: Path) -> None:
    """All rows of a table are judged together: one false alarm in twenty tables, not in twenty rows."""
    tables = []
    for number in range(200):
        simulated: Any = Simulated(config, chance=random.Random(number), loss_noise=0.1)
        rows = ablate(simulated, tables=["without"]).rows
        tables.append([row.loss_verdict for row in rows if row.question == "without"])
    assert min(map(len, tables)) >= 5
    assert sum("different" in table for table in tables) <= 15
    assert sum(table.count("not enough evidence") for table in tables) > 0.9 * sum(map(len, tables))


def test_a_budget_is_kept_and_what_it_leaves_out_is_said(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0))
    found = ablate(simulated, only=SOME, budget_s=30.0)
    assert simulated.spent_s <= 30.0
    rows = {row.name: row for row in found.rows}
    assert rows["+ mixed precision"].blocks == 4
    short = [name for name, why in found.left_out.items() if why.startswith("the budget")]
    assert short
    assert {rows[name].verdict for name in short if name in rows} <= {"not enough evidence", "not measured"}
    # A second call has all of that, and goes on.
    simulated.spent_s = 0.0
    again = {row.name: row for row in ablate(simulated, only=SOME, budget_s=30.0).rows}
    assert sum(row.blocks for row in again.values()) > sum(row.blocks for row in rows.values())


def test_the_number_of_blocks_that_was_asked_for_is_the_number_of_blocks(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0), noise=0.3)
    found = ablate(simulated, only=SOME, blocks=2, budget_s=1000.0, tables=["alone", "without"])
    assert {row.blocks for row in found.rows} == {2}


@pytest.mark.parametrize("budget_s", [60.0, 90.0])
def test_a_budget_is_spent_on_every_table_before_more_evidence(config: Path, budget_s: float) -> None:
    simulated: Any = Simulated(config, chance=random.Random(1), noise=0.1)
    found = ablate(simulated, only=SOME, budget_s=budget_s)
    rows = [row for row in found.rows if row.time is not None]
    assert {row.question for row in rows} == {"alone", "without", "cumulative"}
    assert {row.blocks for row in rows} <= {4, 8, 16}, "a look that is begun is completed"
    assert not [name for name, why in found.left_out.items() if why.startswith("the budget")]
    assert simulated.spent_s <= budget_s


@pytest.mark.parametrize(
    ("slow", "seconds", "noise", "blocks"),
    [(1, 100.0, 0.01, {4}), (5, 20.0, 0.01, {4}), (1, 100.0, 0.2, {4, 16})],
    ids=["slow first trial", "slow first block", "more evidence later"],
)
def test_rows_that_seemed_too_long_for_the_budget_come_back_before_more_evidence(
    config: Path, slow: int, seconds: float, noise: float, blocks: set[int]
) -> None:
    """The first trials take longer than later ones, because caches are empty."""

    class Cold(Simulated):
        def run(self, trial: Trial, *, name: str, again: bool = False) -> Measured:
            known = trial.key in self.found
            found = super().run(trial, name=name, again=again)
            if not known and len(self.found) <= slow:
                found = self.found[trial.key] = replace(found, seconds=seconds)
                self.spent_s += seconds - 1.0
            return found

    simulated: Any = Cold(config, chance=random.Random(1), noise=noise)
    found = ablate(simulated, only=SOME, tables=["without"], budget_s=300.0)
    rows = {row.name: row.blocks for row in found.asked("without") if row.time is not None}
    assert list(rows) == ["- mixed precision", "- no recomputation", "- fused optimizer"]
    assert set(rows.values()) == blocks, "a look that is begun is completed"
    assert not [name for name, why in found.left_out.items() if why.startswith("the budget")]
    assert simulated.spent_s <= 300.0


def test_more_evidence_is_collected_only_where_it_is_likely_to_decide(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(1), noise=0.1)
    short = [row for row in ablate(simulated, only=SOME, budget_s=2000.0).rows if row.enough is not None]
    assert short
    assert all(row.enough is not None and row.enough > 16 for row in short)
    assert 4 in {row.blocks for row in short}, "there is budget left, and it is not spent in vain"


def test_a_budget_counts_each_variant_by_its_own_trials(config: Path) -> None:
    """A slow variant costs what it costs, and does not make the others look as slow."""

    class Slow(Simulated):
        def run(self, trial: Trial, *, name: str, again: bool = False) -> Measured:
            known = trial.key in self.found
            found = super().run(trial, name=name, again=again)
            if not known and trial.settings.get("plan.fused_optimizer") is False:
                found = self.found[trial.key] = replace(found, seconds=30.0)
                self.spent_s += 29.0
            return found

    simulated: Any = Slow(config, chance=random.Random(0), noise=0.002)
    found = ablate(simulated, only=SOME, tables=["without"], budget_s=60.0)
    assert simulated.spent_s <= 60.0
    blocks = {row.name: row.blocks for row in found.rows}
    assert blocks == {PLAN: 4, "- mixed precision": 4, "- no recomputation": 4, "- fused optimizer": 1}


@pytest.mark.parametrize("shape", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0, 5, 12, 13, 100])
def test_a_trial_has_the_learning_rates_of_the_first_steps(shape: Any, warmup: int) -> None:
    whole = replace(Settings().train, lr=6e-4, warmup_steps=warmup, schedule=shape)
    given = trials_module.rates(whole, steps=13)
    trial = replace(whole, **{key.removeprefix("train."): value for key, value in given.items()})
    assert trial.warmup_steps < 13
    real, short = schedule(whole, total_steps=1000), schedule(trial, total_steps=13)
    assert [short(step) for step in range(13)] == pytest.approx([real(step) for step in range(13)], rel=1e-3)


def test_a_search_for_the_learning_rate_reaches_it(config: Path, tmp_path: Path) -> None:
    trials = Trials(config, ["train.warmup_steps=90"], folder=tmp_path / "search", reach_peak=True)
    given = trials._given(Trial(settings={"train.lr": 1.0}, seed=0))
    assert {"train.lr=1.0", "train.warmup_steps=3"} <= set(given)
    given = trials._given(Trial(settings={"train.lr": 1.0, "train.warmup_steps": 5}, seed=0))
    assert {"train.lr=1.0", "train.warmup_steps=5"} <= set(given)


def test_a_trial_with_another_learning_rate_or_warm_up_has_that_of_the_first_steps(
    config: Path, tmp_path: Path
) -> None:
    trials = Trials(config, ["train.warmup_steps=90"], folder=tmp_path / "search")
    for settings, warmup, lr in (
        ({}, 12, 1e-3 * 13 / 91),
        ({"train.lr": 1.0}, 12, 1.0 * 13 / 91),
        ({"train.warmup_steps": 51}, 12, 1e-3 * 13 / 52),
        ({"train.lr": 1.0, "train.warmup_steps": 0}, 0, 1.0),
    ):
        given = dict(word.split("=") for word in trials._given(Trial(settings=settings, seed=0)))
        assert int(given["train.warmup_steps"]) == warmup
        assert float(given.get("train.lr", "nan")) == pytest.approx(lr), settings


def test_one_table_alone(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0), noise=0.002)
    found = ablate(simulated, only=SOME, tables=["without"])
    assert {row.question for row in found.rows} == {None, "without"}
    assert BEFORE not in {row.name for row in found.rows}, "nothing is compared with it"
    rows = {row.name: row for row in found.rows}
    assert rows[PLAN].verdict == "reference"
    assert rows["- mixed precision"].verdict == "slower"
    found = ablate(Simulated(config, chance=random.Random(0)), only=SOME, tables=["alone"])  # type: ignore[arg-type]
    assert {row.question for row in found.rows} == {None, "alone"}


def test_changes_of_the_recipe_have_a_table_of_their_own(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0), noise=0.002)
    found = ablate(simulated, tables=["recipe"])
    plan, *rows = found.asked("recipe")
    assert (plan.name, plan.verdict) == (PLAN, "reference")
    assert [row.name for row in rows] == [
        "- larger batch",
        "- longer sequences",
        "- higher learning rate",
        "- cosine with warm-up",
        "- gradient clipping",
    ]
    assert all(row.cells[-2] == "another training" for row in rows)
    assert not found.left_out
    assert {row.question for row in ablate(simulated).rows} == {None, "alone", "without", "cumulative"}
    used = {one.settings.get("train.batch_tokens") for one in simulated.found.values()}
    assert used == {None, 256}, "no other variant changes the batch"
    sizes = [one.settings for one in simulated.found.values() if one.settings.get("train.batch_tokens") == 256]
    assert all(settings["plan.micro_batch"] is None for settings in sizes), "the plan chooses again"
    page = html(found, name="job")
    assert "recipe-h" in page
    assert "another training" in page


def test_what_takes_minutes_is_measured_on_request(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0), noise=0.002)
    name = "torch.compile max-autotune"
    assert "if --only names it" in ablate(simulated, tables=["alone"]).left_out[name]
    rows = {row.name: row for row in ablate(simulated, tables=["alone"], only=[name]).rows}
    assert rows[f"+ {name}"].blocks == 4


def test_on_a_gpu_a_step_lasts_as_long_as_on_the_device(config: Path, tmp_path: Path) -> None:
    """The host's clock says little about the first steps, in which it runs ahead."""
    spans = (Span(phase="forward", seconds=0.02), Span(phase="optimize", seconds=0.01), Span(phase="save", seconds=9.0))
    step = StepRecord(attempt=1, step=3, time=0.0, seconds=0.004, tokens=100, padded_tokens=100, loss=1.0, spans=spans)
    trials = Trials(config, [], folder=tmp_path / "search")
    trials.on_gpu = True
    assert trials._training_s(step) == pytest.approx(0.03)
    trials.on_gpu = False
    assert trials._training_s(replace(step, seconds=9.05)) == pytest.approx(0.05)


def test_the_start_has_an_eighth_of_the_concurrent_sequences() -> None:
    [switch] = [one for one in SWITCHES if one.name == "concurrent sequences"]
    assert before_of(switch, {"sample.rows": 512}) == {"sample.rows": 64}
    assert before_of(switch, {"sample.rows": 4}) == {"sample.rows": 1}


def test_the_shortest_budget_measures_the_plan_against_the_start(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0))
    found = ablate(simulated, only=SOME, budget_s=1.0)
    assert [row.name for row in found.rows if row.blocks] == [BEFORE, PLAN]
    assert not found.asked("without"), "nothing of it was measured"
    assert found.left_out['the table "one after the other"'] == found.left_out["- no recomputation"]
    assert "Without each switch" not in html(found, name="job")


SEARCH = """
import sys
from flatout.insight import processes, trials
trials.flatout_command = lambda *_: [sys.executable, "-m", "tests.insight.stand_in"]
processes.GRACE_S = 1.0
from flatout.cli import main
main()
"""


def test_killed_it_goes_on_without_repeating_a_trial(config: Path, tmp_path: Path) -> None:
    folder, started = tmp_path / "search", tmp_path / "started"
    words = ["ablate", str(config), "--only", "mixed precision", "--blocks", "1", "--run", str(folder), "--json"]
    command = [sys.executable, "-c", SEARCH, *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list((folder / "trials").glob("*.json"))) >= 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    first = [int(pid) for pid in started.read_text().split()]
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in first))
    kept = len(list((folder / "trials").glob("*.json")))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = sorted((folder / "trials").glob("*.json"))
    again = len(started.read_text().split()) - len(first)
    assert again == len(files) - kept, "a finished trial was repeated"
    assert len({json.loads(file.read_text())["key"] for file in files}) == len(files)
    assert not list(folder.glob("trial-*")), "what the killed trial left is gone"
    assert json.loads(done.stdout)["rows"]


def test_a_folder_has_one_search_at_a_time(config: Path, tmp_path: Path) -> None:
    first = Trials(config, [], folder=tmp_path / "search")
    with pytest.raises(UsageError, match="another search is using"):
        Trials(config, [], folder=tmp_path / "search")
    del first


@pytest.mark.parametrize("name", [one.path.stem for one in gallery.examples()])
def test_every_change_of_the_recipe_is_a_valid_configuration(name: str, tmp_path: Path) -> None:
    example = gallery.find(name)
    trials = Trials(example.path, [], folder=tmp_path / "search", base={})
    changes = recipe_changes(trials.settings)
    assert bool(changes) != trials.samples
    own = dict(flatten(to_mapping(trials.settings)))
    for change in changes:
        assert change.kind == "recipe"
        settings = dict.fromkeys(FOLLOW_SIZES) | dict(change.before)
        loaded = load(example.path, overrides=trials._given(Trial(settings=settings, seed=0))).settings
        found = dict(flatten(to_mapping(loaded)))
        for key, before in change.before.items():
            assert change.after[key] == own[key]
            if key not in ("train.lr", "train.warmup_steps"):  # a trial has those of the first steps
                assert found[key] == before
    if name == "rl-guru-mixed":
        sizes = {key: value for change in changes[:3] for key, value in change.before.items()}
        assert sizes == {"rl.prompts": 30, "sample.max_tokens": 128, "rl.samples": 1}


@pytest.mark.parametrize("name", [one.path.stem for one in gallery.examples()])
def test_every_example_can_be_made_short(name: str, tmp_path: Path) -> None:
    example = gallery.find(name)
    trials = Trials(example.path, [], folder=tmp_path / "search", base={})  # it need not fit this machine
    assert trials.samples == (trials.settings.recipe == "rft")


SAMPLING = """recipe: rft
model: {layers: 1, hidden: 32, heads: 2, vocab: 512}
data: {tokenizer: byte, sequence_length: 256}
rft: {task: "sums:train", prompt: bare, questions: 40, chunk: 4, oversample: 3, teach: "sums:shown", teach_steps: 2}
sample: {max_tokens: 6}
train: {batch_tokens: 1024, steps: 4}
plan: {threads: 1}
"""


@pytest.mark.slow
def test_the_next_process_imports_while_a_trial_runs(tmp_path: Path) -> None:
    """The same measurement: the same loss, the code of a switch first, and imports count as start-up."""
    config = tmp_path / "small.yaml"
    config.write_text(CONFIG)
    loud = "import flatout.recipes.loop as loop\nloop.WAIT_STEPS = 7\nprint(loop.WAIT_STEPS)\nraise SystemExit(3)"
    found = {}
    for ahead in (False, True):
        with closing(Trials(config, [], folder=tmp_path / str(ahead), steps=2)) as trials:
            trials.ahead = ahead
            found[ahead] = [trials.run(Trial(settings={}, seed=seed), name="plain") for seed in (0, 1)]
            stopped = trials.run(Trial(settings={}, seed=0, code=loud), name="its code ends it")
            assert stopped.problem is not None
            assert stopped.problem.startswith("exit 3")
            next_one = trials._next
            assert (next_one is not None) == ahead
        if next_one is not None:
            assert next_one._process.poll() is not None, "no process outlives the search"
    for plain, early in zip(found[False], found[True], strict=True):
        assert plain.problem is None
        assert early.problem is None
        assert early.loss == plain.loss
        assert early.start_s is not None


@pytest.mark.parametrize(("ready", "start"), [(98.0, 97.0), (101.5, 98.5)], ids=["before its turn", "in its turn"])
def test_imports_ahead_of_its_turn_count_as_the_start_of_a_trial(tmp_path: Path, ready: float, start: float) -> None:
    """A trial whose turn came at 100 s, after imports of 3 s."""
    assert trials_module._command_time(tmp_path / "run", began=100.0) == 100.0, "it imported nothing ahead"
    (tmp_path / "imported").write_text(json.dumps([3.0, ready]))
    assert trials_module._command_time(tmp_path / "run", began=100.0) == start


def test_a_waiting_process_that_ended_is_a_row_with_its_cause(tmp_path: Path) -> None:
    process = Process([sys.executable, "-c", "raise SystemExit(7)"], stdin=subprocess.PIPE)
    wait_until(lambda: not process.runs)
    process.tell(["train", "x" * 100_000], code="", times=tmp_path / "times")
    ended = process.wait(10.0)
    assert (ended.returncode, ended.timed_out) == (7, False)


@pytest.mark.long
def test_a_trial_of_recipe_rft_samples(tmp_path: Path) -> None:
    config = tmp_path / "rft.yaml"
    config.write_text(SAMPLING)
    trials = Trials(config, [], folder=tmp_path / "search", steps=2)
    found = {
        name: trials.run(Trial(settings=settings, seed=0, code=code), name=name)
        for name, (settings, code) in {
            "as it is": ({}, ""),
            "few": ({"sample.rows": 2}, ""),
            "plain": ({}, "from flatout.sample import generate; generate.no_kernels = lambda device: 'requested'"),
        }.items()
    }
    assert [one.problem for one in found.values()] == [None] * 3
    assert found["few"].decisions["sample.rows"] == 2
    losses = [one.loss for one in found.values()]
    assert losses[0] is not None
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4), "the same tokens, however many are generated at once"
    assert all(one.tokens_per_s for one in found.values())


@pytest.mark.long
def test_a_trial_of_recipe_rl_compares_what_was_generated(tmp_path: Path) -> None:
    """A policy's loss is about zero; the log-probability of its tokens is not."""
    config = tmp_path / "rl.yaml"
    config.write_text(
        "recipe: rl\nmodel: {layers: 1, hidden: 32, heads: 2, vocab: 512}\n"
        "data: {tokenizer: byte, sequence_length: 512}\n"
        'rl: {tasks: ["sums:train"], prompts: 4, samples: 4, updates: 2}\n'
        "sample: {max_tokens: 6}\ntrain: {steps: 100, lr: 1.0e-4}\nplan: {threads: 1}\n"
    )
    trials = Trials(config, [], folder=tmp_path / "search", steps=2)
    found = {rows: trials.run(Trial(settings={"sample.rows": rows}, seed=0), name=f"{rows} rows") for rows in (16, 4)}
    assert [one.problem for one in found.values()] == [None] * 2
    assert found[4].loss == pytest.approx(found[16].loss, rel=1e-4)
    assert found[4].loss == pytest.approx(math.log(512), rel=0.1), "an untrained model knows nothing"
    _, _, verdict = compared([found[16]] * 4, [found[4]] * 4)
    assert verdict == "equal"


@pytest.mark.long
def test_a_trial_of_recipe_router_trains_its_adapters(tmp_path: Path) -> None:
    config = tmp_path / "router.yaml"
    config.write_text(
        "recipe: router\nmodel: {layers: 1, hidden: 32, heads: 2}\n"
        "data: {tokenizer: byte, sequence_length: 256, sources: [{task: sentiment, size: 60}, {task: qa, size: 60}]}\n"
        "router: {teach_steps: 40}\ntrain: {batch_tokens: 512, steps: 100, lr: 1.0e-3}\nlora: {rank: 2}\n"
        "plan: {threads: 1}\n"
    )
    trials = Trials(config, [], folder=tmp_path / "search", steps=2)
    found = trials.run(Trial(settings={}, seed=0), name="as it is")
    assert found.problem is None
    assert found.tokens_per_s is not None
    assert found.loss is not None


def test_the_measurement_counts_more_than_what_the_device_reports(config: Path) -> None:
    class Reporting(Simulated):
        def run(self, trial: Trial, *, name: str, again: bool = False) -> Measured:
            return replace(super().run(trial, name=name), active={"fused_optimizer": "off: not here"})

    simulated: Any = Reporting(config, chance=random.Random(0), noise=0.002)
    rows = {row.name: row for row in ablate(simulated, only=[USEFUL]).rows}
    assert rows[f"- {USEFUL}"].not_in_effect == "off: not here"
    assert rows[f"- {USEFUL}"].verdict == "slower"


@pytest.mark.parametrize(("active", "blocks"), [({}, 16), ({"fused_optimizer": "off: not here"}, 4)])
def test_no_more_evidence_is_collected_on_a_switch_that_is_not_in_effect(
    config: Path, active: dict[str, str], blocks: int
) -> None:
    class Reporting(Simulated):
        def run(self, trial: Trial, *, name: str, again: bool = False) -> Measured:
            return replace(super().run(trial, name=name), active=active)

    simulated: Any = Reporting(config, chance=random.Random(0), gain=0.0, noise=0.05)
    rows = {row.name: row for row in ablate(simulated, only=[USEFUL], tables=["without"], budget_s=300.0).rows}
    assert rows[f"- {USEFUL}"].blocks == blocks


def test_a_table_shows_its_reference_as_one_and_nothing_twice(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0), noise=0.002)
    found = ablate(simulated, only=[USEFUL])
    reference, row = found.asked("without")
    assert (reference.name, reference.verdict, reference.time) == (PLAN, "reference", None)
    assert (row.name, row.verdict) == (f"- {USEFUL}", "slower")
    assert not found.asked("cumulative")
    assert "it takes two switches that may be faster" in found.left_out.values()


def test_what_makes_a_trial_short_wins(config: Path, tmp_path: Path) -> None:
    trials = Trials(config, [], folder=tmp_path / "search", base={"plan.compile": "default"})
    given = trials._given(Trial(settings={"train.steps": 50_000, "log.wandb": "online", "train.lr": 1.0}, seed=3))
    assert {"log.wandb=off", "train.lr=1.0", "plan.compile=default", "seed=3"} <= set(given)
    assert "train.steps=50000" not in given


def test_a_switch_that_is_not_in_effect_has_no_verdict() -> None:
    def one(**active: str) -> Measured:
        return Measured(key="", settings={}, seed=0, active=active)

    graphs = next(switch for switch in SWITCHES if switch.name == "CUDA graphs")
    attention = next(switch for switch in SWITCHES if switch.name == "attention kernel")
    assert not_in_effect(graphs, one(), one(graphs="off: compiled")) == "off: compiled"
    assert not_in_effect(graphs, one(), one(graphs="forward and backward")) is None
    assert not_in_effect(attention, one(attention="varlen"), one(attention="varlen")) == "varlen"
    assert not_in_effect(attention, one(attention="math"), one(attention="flash")) is None
    assert not_in_effect(attention, one(), one()) is None, "nothing is known"


@pytest.mark.parametrize(("size", "accumulation", "start"), [(64, 2, 8), (60, 1, 6), (7, 3, 1), (1, 1, 1)])
def test_the_first_micro_batch_divides_the_batch(size: int, accumulation: int, start: int) -> None:
    switch = next(switch for switch in SWITCHES if switch.name == "micro-batch")
    assert before_of(switch, {"micro_batch": size, "accumulation": accumulation})["plan.micro_batch"] == start


def test_another_configuration_needs_another_folder(config: Path, tmp_path: Path) -> None:
    Trials(config, [], folder=tmp_path / "search")._locked.close()
    with pytest.raises(UsageError, match="a different configuration"):
        Trials(config, ["train.lr=1e-4"], folder=tmp_path / "search")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UsageError, match="is not empty"):
        Trials(config, [], folder=tmp_path / "full")


# -- with a simulated machine


NO_OP = Switch(name="no-op", task="", claim="", before={"plan.recompute": "full"})


def verdicts(config: Path, *, gain: float, times: int, budget_s: float | None = None, kind: Noise = "all") -> list[str]:
    found = []
    for number in range(times):
        simulated: Any = Simulated(config, gain=gain, chance=random.Random(number), kind=kind)
        result = ablate(simulated, switches=[NO_OP], budget_s=budget_s)
        found.append(next(row.verdict for row in result.rows if row.name == "+ no-op"))
    return found


@pytest.mark.parametrize("budget_s", [None, 1e9], ids=["4 blocks", "up to 16 blocks"])
def test_a_switch_that_does_nothing_is_rarely_called_faster(config: Path, budget_s: float | None) -> None:
    found = verdicts(config, gain=0.0, times=200, budget_s=budget_s)
    # 5 % of 200 are 10; a rate of 5 % would give more than 18 in one of 150 such tests.
    assert sum(one in ("faster", "slower") for one in found) <= 18


@pytest.mark.long
@pytest.mark.parametrize("kind", ["iid", "drift", "spikes"])
@pytest.mark.parametrize("budget_s", [None, 1e9], ids=["4 blocks", "up to 16 blocks"])
def test_whatever_the_noise_at_most_one_in_twenty_is_called_faster(
    config: Path, kind: Noise, budget_s: float | None
) -> None:
    found = verdicts(config, gain=0.0, times=2000, budget_s=budget_s, kind=kind)
    assert found.count("faster") <= 100
    assert found.count("slower") <= 100


@pytest.mark.parametrize("kind", ["iid", "drift", "all"])
def test_a_gain_of_five_percent_is_found(config: Path, kind: Noise) -> None:
    found = verdicts(config, gain=0.05, times=40, budget_s=1e9, kind=kind)
    assert found.count("faster") >= 38


# -- the command


def test_the_command(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = ["ablate", str(config), "--only", "mixed precision", "--blocks", "1", "--run", str(tmp_path / "search")]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert "mixed" in found.output
    assert "not enough" in found.output
    assert json.loads((tmp_path / "search" / "ablation.json").read_text())["rows"]


def test_trials_measure_as_many_steps_as_the_command_says(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "search"
    words = ["ablate", str(config), "--only", "mixed precision", "--blocks", "1", "--run", str(folder)]
    found = CliRunner().invoke(app, [*words, "--steps", "20"])
    assert found.exit_code == 0, found.output
    again = Trials(config, [], folder=folder, steps=20)
    assert again.found, "the folder's trials have 20 steps"
    assert "train.steps=23" in again._given(Trial(settings={}, seed=0)), "with the three that warm up"
    del again
    assert isinstance(CliRunner().invoke(app, words).exception, UsageError), "ten steps do not go with them"
    assert CliRunner().invoke(app, [*words, "--steps", "9"]).exit_code == 2


@pytest.mark.parametrize(
    ("only", "tables"),
    [
        (["larger batch"], {"recipe"}),
        (["larger batch", "mixed precision"], {"recipe", "alone", "without"}),
        (["mixed precision"], {"alone", "without"}),
    ],
    ids=["recipe", "both", "plan"],
)
def test_a_switch_that_is_named_is_measured_in_its_tables(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: list[str], tables: set[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = [word for name in only for word in ("--only", name)]
    found = CliRunner().invoke(app, ["ablate", str(config), "--blocks", "1", "--run", str(tmp_path / "search"), *words])
    assert found.exit_code == 0, found.output
    rows = json.loads((tmp_path / "search" / "ablation.json").read_text())["rows"]
    assert {row["question"] for row in rows} - {None} == tables


def test_trials_that_only_sample_have_no_changes_of_the_recipe(tmp_path: Path) -> None:
    config = tmp_path / "rft.yaml"
    config.write_text(SAMPLING)
    found = CliRunner().invoke(app, ["ablate", str(config), "--table", "recipe", "--run", str(tmp_path / "search")])
    assert isinstance(found.exception, UsageError)
    assert "trials of recipe rft only sample" in str(found.exception)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only", "nothing"], "is not a switch"),
        (["--budget", "soon"], "is not a duration"),
        (["--budget", "0m"], "is not a duration"),
        (["--table", "other"], "choose from: alone, without, cumulative, recipe"),
        (["--table", "alone", "--only", "larger batch"], "add --table recipe"),
        (["--table", "recipe", "--only", "TF32"], "add --table alone or without or cumulative"),
        (["--table", "recipe", "--baseline", str(gallery.find("pretrain-demo").path)], "use the other tables"),
    ],
)
def test_bad_input(config: Path, words: list[str], told: str) -> None:
    found = CliRunner().invoke(app, ["ablate", str(config), *words])
    assert isinstance(found.exception, UsageError)
    assert told in str(found.exception)


def test_a_baseline_gives_its_differences_as_switches(config: Path, tmp_path: Path) -> None:
    ours = {"train.lr": 1e-3, "plan.recompute": None, "log.every": 10}
    theirs = {"train.lr": 2e-3, "plan.recompute": "full", "log.every": 10, "train.steps": 9, "criteria.mfu": 0.4}
    found = of_baseline(ours, theirs, without={"train.steps"})
    assert [(one.name, one.kind) for one in found] == [("train.lr", "recipe"), ("plan.recompute", "numerics")]
    assert found[0].after == {"train.lr": 1e-3}
    assert found[1].after == {}
    sampling = load(gallery.find("rft-embedded").path).settings
    assert all(applies(one, sampling) for one in of_baseline({"sample.rows": 8}, {"sample.rows": 2}, without=()))


def test_every_switch_names_settings_that_exist(config: Path) -> None:
    from flatout.config.load import keys

    assert {key for switch in SWITCHES for key in switch.before} <= set(keys())
    assert len({switch.name for switch in SWITCHES}) == len(SWITCHES)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("7", 7)])
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


def test_the_page_has_bars_intervals_and_every_row(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0), noise=0.002)
    found = ablate(simulated, only=SOME)
    page = html(found, name="job <b>")
    assert "<b>" not in page, "names are text"
    assert page.count("<svg") == 3
    for row in found.rows:
        assert row.name in page
    assert "cumulative-h" in page
    assert "not part of the plan here" in page


@pytest.mark.parametrize(
    ("width", "heads"),
    [(64, ["tokens/s", "speed", "loss", "verdict"]), (250, [head for head in HEADS[1:] if head != HL])],
)
def test_a_narrow_terminal_has_the_important_columns_and_whole_numbers(
    config: Path, width: int, heads: list[str]
) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0), noise=0.002)
    found = ablate(simulated, only=SOME, tables=["without"])
    [table] = _tables(found, width=width)
    console = Console(width=width, file=io.StringIO())
    with console.capture() as seen:
        console.print(table)
    _, head, *lines = seen.get().splitlines()
    assert re.split(r"\s{2,}", head.strip()) == heads
    for row in found.rows:
        assert any(row.cells[2] in line and row.cells[3] in line for line in lines), "numbers are not wrapped"


@pytest.fixture
def compiling(config: Path) -> tuple[Row, Row]:
    """The starting point, and the same compiled: as fast as measured, and as late as a test says."""
    simulated: Any = Simulated(config, chance=random.Random(0), noise=0.002)
    rows = {row.name: row for row in ablate(simulated, only=["torch.compile"], tables=["alone"]).rows}
    plain, compiled = rows[BEFORE], rows["+ torch.compile"]
    assert compiled.verdict == "faster"
    return (
        replace(plain, tokens_per_s=1000.0, start_s=5.0, longest_start_s=7.0),
        replace(compiled, tokens_per_s=1250.0, start_s=15.0, longest_start_s=25.0),  # most of them from a cache
    )


def of_rows(*rows: Row) -> Ablation:
    return Ablation(rows=rows, left_out={}, decisions={}, seconds=1.0)


def test_compiling_pays_off_after_some_tokens(compiling: tuple[Row, Row]) -> None:
    found = of_rows(*compiling)
    (payback,) = paybacks(found)
    assert payback.later_s == 20.0
    assert payback.tokens == pytest.approx(100_000)  # 5 + 100 s and 25 + 80 s
    assert "pays off after 100,000 tokens" in html(found, name="job")


def test_where_the_plan_compiles_its_payback_is_the_same(compiling: tuple[Row, Row]) -> None:
    plain, compiled = compiling
    slower = parity.paired([0.0, 0.0, 0.0, 0.0], [0.2, 0.21, 0.2, 0.21])
    without = replace(compiled, name="- torch.compile", question="without", reference=PLAN, time=slower)
    without = replace(without, start_s=plain.start_s, tokens_per_s=plain.tokens_per_s)
    plan = replace(plain, name=PLAN, longest_start_s=25.0, tokens_per_s=compiled.tokens_per_s)
    assert without.verdict == "slower"
    (payback,) = paybacks(of_rows(plan, without))
    assert (payback.compiled.name, payback.plain.name) == (PLAN, "- torch.compile")
    assert payback.tokens == pytest.approx(100_000)


def test_what_starts_no_later_or_is_no_faster_has_nothing_to_pay_off(compiling: tuple[Row, Row]) -> None:
    plain, compiled = compiling
    slower = parity.paired([0.0, 0.0, 0.0, 0.0], [0.2, 0.21, 0.2, 0.21])
    for other in (
        replace(compiled, longest_start_s=4.0),
        replace(compiled, longest_start_s=None),
        replace(compiled, compiles=False),
        replace(compiled, time=slower, tokens_per_s=800.0),
        replace(compiled, problem="exit 1"),
    ):
        assert paybacks(of_rows(plain, other)) == []
    assert "When compiling pays off" not in html(of_rows(plain, other), name="job")


def test_the_middle_is_shown_beside_the_mean_where_there_are_enough_blocks(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0), noise=0.002)
    few = ablate(simulated, only=["fused optimizer"], tables=["without"])
    assert HL not in html(few, name="job")
    many = ablate(simulated, only=["fused optimizer"], tables=["without"], blocks=8)
    assert HL in html(many, name="job")
    (row,) = [row for row in many.rows if row.reference]
    assert row.cells[HEADS.index(HL)] == f"{1 / row.time.middle:.2f}x"


def test_what_a_verdict_still_takes_is_said(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0), noise=0.1)
    found = ablate(simulated, only=["cudnn.benchmark"], tables=["alone"])
    row = found.rows[-1]
    assert row.verdict == "not enough evidence"
    assert row.enough in (8, 16) or row.enough > 16
    (note,) = [note for note in found.notes() if row.name in note]
    assert f"--blocks {row.enough}" in note or f"about {row.enough} blocks" in note
    assert note in html(found, name="job")
    again = ablate(simulated, only=["cudnn.benchmark"], tables=["alone"], blocks=1)
    assert again.to_json()["rows"][-1]["blocks_for_verdict"] == row.enough, "known from the blocks before"


def test_one_block_is_no_verdict_and_says_so(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0))
    found = ablate(simulated, only=["fused optimizer"], blocks=1, tables=["without"])
    assert "A verdict takes at least 4 blocks (--blocks 4, or a larger --budget): - fused optimizer." in found.notes()


def test_rows_that_compare_all_steps_are_named(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0))
    found = ablate(simulated, only=["rare logging", "fused optimizer"], tables=["without"])
    (note,) = [note for note in found.notes() if "all steps together" in note]
    assert "- rare logging" in note
    assert "fused optimizer" not in note


def test_a_short_budget_decides_a_few_rows_instead_of_none(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0), noise=0.002)
    found = ablate(simulated, only=SOME, tables=["alone"], budget_s=18)
    verdicts = {row.name: row.verdict for row in found.rows if row.question}
    assert verdicts[PLAN] == "faster"
    assert verdicts["+ mixed precision"] == "faster"
    assert verdicts["+ no recomputation"] == "faster"
    assert found.left_out["+ fused optimizer"] == found.left_out["+ cudnn.benchmark"] == "the budget was too short"
    assert found.seconds <= 18


@pytest.mark.parametrize(("margin", "verdict"), [(0.02, "equal"), (0.0001, "not enough evidence")])
def test_the_margin_of_losses_is_the_users(config: Path, margin: float, verdict: str) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0), noise=0.002)
    found = ablate(simulated, only=["fused optimizer"], tables=["without"], loss_margin=margin)
    assert found.rows[-1].loss_verdict == verdict


def test_switches_outside_the_asked_table_are_named(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0))
    with pytest.raises(UsageError, match=r"cudnn.benchmark \(not part of the plan, so only"):
        ablate(simulated, only=["torch.compile", "cudnn.benchmark"], tables=["without"])


def test_a_switch_that_a_recipe_cannot_show_is_refused_before_any_trial(tmp_path: Path) -> None:
    config = tmp_path / "rft.yaml"
    config.write_text(SAMPLING)
    simulated: Any = Simulated(config, chance=random.Random(0))
    with pytest.raises(UsageError, match="trials of recipe rft cannot show fused optimizer; choose from: mixed"):
        ablate(simulated, only=["fused optimizer"])
    assert not simulated.found


def test_what_trials_of_other_recipes_measure_is_said(tmp_path: Path) -> None:
    (config := tmp_path / "rft.yaml").write_text(SAMPLING)
    about = Trials(config, [], folder=tmp_path / "search", base={}).about
    assert about.startswith("Trials of recipe rft only sample. The loss is the mean negative log-probability")
    example = gallery.find("router-embedded")
    assert "phase 1" in Trials(example.path, [], folder=tmp_path / "router", base={}).about
    assert Trials(gallery.find("pretrain-demo").path, [], folder=tmp_path / "plain", base={}).about is None


def test_a_plan_that_also_changes_the_recipe_is_another_training(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0))
    switches = [
        Switch(
            name="train.lr", task="", claim="none", before={"train.lr": 2e-3}, after={"train.lr": 1e-3}, kind="recipe"
        )
    ]
    found = ablate(simulated, switches=switches, tables=["alone", "without"])
    words = {table: [row.cells[HEADS.index("loss")] for row in found.asked(table)] for table in ("alone", "without")}
    assert words == {"alone": ["", *["another training"] * 2], "without": ["", "another training"]}


def test_a_page_of_failures_has_no_picture(config: Path) -> None:
    simulated: Any = Simulated(config, chance=random.Random(0))
    found = ablate(simulated, only=("mixed precision",))
    broken = replace(found, rows=[replace(row, time=None, problem="exit 1: <nothing>") for row in found.rows])
    page = html(broken, name="job")
    assert "<svg" not in page
    assert "exit 1: &lt;nothing&gt;" in page


def test_code_that_turns_a_switch_off_is_in_every_variant_without_it(tmp_path: Path) -> None:
    config = tmp_path / "rft.yaml"
    config.write_text(SAMPLING)
    known = [switch for switch in SWITCHES if applies(switch, load(config).settings)]
    assert {switch.name for switch in known} == {
        "mixed precision",
        "concurrent sequences",
        "sampling kernels and CUDA graphs",
    }
    variants, left_out = _variants(known, {"precision": "bf16"}, only=(), on_gpu=True)
    plain = {variant.name for variant in variants if "no_kernels" in variant.code}
    assert plain == {"before", "+ mixed precision", "+ concurrent sequences", "- sampling kernels and CUDA graphs"}
    assert left_out == {}
    _, left_out = _variants(known, {"precision": "bf16"}, only=(), on_gpu=False)
    assert left_out == {"sampling kernels and CUDA graphs": "needs a GPU"}


def test_a_process_that_the_kernel_killed_for_lack_of_memory_says_so() -> None:
    group = Path(f"/sys/fs/cgroup/memory/flatout-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs the right to make a control group for memory")
    join = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        killed = Process([sys.executable, "-c", f"{join}held = bytearray(1 << 30)"]).wait(600)
        other = Process([sys.executable, "-c", f"{join}os.kill(os.getpid(), 9)"]).wait(600)
    finally:
        group.rmdir()
    assert killed.oom_killed
    assert trials_module._cause(killed) == "out of memory: the kernel's OOM killer ended it"
    assert trials_module._cause(replace(other, oom_killed=False)) == "killed by signal 9 (Killed): it said nothing"
    elsewhere = replace(other, returncode=1, said="ValueError: this", oom_killed=True)
    assert trials_module._cause(elsewhere) == "exit 1: ValueError: this", "another process was killed"
