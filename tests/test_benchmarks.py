"""What of the doctor's GPU benchmarks can be held to without a GPU: the jobs run, and the judging is right."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ablations import JOBS, rows_of
from benchmarks.doctor_gpu import PLANTED, Budget, findings_table, judged, parsed, table
from benchmarks.parity import compared
from benchmarks.peers import measured as peer
from benchmarks.results import Call, command_line, measuring, read, upper_95
from tests.waiting import HANG_S

from flatout.config import load
from flatout.insight.attach import Watched
from flatout.insight.diagnose import CAUSES
from flatout.insight.doctor import Examined
from flatout.insight.prove import Proof
from flatout.record import Diagnosis, Finding, Run


def finding(cause: str, gain: float | None) -> Finding:
    return Finding(
        cause=cause, sentence="It is.", share=gain, gain=gain, status="estimated", evidence=("a | b",), fix="do it"
    )


def looked(folder: Path, *findings: Finding) -> Examined:
    run = Run.create(folder, config_text="a: 1\n", config={}, plan={"foreign": True}, hardware={}, environment={})
    watched = Watched(returncode=0, stopped=True, facts=None, steps=[], samples=[], crash=None)
    return Examined(
        run=run, watched=watched, seen=None, diagnosis=Diagnosis(verdict="so it is", limit={}, findings=findings)
    )


@pytest.mark.long
def test_every_job_runs_on_a_cpu() -> None:
    """In one process, all but the one whose compiler takes longer to start than the others to run."""
    code = (
        "import math; from benchmarks.doctor_gpu import PLANTED; from benchmarks.doctor_job import train\n"
        "for cause in PLANTED:\n"
        "    if cause != 'recompiles': print(cause, math.isfinite(train(cause, steps=2, device='cpu')))"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{cause} True" for cause in PLANTED if cause != "recompiles"]


def test_what_is_planted_is_a_cause_the_doctor_can_name() -> None:
    assert {cause for cause in PLANTED.values() if cause is not None} <= set(CAUSES)
    assert len(PLANTED) > 10


def test_an_estimate_is_held_to_what_was_measured(tmp_path: Path) -> None:
    found = looked(tmp_path, finding("fp32-matmul", 0.5), finding("padding", 0.2))
    proof = Proof(cause="fp32-matmul", gains=(0.6, 0.64), loss_difference=0.01)
    row = judged("fp32-matmul", found, proofs=[proof], look_s=1.0)
    assert (row["first"], row["estimated"], row["within_a_quarter"]) == (True, 0.5, True)
    assert row["measured"] == pytest.approx(0.62, abs=1e-3)
    far = judged(
        "fp32-matmul", found, proofs=[Proof(cause="fp32-matmul", gains=(0.9,), loss_difference=None)], look_s=1
    )
    assert far["within_a_quarter"] is False
    assert judged("padding", found, proofs=[], look_s=1.0)["first"] is False
    assert "named first: 1 of 1; estimated within a quarter of the measured: 1 of 1" in table([row])
    assert "a \\| b" in findings_table(found)


def test_a_healthy_job_and_a_failed_one(tmp_path: Path) -> None:
    assert judged("healthy", looked(tmp_path / "a"), proofs=[], look_s=1.0)["first"] is True
    assert judged("healthy", looked(tmp_path / "b", finding("padding", 0.2)), proofs=[], look_s=1.0)["first"] is False
    failed = judged("healthy", None, proofs=[], look_s=None, error="no device\nat all")
    assert failed["first"] is False
    assert "no: no device |" in table([failed])


def test_a_budget_allows_what_fits() -> None:
    assert Budget(None).allows(1e9)
    assert Budget(100.0).allows(50.0)
    assert not Budget(100.0).allows(200.0)


@pytest.mark.parametrize("wrong", [["--causes", "gremlins"], ["--script", "trainer"]])
def test_wrong_usage_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(wrong)
    assert wrong[1] in capsys.readouterr().err


def test_the_bound_of_an_overhead() -> None:
    assert upper_95([0.01, 0.03, 0.02, 0.02]) == pytest.approx(0.02 + 2.353 * 0.0081650 / 2, abs=1e-5)
    assert upper_95([0.0]) is None


def test_a_recorded_command_names_files_but_not_where_they_lie(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    given = ["benchmarks/toy.py", "--rows", str(tmp_path / "rows.jsonl"), "--model", "some/hub-name", "--to", "here"]
    assert command_line(given) == "python -m benchmarks.toy --rows rows.jsonl --model some/hub-name"


def test_what_was_measured_is_kept_when_a_benchmark_is_cut_short(tmp_path: Path) -> None:
    def cut_short() -> None:
        with measuring("toy", commit="abc", units={"tokens_per_s": "tokens/s"}, to=tmp_path / "toy.jsonl") as measured:
            measured["one"] += [{"tokens_per_s": 3.0, "beside": 1.0}, {"tokens_per_s": 5.0}]
            _ = measured["other"]  # begun, and nothing came of it
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    with pytest.raises(SystemExit):
        cut_short()
    (result,) = read(tmp_path / "toy.jsonl")
    assert (result.variant, result.value, result.low, result.repeats) == ("one", 4.0, 3.0, 2)


def test_losses_are_compared_as_far_as_both_have_ended(capsys: pytest.CaptureFixture[str]) -> None:
    losses = {"plain": [4.0, 5.0], "kernels": [4.04], "kernels-fp8": []}
    rows = compared(Call(benchmark="parity", commit="abc"), losses)
    assert [(row.variant, row.metric, row.repeats) for row in rows] == [
        ("plain", "val_loss", 2),
        ("kernels", "val_loss", 1),
        ("kernels", "against_plain", 1),
    ]
    assert rows[-1].value == pytest.approx(0.01)
    assert capsys.readouterr().out == "kernels: +1.000% of plain (+1.000% to +1.000%)\n"


def test_a_rivals_figure_is_found_among_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "rival.py"
    script.write_text(
        "import json, sys\nprint({'train_runtime': '9.1'})\nprint('{not at all')\nprint(7)\n"
        "if sys.argv[1] == 'one': print(json.dumps({'samples_s': 3}))\n"
    )
    assert peer(script, "one", figure="samples_s", seconds=HANG_S) == {"samples_s": 3}
    assert peer(script, "other", figure="samples_s", seconds=HANG_S) is None
    assert "train_runtime" in capsys.readouterr().out


@pytest.mark.parametrize("what", [["fsdp"], ["fsdp", "--shape", "8b"], ["saves"]], ids=" ".join)
@pytest.mark.long
def test_what_sharding_and_saving_cost_runs_on_a_cpu(what: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.scale", *what, "--tiny", "--to", str(tmp_path / "rows.jsonl")]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "%" in done.stdout
    assert not (tmp_path / "rows.jsonl").exists(), "figures of a CPU are not kept"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"sharding": "full"}, marks=pytest.mark.long),
        pytest.param({"sharding": "full", "accumulation": 2}, marks=pytest.mark.long),
        pytest.param({"sharding": "full", "rank": 32, "accumulation": 2}, marks=pytest.mark.long),
        pytest.param({"sharding": "none", "rank": 32, "recompute": "none"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_memory_of_one_of_eight_ranks_is_as_planned(changes: dict[str, Any]) -> None:
    """A few layers of the model of examples/rl-guru-pcgrad.yaml, in a process of its own for its process group."""
    code = (
        "from dataclasses import replace; from benchmarks.dry_run import SEVEN, Dry, dry_run, planned\n"
        f"case = Dry(shape=replace(SEVEN, layers=3), world=8, micro_batch=2, **{changes!r})\n"
        "print(dry_run(case)[0], planned(case).predicted.peak_gib)"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    held, predicted = map(float, done.stdout.split())
    assert predicted == pytest.approx(held, rel=0.1)


@pytest.mark.long
def test_acceleration_is_measured_on_a_tiny_shape(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    root, to = Path(__file__).parents[1], tmp_path / "found.jsonl"
    options = ["--shape", "tiny", "--steps", "2", "--warm", "1", "--batch", "2", "--length", "16", "--repeats", "1"]
    command = [sys.executable, "-m", "benchmarks.accelerated", *options, "--weights", "fp32", "--to", str(to)]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, env=environment)
    found = {(row.variant, row.metric): row.value for row in read(to)}
    assert {variant for variant, _ in found} >= {"transformers", "flatout"}
    assert all(value > 0 for (_, metric), value in found.items() if metric == "tokens_per_s")
    lines = [line for line in done.stdout.splitlines() if "'loss'" in line]
    losses = [float(line.split("'loss': ")[1].split("}")[0]) for line in lines]
    assert max(losses) - min(losses) < 1e-2, "the variants compute the same"
    assert "head and loss" in done.stdout


def test_the_rows_of_an_ablation() -> None:
    known = {"tokens_per_s": 10.0, "peak_gib": None, "start_s": 2.0, "problem": None, "blocks": 4}
    time, loss = {"ratio": 2.0, "low": 1.6, "high": 2.5}, {"ratio": 1.001, "low": 0.999, "high": 1.003}
    few = {"ratio": 1.0, "low": 0.0, "high": None}  # too few pairs for an interval
    found = {
        "rows": [
            known | {"name": "- this", "time": time, "loss_difference": loss},
            known | {"name": "- that", "time": few, "loss_difference": None, "blocks": 1},
            known | {"name": "- other", "problem": "out of memory", "time": None, "loss_difference": None},
        ]
    }
    rows = {(row.variant, row.metric): row for row in rows_of("rl", found, Call(benchmark="ablations", commit="abc"))}
    speed = rows["rl: - this", "times_as_fast"]
    assert (speed.value, speed.low, speed.high, speed.repeats) == (0.5, 0.4, 0.625, 4)
    assert rows["rl: - this", "loss_ratio"].value == 1.001
    assert ("rl: - that", "times_as_fast") not in rows
    assert not [variant for variant, _ in rows if "other" in variant]


@pytest.mark.parametrize("job", JOBS)
def test_the_jobs_of_the_ablations_are_valid(job: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOBS[job])
    assert load(tmp_path / "job.yaml").settings.recipe in ("pretrain", "sft", "rft", "rl")
