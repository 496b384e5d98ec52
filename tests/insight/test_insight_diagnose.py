"""The rules on what an agent would have seen: GPU causes above all, which no CPU can plant."""

import copy
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from flatout.hardware import named
from flatout.insight import doctor
from flatout.insight.attach import Watched
from flatout.insight.diagnose import CAUSES, diagnose
from flatout.insight.diagnose.observed import Observed
from flatout.insight.diagnose.ranks import straggler
from flatout.insight.prove import ALL_TOGETHER, Proof, change_for, measured
from flatout.record import Finding

STEP = {
    "seconds": 0.1,
    "host": {"forward": 0.02, "backward": 0.03, "optimizer": 0.01, "other": 0.04},
    "device": {"data": 0.0, "forward": 0.03, "backward": 0.06, "optimizer": 0.009, "other": 0.001},
    "micro": [{"rows": 16, "length": 1024, "tokens": 16384, "real": 16384.0}],
    "loss": 3.0,
    "counts": {},
    "compile_s": 0.0,
    "lr": 3e-4,
    "cpu_s": 0.1,
}
FACTS: dict[str, Any] = {
    "framework": "torch",
    "world": 1,
    "cores": 16,
    "threads": 16,
    "default_threads": 16,
    "compute_dtype": "bfloat16",
    "device": "cuda",
    "loaders": [{"evaluating": False, "num_workers": 4, "pin_memory": True, "batch_size": 16, "dataset": "Rows"}],
    "optimizers": {
        "1": {
            "class": "AdamW",
            "module": "torch.optim.adamw",
            "fused": True,
            "foreach": None,
            "tensors": 148,
            "devices": {"cuda": 148},
        }
    },
    "model": {
        "parameters": 124_000_000,
        "trainable": 124_000_000,
        "matmul_weights": 124_000_000,
        "dtypes": {"float32": 148},
        "config": {},
        "vocabulary": 50304,
        "attention": None,
    },
    "variables": {},
    "flags": {"matmul_precision": "high", "deterministic": False, "flash_sdp": True, "mem_efficient_sdp": True},
    "gpu": {
        "name": "NVIDIA H200",
        "sm": [9, 0],
        "memory_gib": 139.8,
        "peak_gib": 40.0,
        "peak_reserved_gib": 44.0,
        "alloc_retries": 0,
    },
    "profile": {"busy_s": 0.097, "num_kernels": 900, "waits": {"launch": 0.002, "sync": 0.0}, "copies_pageable_s": 0.0},
    "syncs": [],
    "replays": {"batch-2": [0.1, 0.099], "batch-4": [0.1, 0.098]},
    "forwards": [],
    "generations": [],
    "samples": [["forward", "", "train.py:1 in <module>", 90]],
    "recompiles": {"count": 1, "reasons": {}},
    "totals": {},
    "trainer_arguments": None,
}


def seen(step: dict[str, Any] | None = None, **facts: Any) -> Observed:
    merged = copy.deepcopy(FACTS)
    for key, value in facts.items():
        merged[key] = (
            {**merged[key], **value} if isinstance(merged.get(key), dict) and isinstance(value, dict) else value
        )
    steps = [{**copy.deepcopy(STEP), **(step or {})} for _ in range(10)]
    return Observed(steps=steps, facts=merged, hardware=named("H200"))


def first(found: Observed) -> Finding:
    return diagnose(found).findings[0]


def test_a_healthy_gpu_job_has_no_finding_and_a_limit() -> None:
    found = diagnose(seen())
    assert found.findings == ()
    assert found.verdict.startswith("no problem found, ")
    assert found.limit["tokens_per_s"] == pytest.approx(163_840)
    assert found.limit["ceiling_tokens_per_s"] == pytest.approx(989e12 / (6 * 124e6))


