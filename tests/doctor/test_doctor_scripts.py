"""The doctor on scripts with a planted cause, and on healthy ones.

Ranks and gains are measured, so they are asserted on what was recorded once (`record.py`, `facts/`), and on scripts as
they run only in `make test-doctor`, on a machine with nothing else to do. A few scripts run in `make test`: what is
asserted of those holds on a busy machine, too.
"""

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from doctoring import SCRIPTS, SHARED, causes_of, command_of, diagnosis_of, every_core, needs, steps_of

from flatout.insight.diagnose import CAUSES, diagnose
from flatout.record import Diagnosis, Run
from record import FACTS, recorded

PLANTED = {
    "plain_slow_dataset.py": "data-starvation",
    "plain_float64.py": "wrong-dtype",
    "plain_busy_thread.py": "busy-thread",
    "plain_anomaly.py": "anomaly-mode",
    "plain_one_thread.py": "few-threads",
    "plain_written_out_attention.py": "math-attention",
    "plain_collects_garbage.py": "empty-cache",
    "plain_recompiles.py": "recompiles",
    "plain_diverges.py": "unstable-loss",
    "plain_learns_nothing.py": "slow-convergence",
    "plain_logs_everything.py": "logging",
    "plain_many_tensors.py": "slow-optimizer",
    "plain_one_row_at_a_time.py": "small-batch",
    "plain_new_optimizer.py": "recreated-optimizer",
    "plain_new_model.py": "recreated-model",
    "plain_new_loader.py": "recreated-loader",
    "nanogpt_tokenizes_in_the_loop.py": "data-starvation",
    "nanogpt_micro_batch_of_one.py": "small-batch",
    "nanogpt_evaluates_often.py": "evaluation",
    "nanogpt_recomputes.py": "needless-recompute",
    "trainer_pads_to_the_maximum.py": "padding",
    "trainer_saves_every_step.py": "checkpointing",
    "trainer_recomputes.py": "needless-recompute",
    "accelerate_slow_collate.py": "data-starvation",
    "accelerate_float64.py": "wrong-dtype",
    "accelerate_evaluates_often.py": "evaluation",
    "lightning_slow_dataset.py": "data-starvation",
    "lightning_saves_every_step.py": "checkpointing",
    "lightning_anomaly.py": "anomaly-mode",
    "ddp_syncs_every_micro_batch.py": "missing-no-sync",
    "ddp_one_slow_rank.py": "data-starvation",
    "parts_slow_dataset.py": "data-starvation",
    "critic_collects_garbage.py": "empty-cache",
    "rl_without_cache.py": "no-kv-cache",
    "rl_one_prompt_at_a_time.py": "generation-batch",
    "rl_slow_reward.py": "reward-bound",
    "rl_grades_by_subprocess.py": "reward-bound",
    "rl_own_loop_without_cache.py": "no-kv-cache",
    "trl_sft_pads_to_a_fixed_length.py": "padding",
    "trl_grpo_slow_reward.py": "reward-bound",
    "trl_dpo_recomputes.py": "needless-recompute",
}
TWO = {
    "two_slow_data_and_saves.py": {"data-starvation", "checkpointing"},
    "two_padding_and_evaluation.py": {"padding", "evaluation"},
    "two_float64_and_garbage.py": {"wrong-dtype", "empty-cache"},
}
HEALTHY = (
    "healthy_plain.py",
    "healthy_nanogpt.py",
    "healthy_trainer.py",
    "healthy_lightning.py",
    "healthy_actor_critic.py",
    "healthy_own_updates.py",
)
# These run each time, with `healthy_plain.py`, the demo's slow script (padding, anomaly mode), a script that collects
# garbage (test_doctor_prove.py) and those of test_doctor_behaviour.py. None of them sleeps: where other processes take
# the cores, what it does wrong takes longer with all the rest.
EACH_TIME = ("plain_float64.py",)


def test_every_script_is_in_one_list_and_was_recorded() -> None:
    scripts = {path.name for path in SCRIPTS.glob("*.py")} - SHARED
    assert scripts == {*PLANTED, *TWO, *HEALTHY}
    assert {path.stem for path in FACTS.glob("*.json")} == {Path(script).stem for script in scripts}
    assert len(PLANTED) + len(TWO) >= 20


# -- as recorded


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Diagnosis]:
    """The diagnosis of a recording, on a machine with as many cores as it was recorded on."""

    def read(script: str) -> Diagnosis:
        seen, cpus = recorded(script)
        monkeypatch.setattr("os.cpu_count", lambda: cpus)
        return diagnose(seen)

    return read


