"""Copies of a run's records for TensorBoard, Weights & Biases, Trackio and MLflow (`log.tensorboard`, `log.wandb` …).

The run folder is the record; these are additional sinks, imported only if configured. If one raises during a run,
the `Recorder` switches it off with an event, and training continues.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from flatout.cost import Rates
from flatout.errors import EnvironmentLacks
from flatout.record import Event, Sink, StepRecord, redacted
from flatout.record.events import Ended, Evaluated, TasksScored
from flatout.record.rollouts import RolloutsGraded
from flatout.verdict import learning_shares

# The numbers of a step's `extra` that are usually charted.
_EXTRA = ("lr", "grad_norm")


def check(**wanted: bool) -> None:
    """Refuses a tracker that is not installed, before the run folder is created."""
    for package, asked in wanted.items():
        if asked and importlib.util.find_spec(package) is None:
            raise _lacks(package, ImportError("not installed"))


def run_name(recipe: str, *, now: datetime | None = None) -> str:
    """The default name of a run: `pretrain-20260131-094500`."""
    return f"{recipe}-{now or datetime.now():%Y%m%d-%H%M%S}"


def step_scalars(record: StepRecord, *, rates: Rates) -> dict[str, float]:
    """The scalars of a step for a tracker; unknown ones are left out."""
    scalars: dict[str, float] = {"training/global_step": record.step}
    if record.loss is not None:
        scalars["training/loss"] = record.loss
    if record.seconds > 0 and not record.profiled:
        shares = rates.shares(tokens=record.tokens, seconds=record.training_s)
        scalars["perf/throughput"] = record.tokens / record.training_s
        learning = learning_shares(rates, tokens=record.tokens, phases=record.phases)
        mfu = {"perf/mfu/done": shares.mfu, "perf/mfu/common": shares.mfu_common}
        mfu |= {"perf/mfu/actor": learning.actor, "perf/mfu/critic": learning.critic}
        scalars |= {name: share for name, share in mfu.items() if share is not None}
    if "peak_gib" in record.memory:
        scalars["perf/memory_gib"] = record.memory["peak_gib"]
    known = record.extra.numbers()
    scalars |= {f"training/{name}": known[name] for name in (*record.extra.metrics, *_EXTRA) if name in known}
    return scalars | {f"timing_s/{phase}": seconds for phase, seconds in record.phases.items()}


def event_scalars(event: Event) -> dict[str, float]:
    """The scalars of an event: a validation loss, task scores, or the outcome of the run."""
    found: dict[str, float] = {}
    match event:
        case Evaluated():
            found = {"eval/loss": event.val_loss}
        case TasksScored():
            found = {f"eval/{task.task}": task.value for task in event.tasks}
        case RolloutsGraded():
            found = {
                f"rollouts/{one.task}/{name}": value
                for one in event.tasks
                for name in ("reward", "accuracy", "length", "without_signal")
                if (value := getattr(one, name)) is not None
            }
        case Ended(outcome=outcome):
            speed = outcome.speed
            came_to = {"tokens_per_s": speed.tokens_per_s, "step_s": speed.step_s, "data_share": speed.data_share}
            came_to |= {"mfu/done": speed.mfu, "mfu/common": speed.mfu_common, "loss": outcome.loss_last_tenth}
            found = {f"run/{name}": value for name, value in came_to.items() if value is not None}
    return {"training/global_step": event.step, **found} if found and event.step is not None else {}


def tensorboard(folder: Path, *, rates: Rates) -> Sink:
    """Event files in `folder`, for `tensorboard --logdir`."""
    try:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise _lacks("tensorboard", error) from error
    folder.mkdir(parents=True, exist_ok=True)
    return _TensorBoard(
        EventFileWriter(str(folder)), new_event=event_pb2.Event, summary=summary_pb2.Summary, rates=rates
    )


def wandb(
    mode: Literal["offline", "online"],
    *,
    project: str,
    name: str,
    folder: Path,
    config: Mapping[str, Any],
    rates: Rates,
) -> Sink:
    """A W&B run in `folder`; `offline` opens no connection and can be uploaded later with `wandb sync`."""
    try:
        import wandb as client
    except ImportError as error:
        raise _lacks("wandb", error) from error
    folder.mkdir(parents=True, exist_ok=True)
    # The console, the command line and the code can hold secrets, and the machine is monitored already.
    settings = client.Settings(
        console="off",
        silent=True,
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,
        x_disable_stats=True,
    )
    try:
        run = client.init(
            mode=mode, project=project, name=name, dir=str(folder), config=redacted(config), settings=settings
        )
    except client.errors.Error as error:
        raise EnvironmentLacks(
            f"wandb could not start in mode {mode!r}: {error}. "
            "Run `wandb login` first, or set log.wandb=offline and upload later."
        ) from error
    return _Wandb(run, rates=rates)


def trackio(*, project: str, name: str, config: Mapping[str, Any], rates: Rates) -> Sink:
    """A run of Trackio, in its own folder on this machine; `trackio show` opens it."""
    try:
        import trackio as client
    except ImportError as error:
        raise _lacks("trackio", error) from error
    # The machine is monitored already, and versions differ in what they monitor themselves.
    off = {"embed", "auto_log_gpu", "auto_log_cpu"} & inspect.signature(client.init).parameters.keys()
    client.init(
        project=project, name=name, config=redacted(config), resume="allow", **dict.fromkeys(sorted(off), False)
    )
    return _Trackio(client, rates=rates)


def mlflow(*, project: str, name: str, folder: Path, config: Mapping[str, Any], rates: Rates) -> Sink:
    """A run of MLflow in the experiment `project`: at MLFLOW_TRACKING_URI, or in files in `folder`."""
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
    except ImportError as error:
        raise _lacks("mlflow", error) from error
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or folder.absolute().as_uri())
    found = client.get_experiment_by_name(project)
    experiment = found.experiment_id if found is not None else client.create_experiment(project)
    run = client.create_run(experiment, run_name=name).info.run_id
    settings = [Param(key, str(value)[:500]) for key, value in _flat(redacted(config)) if value is not None]
    for at in range(0, len(settings), 100):  # the most that one request may have
        client.log_batch(run, params=settings[at : at + 100])
    return _Mlflow(client, run, metric=Metric, rates=rates)


def _flat(values: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{under}{key}.")
        else:
            yield f"{under}{key}", value


class _Trackio:
    def __init__(self, client: Any, *, rates: Rates) -> None:
        self._client, self._rates = client, rates

    def step(self, record: StepRecord) -> None:
        self._log(step_scalars(record, rates=self._rates))

    def event(self, event: Event) -> None:
        self._log(event_scalars(event))

    def close(self) -> None:
        self._client.finish()

    def _log(self, scalars: dict[str, float]) -> None:
        if scalars:
            self._client.log(scalars, step=int(scalars.pop("training/global_step")))


class _Mlflow:
    def __init__(self, client: Any, run: str, *, metric: Any, rates: Rates) -> None:
        self._client, self._run, self._metric, self._rates = client, run, metric, rates
        self._ended = "FINISHED"

    def step(self, record: StepRecord) -> None:
        self._log(step_scalars(record, rates=self._rates), time_s=record.time)

    def event(self, event: Event) -> None:
        self._log(event_scalars(event), time_s=event.time)
        if isinstance(event, Ended) and event.outcome.stopped_by.startswith("SIG"):
            self._ended = "KILLED"

    def close(self) -> None:
        self._client.set_terminated(self._run, status=self._ended)

    def _log(self, scalars: dict[str, float], *, time_s: float) -> None:
        if scalars:
            step = int(scalars.pop("training/global_step"))
            made = [self._metric(name, float(value), int(1000 * time_s), step) for name, value in scalars.items()]
            self._client.log_batch(self._run, metrics=made)


class _TensorBoard:
    def __init__(self, writer: Any, *, new_event: Any, summary: Any, rates: Rates) -> None:
        self._writer = writer
        self._rates = rates
        self._new_event = new_event
        self._summary = summary
        self._started = False

    def step(self, record: StepRecord) -> None:
        self._write(step_scalars(record, rates=self._rates), step=record.step, time_s=record.time)

    def event(self, event: Event) -> None:
        scalars = event_scalars(event)
        if scalars:
            self._write(scalars, step=int(scalars["training/global_step"]), time_s=event.time)

    def close(self) -> None:
        self._writer.close()

    def _write(self, scalars: Mapping[str, float], *, step: int, time_s: float) -> None:
        if not self._started:
            # A session start makes TensorBoard drop the points of this step and later, which a killed attempt wrote.
            start = self._new_event(step=step, wall_time=time.time(), session_log={"status": "START"})
            self._writer.add_event(start)
            self._started = True
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(self._new_event(step=step, wall_time=time_s, summary=self._summary(value=values)))


class _Wandb:
    def __init__(self, run: Any, *, rates: Rates) -> None:
        self._run = run
        self._rates = rates
        # An evaluation may arrive before its step; W&B's own step counter would refuse that.
        run.define_metric("*", step_metric="training/global_step")

    def step(self, record: StepRecord) -> None:
        self._run.log(step_scalars(record, rates=self._rates))

    def event(self, event: Event) -> None:
        scalars = event_scalars(event)
        if scalars:
            self._run.log(scalars)

    def close(self) -> None:
        self._run.finish()


def _lacks(package: str, error: ImportError) -> EnvironmentLacks:
    return EnvironmentLacks(
        f"log.{package} needs the package {package} ({error}). Install it with `pip install 'flatout[{package}]'`, "
        f"or leave log.{package} off."
    )