def test_a_job_far_below_the_limit_without_a_cause_is_told_what_to_measure() -> None:
    slow = {"micro": [{"rows": 16, "length": 64, "tokens": 1024, "real": 1024.0}]}
    found = diagnose(seen(step=slow))
    assert found.verdict == "no cause found, but only 0.8% of the limit"
    (finding,) = found.findings
    assert (finding.cause, finding.share, finding.gain) == ("low-mfu", None, None)
    assert "backward 60.0 %, forward 30.0 %" in finding.evidence[0]
    assert "GPU idle 3.0 %" in finding.evidence[1]
    assert "matmuls in bfloat16" in finding.evidence[1]
    assert "torch.profiler" in finding.fix


@pytest.mark.parametrize(
    ("cause", "change"),
    [
        ("fp32-matmul", {"compute_dtype": "float32", "replays": {"bf16": [0.1, 0.02], "tf32": [0.1, 0.04]}}),
        ("precision-inactive", {"compute_dtype": "float32", "totals": {"scaled": 9}, "replays": {"bf16": [0.1, 0.02]}}),
        ("math-attention", {"replays": {"attention": [0.004, 0.001, 12, [16, 12, 1024, 1024]]}}),
        ("math-attention", {"flags": {"flash_sdp": False}, "replays": {"attention-backends": [0.1, 0.05]}}),
        ("needless-recompute", {"replays": {"recompute": [0.1, 0.07]}}),
        ("launch-bound", {"profile": {"busy_s": 0.04, "waits": {"launch": 0.06}}}),
        ("launch-blocking", {"variables": {"CUDA_LAUNCH_BLOCKING": "1"}, "profile": {"busy_s": 0.05}}),
        (
            "host-sync",
            {
                "profile": {"busy_s": 0.06, "waits": {"sync": 0.05, "launch": 0.001}},
                "syncs": [{"site": "Tensor.item at /x/train.py:12 in <module>", "count": 40, "seconds": 0.05}],
            },
        ),
        ("oom-risk", {"gpu": {"peak_reserved_gib": 138.0}}),
        ("offload", {"optimizers": {"1": {"class": "AdamW", "module": "m", "devices": {"cpu": 148}, "fused": True}}}),
        ("debug-flags", {"variables": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}}),
        ("wrong-dtype", {"compute_dtype": "float64", "replays": {"single": [0.1, 0.01]}}),
    ],
)
def test_a_gpu_cause_comes_first(cause: str, change: dict[str, Any]) -> None:
    found = first(seen(**change))
    assert found.cause == cause
    assert found.evidence
    assert found.fix


def test_host_sync_names_the_line() -> None:
    sync = {"site": "Tensor.item at /x/train.py:12 in <module>", "count": 40, "seconds": 0.05}
    found = first(seen(profile={"busy_s": 0.06, "waits": {"sync": 0.05}}, syncs=[sync]))
    assert "train.py:12" in found.sentence


def test_work_of_the_gpu_between_the_passes_is_no_starvation() -> None:
    """A loss outside the model is time in no phase of its own, and the device is busy all the while."""
    step = {"device": {"forward": 0.03, "backward": 0.05, "optimizer": 0.009, "other": 0.011}}
    assert diagnose(seen(step=step)).findings == ()
    assert first(seen(step=step, profile={"busy_s": 0.085})).cause == "data-starvation"


def test_the_type_of_what_is_compiled_is_not_guessed_inside_a_framework() -> None:
    compiled = {"compute_dtype": None, "model": {"compiled": True}, "totals": {"autocast": 9}}
    assert diagnose(seen(framework="transformers", **compiled)).findings == ()
    assert first(seen(**compiled | {"totals": {}})).cause == "fp32-matmul"
    assert diagnose(seen(**compiled | {"model": {"compiled": True, "dtypes": {"bfloat16": 148}}})).findings == ()


