"""Trackers get what the run folder gets, read back from their own files."""

import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from flatout import trackers
from flatout.cost import Flops, Rates
from flatout.errors import EnvironmentLacks
from flatout.record import Event, Run, Span, StepExtra, StepRecord
from flatout.record.events import Evaluated, Saved, TaskResult, TasksScored

RATES = Rates(flops=Flops(forward=0.625, backward=1.25, recomputed=0.0, common=2.5), peak_flops=1000.0)


def step(number: int, **changes) -> StepRecord:
    values = {
        "attempt": 1,
        "step": number,
        "time": 1000.0 + number,
        "seconds": 0.5,
        "tokens": 100,
        "padded_tokens": 128,
        "loss": 2.0 + number,
        "spans": (Span(phase="forward", seconds=0.25), Span(phase="forward", seconds=0.125, role="critic")),
        "memory": {"peak_gib": 1.5, "reserved_gib": 2.0},
        "extra": StepExtra(lr=0.5, grad_norm=0.25, metrics={"kl": 0.125}),
    }
    return StepRecord(**{**values, **changes})


def evaluation(number: int, loss: float) -> Event:
    return Evaluated(attempt=1, time=1000.0 + number, step=number, val_loss=loss)


def test_scalars_of_a_step():
    assert trackers.step_scalars(step(3), rates=RATES) == {
        "training/global_step": 3,
        "training/loss": 5.0,
        "training/lr": 0.5,
        "training/grad_norm": 0.25,
        "training/kl": 0.125,
        "perf/throughput": 200.0,
        "perf/mfu/common": 0.5,
        "perf/mfu/done": 0.375,
        "perf/memory_gib": 1.5,
        "timing_s/forward": 0.25,
        "timing_s/critic/forward": 0.125,
    }


def test_what_is_unknown_is_left_out():
    bare = step(3, loss=None, seconds=0.0, spans=(), memory={}, extra=StepExtra())
    assert trackers.step_scalars(bare, rates=RATES) == {"training/global_step": 3}
    assert trackers.event_scalars(Saved(step=3, checkpoint="step-3")) == {}
    assert trackers.event_scalars(Evaluated(val_loss=1.0)) == {}


def test_scores_of_tasks():
    tasks = [
        TaskResult(task=name, spec=name, metric="accuracy", value=value, low=None, high=None, n=4, samples=1)
        for name, value in (("units", 0.25), ("gsm8k", 0.5))
    ]
    asked = TasksScored(step=4, tasks=tuple(tasks))
    assert trackers.event_scalars(asked) == {"training/global_step": 4, "eval/units": 0.25, "eval/gsm8k": 0.5}


def test_the_default_name_has_the_time():
    assert trackers.run_name("pretrain", now=datetime(2026, 1, 31, 9, 45)) == "pretrain-20260131-094500"
    assert re.fullmatch(r"rl-\d{8}-\d{6}", trackers.run_name("rl"))


