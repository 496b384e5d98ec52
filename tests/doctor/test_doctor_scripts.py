"""The doctor on scripts with a planted cause, and on healthy ones. Ranks are asserted, never seconds."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doctoring import SCRIPTS, diagnosis_of, every_core

from flatout.insight.diagnose import CAUSES
from flatout.record import Run

PLANTED = {
    "plain_slow_dataset.py": "data-starvation",
    "plain_float64.py": "wrong-dtype",
    "plain_anomaly.py": "anomaly-mode",
    "plain_one_thread.py": "few-threads",
    "plain_written_out_attention.py": "math-attention",
    "plain_collects_garbage.py": "empty-cache",
    "plain_recompiles.py": "recompiles",
    "plain_diverges.py": "unstable-loss",
    "plain_learns_nothing.py": "slow-convergence",
    "plain_logs_everything.py": "logging",
    "plain_many_tensors.py": "slow-optimizer",
    "nanogpt_tokenizes_in_the_loop.py": "data-starvation",
    "nanogpt_micro_batch_of_one.py": "small-batch",
    "nanogpt_evaluates_often.py": "evaluation",
    "nanogpt_recomputes.py": "needless-recompute",
    "trainer_pads_to_the_maximum.py": "padding",
    "trainer_saves_every_step.py": "checkpointing",
    "accelerate_slow_collate.py": "data-starvation",
    "lightning_slow_dataset.py": "data-starvation",
    "ddp_syncs_every_micro_batch.py": "missing-no-sync",
    "ddp_one_slow_rank.py": "data-starvation",
    "rl_without_cache.py": "no-kv-cache",
    "rl_one_prompt_at_a_time.py": "generation-batch",
    "rl_slow_reward.py": "reward-bound",
}
TWO = {
    "two_slow_data_and_saves.py": {"data-starvation", "checkpointing"},
    "two_padding_and_evaluation.py": {"padding", "evaluation"},
    "two_float64_and_garbage.py": {"wrong-dtype", "empty-cache"},
}
HEALTHY = ("healthy_plain.py", "healthy_nanogpt.py", "healthy_trainer.py")


def command_of(script: str) -> list[str]:
    if script.startswith("ddp"):
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    return [sys.executable, script]


def needs(script: str) -> None:
    if script.startswith(("trainer", "rl", "healthy_trainer")):
        pytest.importorskip("transformers")
    for framework in ("accelerate", "lightning"):
        if script.startswith(framework):
            pytest.importorskip(framework)


def causes_of(found: dict[str, Any]) -> list[str]:
    return [finding["cause"] for finding in found["findings"]]


def undisturbed(folder: Path, script: str, right: Callable[[list[str]], bool]) -> tuple[dict[str, Any], Path]:
    """A diagnosis and its folder: a second look where other tests took the cores of the first."""
    for look in range(2):
        # The slow rank is watched until time is up, which both ranks must leave at the same step.
        steps = 10_000 if "slow_rank" in script else 11
        with every_core() if "one_thread" in script else contextlib.nullcontext():
            found = diagnosis_of(folder / str(look), *command_of(script), steps=steps)
        if right(causes_of(found)):
            break
    return found, folder / str(look)


@pytest.mark.parametrize("script", PLANTED)
def test_the_planted_cause_comes_first(script: str, tmp_path: Path) -> None:
    needs(script)
    found, _ = undisturbed(tmp_path, script, lambda causes: causes[:1] == [PLANTED[script]])
    causes = causes_of(found)
    assert causes[:1] == [PLANTED[script]], found["findings"]
    first = found["findings"][0]
    assert first["evidence"], "a finding without evidence"
    assert first["fix"], "a finding without a change to make"
    assert first["status"] == "estimated"
    assert set(causes) <= set(CAUSES)
    assert ("seen on rank 1, which the other ranks wait for" in " ".join(first["evidence"])) == ("slow_rank" in script)


@pytest.mark.parametrize("script", TWO)
def test_two_planted_causes_are_the_first_two(script: str, tmp_path: Path) -> None:
    found, _ = undisturbed(tmp_path, script, lambda causes: set(causes[:2]) == TWO[script])
    assert set(causes_of(found)[:2]) == TWO[script], found["findings"]


@pytest.mark.parametrize("script", HEALTHY)
def test_a_healthy_script_is_left_alone(script: str, tmp_path: Path) -> None:
    needs(script)
    found, folder = undisturbed(tmp_path, script, lambda causes: causes == [])
    assert [f for f in found["findings"] if (f["gain"] or 0) > 0.05] == []
    run = Run.open(folder / "run")
    assert run.diagnosis is not None
    assert run.diagnosis.verdict == found["verdict"]
    records = list(run.latest_steps())
    assert len(records) >= 6, "as many as are watched however busy the machine is"
    assert all(record.tokens > 0 and record.loss for record in records)
    assert {"forward", "backward", "optimizer"} <= {span.phase for span in records[-3].spans}


def test_every_script_is_in_one_list() -> None:
    scripts = {path.name for path in SCRIPTS.glob("*.py")} - {"gpt.py"}
    assert scripts == {*PLANTED, *TWO, *HEALTHY}
    assert len(PLANTED) + len(TWO) >= 20