def test_anomaly_mode_explains_the_waits_it_makes() -> None:
    sync = {"site": "Tensor.item at /x/train.py:12 in <module>", "count": 40, "seconds": 0.05}
    waits = {"profile": {"busy_s": 0.03, "waits": {"sync": 0.06}}, "syncs": [sync]}
    found = diagnose(seen(**waits, totals={"anomaly": 10}, replays={"anomaly": [0.1, 0.05], "batch-2": None}))
    assert [finding.cause for finding in found.findings] == ["anomaly-mode"]


def test_what_anomaly_mode_costs_is_not_the_batch() -> None:
    few = {"micro": [{"rows": 4, "length": 256, "tokens": 1024, "real": 1024.0}]}
    replays = {"batch-2": [0.05, 0.03], "batch-4": [0.05, 0.02]}
    alone = first(seen(step=few, replays=replays))
    assert (alone.cause, alone.gain) == ("small-batch", pytest.approx(0.6 * 0.9 + 0.75 * 0.09))
    found = diagnose(seen(step=few, replays=replays | {"anomaly": [0.1, 0.05]}, totals={"anomaly": 10}))
    gains = {finding.cause: finding.gain for finding in found.findings}
    assert gains == {"anomaly-mode": pytest.approx(0.45), "small-batch": pytest.approx(0.6 * 0.9 / 2 + 0.75 * 0.09)}


def test_memory_given_back_costs_the_call_and_the_asking_again() -> None:
    step = {"device": {**STEP["device"], "empty-cache": 0.03}, "counts": {"empty-cache": 1}}
    found = first(seen(step=step, profile={"waits": {"malloc": 0.013, "launch": 0.0, "sync": 0.0}}))
    assert (found.cause, found.gain) == ("empty-cache", pytest.approx((0.03 + 0.013) / 0.13))


def test_an_optimizer_of_many_launches_is_one_cause() -> None:
    slow = {**FACTS["optimizers"]["1"], "fused": False}
    step = {"device": {"forward": 0.03, "backward": 0.04, "optimizer": 0.03, "other": 0.0}}
    waits = {"busy_s": 0.075, "waits": {"launch": 0.025}}
    found = diagnose(seen(step=step, optimizers={"1": slow}, profile=waits, replays={"fused": [0.01, 0.001]}))
    assert [finding.cause for finding in found.findings] == ["slow-optimizer"]


def test_waiting_that_the_gpu_never_notices_is_no_starvation() -> None:
    """The host waits for data while the device still works: only the device's own wait counts."""
    busy = seen(step={"host": {"data": 0.06, "forward": 0.02, "backward": 0.02}})
    assert diagnose(busy).findings == ()
    starved = {"data": 0.05, "forward": 0.02, "backward": 0.03}
    assert first(seen(step={"device": starved}, profile={"busy_s": 0.05})).cause == "data-starvation"


def a_rank(data_s: float, forward_s: float = 0.03, tokens: int = 16384) -> list[dict[str, Any]]:
    """Steps as long as every rank's: who is early waits in the sum of gradients."""
    phases = {"data": data_s, "forward": forward_s, "backward": 0.099 - data_s - forward_s, "optimizer": 0.001}
    micro = [{"rows": 16, "length": 1024, "tokens": tokens, "real": float(tokens)}]
    return [{**copy.deepcopy(STEP), "step": i, "device": phases, "micro": micro} for i in range(10)]


def among(ranks: dict[int, list[dict[str, Any]]], rank: int = 0) -> Observed:
    return replace(seen(world=len(ranks)), steps=ranks[rank], ranks=ranks, straggler=straggler(ranks))


def test_the_rank_that_others_wait_for_is_found() -> None:
    found = straggler({0: a_rank(0.0), 1: a_rank(0.002), 2: a_rank(0.05), 3: a_rank(0.001)})
    assert found is not None
    assert found.rank == 2
    assert straggler({0: a_rank(0.05), 1: a_rank(0.05)}) is None
    assert straggler({0: a_rank(0.05)}) is None


