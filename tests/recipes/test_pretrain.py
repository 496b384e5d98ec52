"""Pretraining end to end: exact resume after real kills, ranks, signals, evaluation, criteria, export."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes_processes import events, held_at, trajectory, wait_for_step, weights_hash
from tests.waiting import HANG_S
from tests.warm import Started

from flatout.record import Run

Call = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., Started]


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([], {"precision": ("fp32", "fp32"), "attention": ("flash", "flash"), "fused_optimizer": ("yes", "yes")}),
        (
            ["plan.precision=bf16", "plan.attention=math", "plan.fused_optimizer=false", "profile.steps=[0, 2]"],
            {"precision": ("bf16", "bf16"), "attention": ("math", "math"), "fused_optimizer": ("no", "no")},
        ),
    ],
    ids=["the first steps", "the traced steps"],
)
def test_what_ran_is_read_from_the_operators_and_shown_beside_the_plan(
    flatout: Call, config: Path, tmp_path: Path, overrides: list[str], wanted: dict[str, tuple[str, str]]
) -> None:
    run = tmp_path / "run"
    done = flatout("train", config, "train.steps=4", "eval.every=null", *overrides, "--run", run)
    assert done.returncode == 0, done.stderr
    assert "What ran" in done.stdout
    assert "USDT" not in done.stderr, "torch's profiler says nothing of itself"
    (ran,) = events(run, "ran")
    paths: Any = ran
    assert {name: (paths[name]["planned"], paths[name]["ran"]) for name in wanted} == wanted
    assert paths["compile"]["ran"] == "none"
    assert re.match(rf"{wanted['precision'][1]} in \d+\b.* of \d+ matrix products", paths["precision"]["seen"])
    report = flatout("report", run, "--format", "md").stdout
    assert "| what ran |" in report
    assert "not as planned" not in report


def test_a_run_learns_and_leaves_everything_behind(flatout: Call, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = flatout(
        "train", config, "train.steps=40", "log.tensorboard=true", "profile.steps=[3, 4]", "eval.every=10",
        "criteria.loss_falling=true", "criteria.validation_improving=true", "criteria.tokens_per_s=1e12",
        "criteria.saves=1", "--strict", "--run", run,
    )  # fmt: skip
    assert done.returncode == 4, done.stderr  # only because of --strict
    assert "the run is complete, but missed its criteria: tokens_per_s" in done.stderr
    losses = [loss for _, loss, _, _ in trajectory(run)]
    assert len(losses) == 40
    evals = [float(str(e["val_loss"])) for e in events(run, "eval")]
    assert len(evals) == 5
    assert evals[-1] < evals[0] - 1.0
    verdicts = {v["criterion"]: v["met"] for v in events(run, "end")[0]["verdicts"]}  # type: ignore[attr-defined]
    assert verdicts == {"loss_falling": True, "validation_improving": True, "tokens_per_s": False, "saves": True}
    assert "not met" in done.stdout
    assert (run / "profile" / "trace.json.gz").stat().st_size > 1000
    assert "aten::" in (run / "profile" / "kernels.txt").read_text()
    assert list((run / "trackers" / "tensorboard").rglob("events.out.tfevents.*"))
    assert json.loads((run / "plan.json").read_text())["decisions"]["precision"] == "fp32"
    record = next(Run.open(run).steps())
    assert {s.phase for s in record.spans} >= {"data", "forward", "backward", "reduce", "optimize", "record"}
    assert record.memory["peak_gib"] > 0

    again = flatout("train", config, "--run", run)
    assert again.returncode == 2
    assert "--resume" in again.stderr

    export = flatout("export", run, "--to", tmp_path / "hf", "--dtype", "fp32")
    assert export.returncode == 0, export.stderr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = torch.tensor([tokenizer("One morning").input_ids])
    from flatout.engine.trained import open_trained
    from flatout.model import Rectangular

    trained = open_trained(Run.open(run))
    with torch.no_grad():
        ours = trained.model(ids[0], torch.arange(ids.shape[1]), Rectangular(batch=1), lambda h, w: h @ w.t())
        assert (theirs(ids).logits[0] - ours).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.faults)])
def test_killed_and_resumed_equals_undisturbed_to_the_bit(
    precision: str, flatout: Call, start: Start, config: Path, tmp_path: Path
) -> None:
    settings = [
        f"plan.precision={precision}", "plan.micro_batch=2", "plan.workers=2", "train.steps=24", "save.every=4",
        "data.packing=documents", "train.deterministic=true",
        # Small: a CPU without bf16 units computes in it a hundred times slower.
        "model.layers=1", "model.hidden=16", "data.sequence_length=32", "train.batch_tokens=256", "eval.tokens=256",
    ]  # fmt: skip
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = flatout("train", config, *settings, "--run", whole)
    assert done.returncode == 0, done.stderr
    plan = json.loads((whole / "plan.json").read_text())["decisions"]
    assert (plan["accumulation"], plan["workers"]) == (4, 2)

    rng = random.Random(precision)
    resume: list[str] = []
    for low, high in ((2, 8), (9, 15), (16, 20)):  # the record is two steps behind
        process = start("train", config, *settings, "--run", broken, *resume, script=held_at(23))
        wait_for_step(broken, rng.randint(low, high), process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        resume = ["--resume"]
    done = flatout("train", config, *settings, "--run", broken, "--resume")
    assert done.returncode == 0, done.stderr
    assert len({r.attempt for r in Run.open(broken).steps()}) == 4
    assert trajectory(broken) == trajectory(whole)
    assert weights_hash(broken) == weights_hash(whole)
    assert [e["val_loss"] for e in events(broken, "eval")][-1] == events(whole, "eval")[-1]["val_loss"]


@pytest.mark.slow
def test_two_ranks_equal_one(flatout: Call, config: Path, tmp_path: Path) -> None:
    settings = ["data.packing=documents", "save.every=6"]
    assert flatout("train", config, *settings, "--run", tmp_path / "one").returncode == 0
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
        # torchrun reads `--run` as one of its own options, hence the setting.
        "-m", "flatout", "train", str(config), *settings, f"run={tmp_path / 'two'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    one, two = trajectory(tmp_path / "one"), trajectory(tmp_path / "two")
    assert len(one) == len(two) == 12
    for (_, loss, norm, _), (_, other_loss, other_norm, _) in zip(one, two, strict=True):
        assert other_loss == pytest.approx(loss, abs=1e-5)
        assert other_norm == pytest.approx(norm, rel=1e-4)
    assert Run.open(tmp_path / "two").ranks() == [0, 1]
    ones, twos = events(tmp_path / "one", "eval"), events(tmp_path / "two", "eval")
    assert [e["val_loss"] for e in ones] == pytest.approx([e["val_loss"] for e in twos], abs=1e-5)
    assert done.stdout.count("Run folder") == 1, "only the first rank speaks"


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 75),
        (signal.SIGINT, 130),
        pytest.param(signal.SIGUSR1, 75, marks=pytest.mark.faults),
        pytest.param(signal.SIGHUP, 75, marks=pytest.mark.faults),
    ],
)
def test_a_signal_saves_and_says_how_to_go_on(
    number: signal.Signals, code: int, flatout: Call, start: Start, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start("train", config, "train.steps=100000", "--run", run)
    wait_for_step(run, 3, process)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == code, errors
    stopped = max(r.step for r in Run.open(run).steps())
    assert [int(p.name[5:]) for p in (run / "checkpoints").glob("step-*")] == [stopped + 1]
    command = next(line.split() for line in errors.splitlines() if line.strip().startswith("flatout train"))
    resumed = flatout(*command[1:2], command[2], f"train.steps={stopped + 4}", *command[3:])
    assert resumed.returncode == 0, resumed.stderr
    assert [r.step for r in Run.open(run).latest_steps()] == list(range(stopped + 4))


def test_a_corrupt_checkpoint_is_named_and_the_older_one_taken(flatout: Call, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert flatout("train", config, "save.every=6", "--run", run).returncode == 0
    victim = run / "checkpoints" / "step-00000012" / "optimizer-rank00000.safetensors"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    done = flatout("train", config, "train.steps=14", "--run", run, "--resume")
    assert done.returncode == 0, done.stderr
    assert "optimizer-rank00000.safetensors does not match its SHA-256" in done.stdout
    assert events(run, "resume")[0]["step"] == 6


def test_target_stops_the_run_and_patience_too(flatout: Call, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "target"
    done = flatout("train", config, "train.steps=200", "target.val_loss=4.5", "eval.every=2", "--run", run)
    assert done.returncode == 0, done.stderr
    reached = events(run, "target")[0]
    assert float(str(reached["val_loss"])) <= 4.5
    assert int(str(reached["tokens"])) == int(str(reached["step"])) * 512
    assert "target reached" in done.stdout
    assert len(trajectory(run)) == reached["step"] < 200  # type: ignore[operator]

    run = tmp_path / "patience"
    done = flatout(
        "train", config, "train.steps=40", "train.lr=1e-9", "eval.every=2", "eval.patience=2", "eval.min_delta=0.1",
        "--run", run,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert events(run, "end")[0]["outcome"]["stopped_by"] == "patience"  # type: ignore[index]
    assert len(trajectory(run)) == 4


def test_a_save_that_fails_is_never_called_a_save(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flatout.config import load
    from flatout.engine.checkpoint import Checkpoints
    from flatout.errors import RunFailed
    from flatout.recipes import pretrain

    def full(*_args: object, **_kwargs: object) -> Path:
        raise OSError("No space left on device")

    monkeypatch.setattr(Checkpoints, "commit", full)
    settings = load(config, overrides=["save.every=6"]).settings
    with pytest.raises(RunFailed, match="could not be saved"):
        pretrain.run(settings, folder=tmp_path / "run")
    run = Run.open(tmp_path / "run")
    assert len(list(run.steps())) == 12, "training went on"
    kinds = [event.kind for event in run.events()]
    assert (kinds.count("save-failed"), kinds.count("save")) == (3, 0), "twice on its cadence, once more at the end"


def test_a_trace_that_the_run_cuts_short_is_written_all_the_same(flatout: Call, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = flatout(
        "train", config, "train.steps=null", "train.tokens=3000", "profile.steps=[2, 100]", "--run", run
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "aten::" in (run / "profile" / "kernels.txt").read_text()


def test_a_run_is_judged_as_a_whole_after_a_resume(flatout: Call, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert flatout("train", config, "train.steps=19", "--run", run).returncode == 0
    done = flatout("train", config, "train.steps=20", "criteria.loss_falling=true", "--run", run, "--resume")
    assert done.returncode == 0, done.stderr
    assert "not met" not in done.stdout
    assert events(run, "end")[-1]["verdicts"][0]["met"] is True  # type: ignore[index]


def test_the_validation_set_is_the_same_whatever_the_plan(flatout: Call, config: Path, tmp_path: Path) -> None:
    losses = []
    for size in (1, 8):
        run = tmp_path / str(size)
        done = flatout("train", config, f"plan.micro_batch={size}", "eval.tokens=5000", "train.steps=3", "--run", run)
        assert done.returncode == 0, done.stderr
        losses.append(float(str(events(run, "eval")[0]["val_loss"])))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_resumed_run_keeps_its_plan_and_says_what_is_pinned_anew(flatout: Call, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert flatout("train", config, "plan.micro_batch=2", "--run", run).returncode == 0
    done = flatout("train", config, "train.steps=14", "plan.precision=bf16", "--run", run, "--resume")
    assert done.returncode == 0, done.stderr
    assert "started with plan.precision fp32 and continues with bf16" in done.stdout
    planned = [dict(event.data) for event in Run.open(run).events() if event.kind == "plan"]
    assert [plan["decisions"]["micro_batch"] for plan in planned] == [2, 2]


def test_a_reached_target_stays_reached(flatout: Call, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["train.steps=60", "target.val_loss=5.5", "eval.every=2"]
    assert flatout("train", config, *settings, "--run", run).returncode == 0
    steps = len(trajectory(run))
    assert flatout("train", config, *settings, "--run", run, "--resume").returncode == 0
    assert len(trajectory(run)) == steps < 60
    assert len(events(run, "target")) == 1


def test_weights_only_is_smaller_and_cannot_be_resumed(flatout: Call, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert flatout("train", config, "save.weights_only=true", "--run", run).returncode == 0
    assert not list((run / "checkpoints").rglob("optimizer*"))
    done = flatout("train", config, "train.steps=20", "--run", run, "--resume")
    assert done.returncode == 2
    assert "weights only" in done.stderr


def test_another_shape_does_not_resume(flatout: Call, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert flatout("train", config, "--run", run).returncode == 0
    done = flatout("train", config, "model.layers=3", "train.steps=20", "--run", run, "--resume")
    assert done.returncode == 4
    assert "another run" in done.stderr


def test_too_high_a_rate_ends_with_the_cause(flatout: Call, config: Path, tmp_path: Path) -> None:
    done = flatout("train", config, "train.lr=1e30", "train.clip=null", "train.steps=40", "--run", tmp_path / "run")
    assert done.returncode == 4
    assert "updates in a row were skipped" in done.stderr
    assert "Traceback" not in done.stderr


def test_length_in_tokens_and_epochs(flatout: Call, config: Path, tmp_path: Path) -> None:
    assert flatout("train", config, "train.steps=null", "train.tokens=4000", "--run", tmp_path / "a").returncode == 0
    assert len(trajectory(tmp_path / "a")) == 8
    done = flatout("train", config, "train.steps=null", "train.epochs=0.02", "--run", tmp_path / "b")
    assert done.returncode == 0, done.stderr
    data = events(tmp_path / "b", "data")[0]
    windows = (int(str(data["train_tokens"])) - 1) // 64
    assert len(trajectory(tmp_path / "b")) == -(-windows * 2 // (100 * 8))


def test_starting_from_a_hugging_face_folder(flatout: Call, config: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=320,
            max_position_embeddings=64, num_key_value_heads=1,
        )
    ).save_pretrained(tmp_path / "llama")  # fmt: skip
    done = flatout("train", config, "model=llama", "--run", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["job"]["shape"]["kv_heads"] == 1


def test_a_reader_that_goes_away_does_not_stop_the_run(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "flatout", "train", str(config), "log.every=1", "--run", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=HANG_S) == 0, process.stderr.read() if process.stderr else ""
    assert len(trajectory(run)) == 12


def test_the_folder_keeps_what_the_run_goes_on_with(flatout: Call, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert flatout("train", config, "--run", run).returncode == 0
    assert flatout("train", config, "train.steps=15", "--run", run, "--resume").returncode == 0
    done = flatout("train", run / "config.yaml", "--run", run, "--resume")
    assert done.returncode == 0, done.stderr
    assert len(trajectory(run)) == 15


def test_a_resumed_run_says_what_changed_and_keeps_its_reasons(flatout: Call, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert flatout("train", config, "--run", run).returncode == 0
    before = Run.open(run).plan["reasons"]
    done = flatout("train", config, "train.steps=14", "train.lr=0.002", "--run", run, "--resume")
    assert done.returncode == 0, done.stderr
    told = [event["text"] for event in events(run, "notice")]
    (changed,) = [text for text in told if "other settings than the one before" in text]
    assert "train.lr " in changed
    assert "-> 0.002" in changed
    assert "train.steps 12 -> 14" in changed
    reasons = events(run, "plan")[-1]["reasons"]
    assert reasons == before, "no reason becomes a pin that nobody made"


@pytest.mark.parametrize("setting", ["train.batch_tokens=1024", "seed=7"])
def test_settings_that_change_the_batches_do_not_resume(
    flatout: Call, config: Path, tmp_path: Path, setting: str
) -> None:
    run = tmp_path / "run"
    assert flatout("train", config, "--run", run).returncode == 0
    done = flatout("train", config, "train.steps=14", setting, "--run", run, "--resume")
    assert done.returncode == 2
    assert f"cannot continue with {setting.partition('=')[0]} " in done.stderr
    assert "plan." not in done.stderr


def test_the_checkpoint_of_a_step_is_exported(flatout: Call, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert flatout("train", config, "save.every=4", "save.keep=3", "--run", run).returncode == 0
    done = flatout("export", run, "--to", tmp_path / "out", "--step", "8")
    assert done.returncode == 0, done.stderr
    assert "wrote step 8" in done.stdout
    missing = flatout("export", run, "--to", tmp_path / "other", "--step", "7")
    assert missing.returncode == 2
    assert "step 7" in missing.stderr
    assert "8" in missing.stderr.split("kept:")[1]
    both = flatout("export", run, "--to", tmp_path / "other", "--step", "8", "--best")
    assert both.returncode == 2