def test_tensorboard_files_read_back(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = trackers.tensorboard(tmp_path / "tb", rates=RATES)
    for number in range(5):
        sink.step(step(number))
    sink.event(evaluation(4, 1.25))
    sink.close()
    found = EventAccumulator(str(tmp_path / "tb"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == set(trackers.step_scalars(step(0), rates=RATES)) | {"eval/loss"}
    assert [(item.step, item.value) for item in found.Scalars("training/loss")] == [(n, 2.0 + n) for n in range(5)]
    assert [(item.step, item.value) for item in found.Scalars("eval/loss")] == [(4, 1.25)]
    assert found.Scalars("perf/throughput")[2].wall_time == 1002.0


def test_tensorboard_keeps_an_evaluation_before_the_first_step(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = trackers.tensorboard(tmp_path, rates=RATES)
    sink.event(evaluation(0, 9.5))
    for number in range(3):
        sink.step(step(number))
    sink.event(evaluation(3, 1.25))
    sink.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(item.step, item.value) for item in found.Scalars("eval/loss")] == [(0, 9.5), (3, 1.25)]
    assert [item.step for item in found.Scalars("training/loss")] == [0, 1, 2]


def test_tensorboard_forgets_the_overtaken_steps_of_a_killed_attempt(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for attempt, numbers in ((1, range(10)), (2, range(6, 8))):
        sink = trackers.tensorboard(tmp_path, rates=RATES)
        for number in numbers:
            sink.step(step(number, loss=float(attempt)))
        sink.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    kept = [(item.step, item.value) for item in found.Scalars("training/loss")]
    assert kept == [(n, 1.0) for n in range(6)] + [(6, 2.0), (7, 2.0)]


def test_wandb_offline_leaves_a_run_folder_without_secrets(tmp_path: Path):
    pytest.importorskip("wandb")
    # In a process of its own: wandb keeps a service and hooks in whoever starts it.
    script = f"""
import sys
sys.argv = ["train.py", "--api-key", "sentinel-flag"]
from pathlib import Path
from test_trackers import RATES, evaluation, step
from flatout import trackers
sink = trackers.wandb("offline", project="p", name="n", folder=Path({str(tmp_path)!r}),
                      config={{"data": {{"path": "https://u:sentinel-url@h/x"}}, "lr": 0.5}},
                      rates=RATES)
print("sentinel-console")
for number in range(3):
    sink.step(step(number))
sink.event(evaluation(1, 1.25))
sink.close()
"""
    python_path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": python_path, "FOREIGN_SECRET": "sentinel-environment"}
    environment.pop("WANDB_MODE", None)
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, cwd=tmp_path, timeout=600)
    (run_folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (database,) = run_folder.glob("*.wandb")
    assert b"training/loss" in database.read_bytes()
    assert b"eval/loss" in database.read_bytes()
    for path in (tmp_path / "wandb").rglob("*"):
        if path.is_file():
            assert b"sentinel" not in path.read_bytes(), path


def start_tensorboard(folder: Path) -> None:
    trackers.tensorboard(folder, rates=RATES)


def start_wandb(folder: Path) -> None:
    trackers.wandb("offline", project="p", name="n", folder=folder, config={}, rates=RATES)


@pytest.mark.parametrize(("package", "start"), [("tensorboard", start_tensorboard), ("wandb", start_wandb)])
def test_a_missing_package_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, start):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EnvironmentLacks, match=re.escape(f"pip install 'flatout[{package}]'")):
        start(tmp_path)


def test_a_tracker_that_loses_its_folder_does_not_stop_the_run(tmp_path: Path):
    class Lost:
        def step(self, record: StepRecord) -> None:
            (tmp_path / "gone" / "file").write_text("x")

        def event(self, event: Event) -> None: ...

        def close(self) -> None: ...

    run = Run.create(tmp_path / "run", config_text="", config={}, plan={}, hardware={}, environment={})
    with run.recorder(sinks=[Lost()]) as recorder:
        recorder.step(step(0))
        recorder.step(step(1))
    assert [record.step for record in run.steps()] == [0, 1]
    assert [event.kind for event in run.events()] == ["attempt", "sink_failed"]


def test_trackio_gets_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the client as a stand-in: the real one starts a server of its own."""
    logged: list[tuple[int, dict[str, float]]] = []
    calls: list[object] = []

    class Client:
        @staticmethod
        def init(**options: object) -> None:
            calls.append(options)

        @staticmethod
        def log(values: dict[str, float], *, step: int) -> None:
            logged.append((step, values))

        @staticmethod
        def finish() -> None:
            calls.append("finish")

    monkeypatch.setitem(sys.modules, "trackio", Client)
    sink = trackers.trackio(project="p", name="n", config={"key": "value"}, rates=RATES)
    sink.step(step(3))
    sink.event(evaluation(4, 1.5))
    sink.event(Saved(step=4, checkpoint="step-4"))
    sink.close()
    assert [number for number, _ in logged] == [3, 4]
    assert logged[0][1]["training/loss"] == 5.0
    assert logged[1][1] == {"eval/loss": 1.5}
    assert calls[0]["project"] == "p"
    assert calls[-1] == "finish"


def test_mlflow_gets_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    sink = trackers.mlflow(project="p", name="n", folder=tmp_path / "ml", config={"train": {"lr": 0.5}}, rates=RATES)
    sink.step(step(3))
    sink.step(step(4))
    sink.event(evaluation(4, 1.5))
    sink.close()
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "ml").as_uri())
    experiment = client.get_experiment_by_name("p")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("n", "FINISHED")
    assert run.data.params == {"train.lr": "0.5"}
    assert run.data.metrics["eval/loss"] == 1.5
    history = client.get_metric_history(run.info.run_id, "training/loss")
    assert [(metric.step, metric.value) for metric in history] == [(3, 5.0), (4, 6.0)]


@pytest.mark.parametrize("package", ["trackio", "mlflow"])
def test_a_tracker_that_is_not_installed_is_refused(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentLacks, match=rf"log\.{package} needs the package {package}"):
        trackers.check(**{package: True})