def test_ranks_that_do_not_wait_have_no_straggler() -> None:
    """No sums of gradients: the slower one only ends later."""
    slow = [{**step, "device": {**step["device"], "backward": 0.069, "data": 0.05}} for step in a_rank(0.0)]
    assert straggler({0: a_rank(0.0), 1: slow}) is None


def test_uneven_tokens_are_named_with_their_rank() -> None:
    ranks = {0: a_rank(0.0, tokens=8192), 1: a_rank(0.0, tokens=16384)}
    found = first(among(ranks))
    assert found.cause == "data-starvation"
    assert found.gain == pytest.approx(0.25 * 0.99 * 0.99, abs=0.01)
    assert "rank 1 has the most in 10 of 10 steps" in found.evidence[0]
    assert diagnose(among(ranks)).limit["tokens_per_s"] == pytest.approx((8192 + 16384) / 0.1)


def test_a_slower_gpu_is_named_with_its_rank() -> None:
    found = first(among({0: a_rank(0.0), 1: a_rank(0.0, forward_s=0.045), 2: a_rank(0.0)}))
    assert found.cause == "throttled"
    assert "rank 1 takes 1.5 times as long" in found.sentence
    assert diagnose(among({0: a_rank(0.0), 1: a_rank(0.0)})).findings == ()


def test_recomputation_that_is_needed_is_no_finding() -> None:
    assert diagnose(seen(replays={"recompute": "out of memory"})).findings == ()


def test_trainer_arguments_are_those_of_the_installed_version() -> None:
    change = {"compute_dtype": "float32", "replays": {"bf16": [0.1, 0.02]}, "framework": "trainer"}
    known = first(seen(**change, trainer_arguments=["bf16", "tf32"])).fix
    assert known.startswith("TrainingArguments(bf16=True)")
    assert "TrainingArguments" not in first(seen(**change, trainer_arguments=["half_precision"])).fix


TWO_CAUSES = {"compute_dtype": "float32", "replays": {"bf16": [0.1, 0.02], "recompute": [0.1, 0.07]}}


def test_a_measured_gain_replaces_the_estimate_and_may_change_the_order() -> None:
    found = diagnose(seen(**TWO_CAUSES))
    assert [f.cause for f in found.findings] == ["fp32-matmul", "needless-recompute"]
    proofs = [
        Proof(cause="fp32-matmul", gains=(0.11, 0.12, 0.13), loss_difference=0.01),
        Proof(cause="needless-recompute", gains=(0.3, 0.31, 0.32), loss_difference=0.0),
    ]
    proved = measured(found, proofs)
    assert [(f.cause, f.status) for f in proved.findings] == [
        ("needless-recompute", "measured"),
        ("fp32-matmul", "measured"),
    ]
    assert proved.findings[0].gain == pytest.approx(0.31, abs=1e-3)


def test_the_headline_is_what_was_measured() -> None:
    found = diagnose(seen(**TWO_CAUSES))
    assert "fp32-matmul, about 72% of step time" in found.verdict
    one = Proof(cause="needless-recompute", gains=(0.29, 0.295, 0.3), loss_difference=0.0)
    assert "needless-recompute, 29.5% of step time (measured)" in measured(found, [one]).verdict
    both = [one, Proof(cause="fp32-matmul", gains=(0.297,) * 3, loss_difference=0.0)]
    both.append(Proof(cause=ALL_TOGETHER, gains=(0.41,) * 3, loss_difference=0.0))
    said = measured(found, both).verdict
    assert "the largest is fp32-matmul, 29.7% of step time (measured)" in said
    assert said.endswith("; all fixes that are switches save 41.0% together (measured)")
    assert measured(found, []).verdict == found.verdict