def is_first(found: dict[str, Any], script: str) -> None:
    causes = causes_of(found)
    assert causes[:1] == [PLANTED[script]], found["findings"]
    first = found["findings"][0]
    assert first["evidence"], "a finding without evidence"
    assert first["fix"], "a finding without a change to make"
    assert first["status"] == "estimated"
    assert set(causes) <= set(CAUSES)
    assert ("rank 1 is the straggler" in " ".join(first["evidence"])) == ("slow_rank" in script)


@pytest.mark.parametrize("script", PLANTED)
def test_the_planted_cause_comes_first_as_recorded(script: str, read: Callable[[str], Diagnosis]) -> None:
    is_first(as_json(read(script)), script)


@pytest.mark.parametrize("script", TWO)
def test_two_planted_causes_are_the_first_two_as_recorded(script: str, read: Callable[[str], Diagnosis]) -> None:
    assert {finding.cause for finding in read(script).findings[:2]} == TWO[script]


@pytest.mark.parametrize("script", HEALTHY)
def test_a_healthy_script_is_left_alone_as_recorded(script: str, read: Callable[[str], Diagnosis]) -> None:
    assert [finding for finding in read(script).findings if (finding.gain or 0) > 0.05] == []


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(asdict(diagnosis)))
    return found


# -- as they run, each time


def observed_in(folder: Path) -> dict[str, Any]:
    """The agent's facts, as the run folder keeps them."""
    (event,) = [event for event in Run.open(folder / "run").events() if event.kind == "observed"]
    return dict(event.data)


@pytest.mark.parametrize("script", EACH_TIME)
def test_the_planted_cause_is_found(script: str, tmp_path: Path) -> None:
    """However busy the machine is; so a minute is allowed for what takes a second, and no rank is asserted."""
    needs(script)
    found = diagnosis_of(tmp_path, *command_of(script), seconds=60.0)
    assert PLANTED[script] in causes_of(found), found["findings"]
    seen, _ = recorded(script)
    assert observed_in(tmp_path).keys() == seen.facts.keys(), "the agent writes other facts now: record them again"


@pytest.mark.long
def test_a_healthy_script_is_watched_step_by_step(tmp_path: Path) -> None:
    found = diagnosis_of(tmp_path, *command_of("healthy_plain.py"), seconds=60.0)
    check_records(tmp_path / "run", found)
    seen, _ = recorded("healthy_plain.py")
    assert observed_in(tmp_path).keys() == seen.facts.keys(), "the agent writes other facts now: record them again"


def check_records(folder: Path, found: dict[str, Any]) -> None:
    run = Run.open(folder)
    assert run.diagnosis is not None
    assert run.diagnosis.verdict == found["verdict"]
    records = list(run.latest_steps())
    assert len(records) >= 6, "as many as are watched however busy the machine is"
    assert all(record.tokens > 0 and record.loss for record in records)
    assert {"forward", "backward", "optimizer"} <= {span.phase for span in records[-3].spans}


# -- as they run, all of them: `make test-doctor`


def undisturbed(folder: Path, script: str, right: Callable[[list[str]], bool]) -> tuple[dict[str, Any], Path]:
    """A diagnosis and its folder: a second look where something else took the cores of the first."""
    for look in range(2):
        with every_core() if "one_thread" in script else contextlib.nullcontext():
            found = diagnosis_of(folder / str(look), *command_of(script), steps=steps_of(script))
        if right(causes_of(found)):
            break
    return found, folder / str(look)


@pytest.mark.live
@pytest.mark.parametrize("script", PLANTED)
def test_the_planted_cause_comes_first(script: str, tmp_path: Path) -> None:
    needs(script)
    found, _ = undisturbed(tmp_path, script, lambda causes: causes[:1] == [PLANTED[script]])
    is_first(found, script)


@pytest.mark.live
@pytest.mark.parametrize("script", TWO)
def test_two_planted_causes_are_the_first_two(script: str, tmp_path: Path) -> None:
    found, _ = undisturbed(tmp_path, script, lambda causes: set(causes[:2]) == TWO[script])
    assert set(causes_of(found)[:2]) == TWO[script], found["findings"]


@pytest.mark.live
@pytest.mark.parametrize("script", HEALTHY)
def test_a_healthy_script_is_left_alone(script: str, tmp_path: Path) -> None:
    needs(script)
    found, folder = undisturbed(tmp_path, script, lambda causes: causes == [])
    assert [f for f in found["findings"] if (f["gain"] or 0) > 0.05] == []
    check_records(folder / "run", found)