def test_the_proof_table_breaks_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    proofs = [
        Proof(cause="needless-recompute", gains=(0.297, 0.31, 0.3, 0.305), loss_difference=1.25e-05),
        Proof(cause="low-occupancy-here", gains=(0.297, 0.31), loss_difference=1.25e-05),
        Proof(cause="data-starvation", gains=(), loss_difference=None, problem="RuntimeError: " + "x" * 150),
    ]
    fixes = {"needless-recompute": "TrainingArguments(gradient_checkpointing=False)"}
    doctor.print_proofs(proofs, console=Console(width=80), fixes=fixes)
    said = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in said]
    assert ["needless-recompute", "30.3", "%", "29.4", "%", "to", "31.2", "%", "faster", "1.25e-05"] in rows
    assert ["low-occupancy-here", "30.4", "%", "none", "too", "few", "repeats", "1.25e-05"] in rows
    assert "make it permanent, needless-recompute: TrainingArguments(gradient_checkpointing=False)" in said
    assert "data-starvation failed: RuntimeError: " + "x" * 150 in said


@pytest.mark.parametrize(
    ("how", "then", "told"),
    [
        ({"crash": "ValueError: no"}, "stop", "the script failed first"),
        ({}, "continue", "--then continue replays nothing"),
        ({"timed_out_s": 5.0}, "stop", "time was up first"),
    ],
)
def test_only_what_applies_is_said_of_missing_replays(how: dict[str, Any], then: str, told: str) -> None:
    facts = {**copy.deepcopy(FACTS), "gpu": None, "replays": None}
    steps = [{**copy.deepcopy(STEP), "device": None, "stage": "timed", "step": i} for i in range(10)]
    known = {"returncode": 1, "stopped": False, "samples": (), "crash": None, **how}
    found = doctor.observed(Watched(facts=facts, steps=steps, **known), hardware=named("H200"), then=then)
    assert found is not None
    source = diagnose(found).limit["source"]
    assert told in source
    assert ("--then continue" in source) == (then == "continue")


def test_a_guess_at_a_rate_far_too_low_is_slow_convergence() -> None:
    found = first(seen(step={"loss": 10.83, "lr": 3e-9}))
    assert found.cause == "slow-convergence"
    assert "uniform guess over 50304 ids" in found.sentence
    assert "learning rate 3e-09 with AdamW" in found.evidence[1]


@pytest.mark.parametrize("step", [{"loss": 10.83, "lr": 3e-4}, {"loss": 3.0, "lr": 3e-9}, {"loss": 10.83, "lr": None}])
def test_an_early_loss_or_a_trained_model_is_no_slow_convergence(step: dict[str, Any]) -> None:
    assert diagnose(seen(step=step)).findings == ()


def test_a_warm_up_is_no_slow_convergence() -> None:
    watched = seen()
    rising = [{**step, "loss": 10.83, "lr": 1e-9 * (i + 1)} for i, step in enumerate(watched.steps)]
    assert diagnose(replace(watched, steps=rising)).findings == ()


def test_every_cause_a_rule_can_name_is_a_known_one() -> None:
    import re
    from pathlib import Path

    import flatout.insight.diagnose as package

    insight = Path(package.__file__).parents[1]
    text = "".join(path.read_text() for part in ("diagnose", "logs") for path in (insight / part).glob("*.py"))
    named_in_code = set(re.findall(r'finding_of\(\s*"([a-z0-9-]+)"', text))
    assert named_in_code <= set(CAUSES)
    assert set(CAUSES) - named_in_code == set(), "a cause nobody can find"


def test_only_what_is_a_switch_is_proved() -> None:
    found = seen(compute_dtype="float32", replays={"bf16": [0.1, 0.02]})
    change = change_for(first(found), found)
    assert change is not None
    assert change.switch == {"autocast": True}
    written_out = seen(replays={"attention": [0.004, 0.001, 12, [16, 12, 1024, 1024]]})
    assert change_for(first(written_out), written_out) is None


def test_a_second_model_and_a_loss_outside_the_module_are_no_wait_for_data() -> None:
    host = {"forward": 0.03, "reference": 0.02, "loss": 0.02, "backward": 0.03}
    samples = [["reference", "data", "/x/train.py:9 in pad", 40], ["loss", "", "/x/train.py:12 in dpo", 40]]
    found = seen(step={"device": {}, "host": host}, samples=samples, gpu=None, replays={})
    assert "data-starvation" not in [finding.cause for finding in diagnose(found).findings]
    assert found.activities["reference"] == pytest.approx(0.2)


def test_generation_that_dominates_is_a_finding_in_the_words_of_the_framework() -> None:
    step = {"device": {"generate": 0.06, "reference": 0.01, "forward": 0.01, "backward": 0.02}}
    found = seen(step=step, framework="trl", replays={})
    (told,) = [finding for finding in diagnose(found).findings if finding.cause == "generation-bound"]
    assert told.share == pytest.approx(0.6)
    assert "use_vllm=True" in told.fix
    assert "10% in log-probabilities" in told.evidence[0]


def test_anomaly_mode_that_was_not_measured_ranks_by_its_typical_cost() -> None:
    found = first(seen(totals={"anomaly": 10}, replays={}))
    assert (found.cause, found.gain) == ("anomaly-mode", pytest.approx(0.45))
    assert "not measured here" in found.evidence[1]


def test_an_optimizer_is_not_slow_by_a_replay_that_does_not_agree_with_itself() -> None:
    slow = {**FACTS["optimizers"]["1"], "fused": False}
    step = {"device": {"forward": 0.03, "backward": 0.04, "optimizer": 0.03}}
    noisy, clear = [0.01, 0.007, [-0.5, 0.4, -0.3, 0.2]], [0.01, 0.007, [-0.36, -0.35, -0.34, -0.36]]
    assert diagnose(seen(step=step, optimizers={"1": slow}, replays={"fused": noisy})).findings == ()
    assert first(seen(step=step, optimizers={"1": slow}, replays={"fused": clear})).cause == "slow-optimizer"


def test_bfloat16_that_is_slow_on_a_cpu_is_named() -> None:
    replays = {"float32_product": [0.1, 0.02, [-1.6, -1.61, -1.6, -1.59]]}
    found = first(seen(gpu=None, replays=replays))
    assert (found.cause, "float32 on this machine" in found.fix) == ("wrong-dtype", True)


def test_a_generation_loop_in_train_mode_is_told_apart_from_a_reference() -> None:
    grows = [["reference", 8, length, 10] for length in range(48, 64)]
    reference = [["reference", 16, 32, 10]]
    samples = [["reference", "", "train.py:1 in <module>", 90]]
    step = {"host": {"reference": 0.08, "forward": 0.01, "backward": 0.01}}
    found = first(seen(step=step | {"device": None}, forwards=[*grows, *reference], samples=samples))
    assert found.cause == "no-kv-cache"
    own = sum(range(48, 64))
    assert found.share == pytest.approx(0.8 * own / (own + 64), rel=0.05)


def test_a_busy_thread_is_named_with_its_line() -> None:
    thread = {"name": "counter", "share": 0.6, "kind": "", "site": "train.py:7 in count"}
    found = first(seen(other_threads=[thread]))
    assert (found.cause, found.share) == ("busy-thread", 0.6)
    assert "train.py:7" in found.sentence
    assert first(seen(other_threads=[thread | {"kind": "log"}])).cause == "logging"
    assert diagnose(seen(other_threads=[thread | {"share": 0.1}])).findings == ()


def test_turns_of_a_replay_that_disagree_are_no_small_batch() -> None:
    agreed, mixed = [-0.5, -0.6, -0.5], [-0.9, 0.2, -0.5]
    step = {
        "device": {"forward": 0.04, "backward": 0.06},
        "micro": [{"rows": 1, "length": 64, "tokens": 64, "real": 64.0}],
    }
    for logs, causes in ((agreed, ["small-batch"]), (mixed, [])):
        found = diagnose(seen(step=step, replays={"batch-2": [0.1, 0.06, logs], "batch-4": [0.1, 0.05, logs]}))
        assert [one.cause for one in found.findings if one.cause == "small-batch"] == causes
