"""`flatout.Meter`: a training loop of your own writes a run folder, so that `watch`, `doctor` and `report` read it.

It adds no synchronisation with the device: times and losses are read when the device has passed them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch
import yaml
from torch import Tensor, nn

from flatout import hardware as machines
from flatout.cost import Flops, Rates
from flatout.errors import UsageError
from flatout.files import cache_folder
from flatout.probe import Monitor, Phases, StepTiming, describe
from flatout.recipes.session import device_memory
from flatout.record import Outcome, Run, StepExtra, StepRecord, events
from flatout.verdict import LossTrend, Speedometer

Item = TypeVar("Item")
Precision = Literal["fp32", "tf32", "bf16", "fp16"]


@dataclass
class _Pending:
    """A step whose numbers are still on the device."""

    step: int
    time: float
    tokens: int | Tensor
    padded_tokens: int | Tensor | None
    loss: float | Tensor | None
    lr: float | None
    grad_norm: float | Tensor | None
    metrics: Mapping[str, float]
    timing: StepTiming | None = None


class Meter:
    """Records a training loop. Use it in a `with` block:

        with flatout.Meter("runs/mine", model, steps=100) as meter:
            for batch in meter.batches(loader):
                meter.phase("forward")
                loss = ...
                meter.phase("backward")
                loss.backward()
                meter.phase("optimize")
                ...
                meter.step(loss=loss, tokens=batch.numel())

    `sequence_length` is needed to count attention's FLOPs. `precision` is that of the matmuls; by default that of the
    weights. `config` is shown as the run's settings. Only one process writes a folder: rank 0, with `num_devices` and
    with tokens summed over all ranks.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        *,
        steps: int | None = None,
        sequence_length: int | None = None,
        precision: Precision | None = None,
        num_devices: int = 1,
        config: Mapping[str, Any] | None = None,
        start: int = 0,
        resume: bool = False,
    ) -> None:
        if not any(True for _ in model.parameters()):
            raise UsageError(f"{type(model).__name__} has no parameters: there is nothing to measure")
        self._path, self._resume, self._start, self._total = Path(folder), resume, start, steps
        self._device = next(model.parameters()).device
        self._num_devices, self._sequence_length = num_devices, sequence_length
        self._precision = precision or _precision(model)
        self._model, self._config = model, {"recipe": "loop", **(config or {})}
        self._stack = ExitStack()
        self._pending: deque[_Pending] = deque()
        self._next, self._tokens, self._seconds = start, 0, 0.0
        self._val_losses: list[float] = []
        self._busy: list[float] = []
        self._trend, self._saves = LossTrend(), 0
        self._open = False

    def __enter__(self) -> Self:
        found = machines.with_cpu_facts(machines.detect(), cache=cache_folder())
        flops, unknown = flops_of(self._model, sequence_length=self._sequence_length)
        peak = None if unknown else found.peak_flops.get(self._precision)
        self._rates = Rates(
            flops=flops,
            peak_flops=peak,
            num_devices=self._num_devices,
            precision=self._precision,
            peak_source=found.peak_source,
        )
        parameters = list(self._model.parameters())
        job = {
            "steps": self._total,
            "parameters": sum(p.numel() for p in parameters),
            "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            "sequence_length": self._sequence_length,
            "num_ranks": self._num_devices,
            "hardware": found.name,
        }
        plan = {"decisions": {"precision": self._precision}, "reasons": {}, "predicted": {}, "job": job}
        plan |= {"rates": self._rates.to_json()}
        text = yaml.safe_dump(self._config, sort_keys=False)
        if self._resume and Run.is_at(self._path):
            run = Run.open(self._path)
            self._stack.enter_context(run.lock())
            run.reconfigure(config_text=text, config=self._config)
        else:
            facts = {"hardware": found.to_json(), "environment": describe()}
            created = Run.created(self._path, config_text=text, config=self._config, plan=plan, **facts)
            run = self._stack.enter_context(created)
        self.run = run
        self._recorder = self._stack.enter_context(run.recorder())
        self._monitor = self._stack.enter_context(
            Monitor(on_sample=self._recorder.sample, gpu=self._device.index if self._device.type == "cuda" else None)
        )
        self._speed, self._phases = Speedometer(self._rates), Phases(device=self._device.type)
        self._recorder.event(events.HardwareFound(facts=found.to_json()))
        self._recorder.event(events.Planned(facts=plan))
        if unknown:
            self._recorder.event(events.Notice(text=f"MFU is unknown: {unknown}"))
        elif self._sequence_length is None:
            self._recorder.event(events.Notice(text="MFU does not count attention: no sequence_length was given"))
        if self._start:
            self._recorder.event(events.Resumed(step=self._start, checkpoint=f"step {self._start}"))
        self._recorder.event(events.Started(folder=str(run.path), total_steps=self._total))
        self._open = True
        self._phases.begin_step(self._next)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(stopped_by="end" if kind is None else kind.__name__)

    def batches(self, loader: Iterable[Item]) -> Iterator[Item]:
        """The batches of a loader; the time that the loop waits for them is the phase `data`."""
        iterator = iter(loader)
        while True:
            self.phase("data")
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.phase("compute")
            yield batch

    def phase(self, name: str) -> None:
        """What the loop does from here on. `data`, `eval` and `save` have a meaning for the doctor."""
        self._check_open()
        self._phases.mark(name)

    def step(
        self,
        *,
        tokens: int | Tensor,
        loss: float | Tensor | None = None,
        padded_tokens: int | Tensor | None = None,
        lr: float | None = None,
        grad_norm: float | Tensor | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Ends an optimizer step. Tensors are read later. `padded_tokens` counts padding too; default: none."""
        self._check_open()
        self._write()
        made = _Pending(
            step=self._next,
            time=time.time(),
            tokens=_later(tokens),
            padded_tokens=_later(padded_tokens),
            loss=_later(loss),
            lr=lr,
            grad_norm=_later(grad_norm),
            metrics=dict(metrics or {}),
        )
        self._phases.end_step()
        self._pending.append(made)
        self._next += 1
        self._phases.begin_step(self._next)

    def amend(
        self, *, loss: float | None = None, lr: float | None = None, grad_norm: float | None = None, **metrics: float
    ) -> None:
        """Adds to the last step what became known after it, before the next one ends."""
        if not self._pending:
            return
        last = self._pending[-1]
        last.loss = last.loss if loss is None else loss
        last.lr = last.lr if lr is None else lr
        last.grad_norm = last.grad_norm if grad_norm is None else grad_norm
        last.metrics = {**last.metrics, **metrics}

    def evaluated(self, val_loss: float) -> None:
        """Records a validation loss of the weights as they are now."""
        self._check_open()
        self._val_losses.append(val_loss)
        self._recorder.event(events.Evaluated(step=self._next, val_loss=val_loss))

    def saved(self, checkpoint: str | Path) -> None:
        """Records that a checkpoint was written."""
        self._check_open()
        self._saves += 1
        self._recorder.event(events.Saved(step=self._next, checkpoint=str(checkpoint)))

    def close(self, *, stopped_by: str = "end") -> Outcome | None:
        """Writes what is left and how the run ended; the `with` block does it. A second call does nothing."""
        if not self._open:
            return None
        self._open = False
        with self._stack:
            self._write(all=True)
            memory = device_memory(self._device, self._monitor)
            peak, total = memory.get("peak_gib"), memory.get("total_gib")
            first, last = self._trend.ends()
            outcome = Outcome(
                steps=self._next,
                tokens=self._tokens,
                hours=self._seconds / 3600,
                speed=self._speed.read(),
                loss_first_tenth=first,
                loss_last_tenth=last,
                val_losses=tuple(self._val_losses),
                peak_gib=peak,
                memory_share=peak / total if peak is not None and total else None,
                utilisation=sum(self._busy) / len(self._busy) if self._busy else None,
                saves=self._saves,
                stopped_by=stopped_by,
            )
            self._recorder.event(events.Ended(step=self._next, outcome=outcome, verdicts=()))
        return outcome

    def _check_open(self) -> None:
        if not self._open:
            raise UsageError("the meter is not running: use it inside `with flatout.Meter(...) as meter:`")

    def _write(self, *, all: bool = False) -> None:
        """Records the steps that the device has finished, in order."""
        for timing in self._phases.flush() if all else self._phases.ready():
            pending = next(one for one in self._pending if one.step == timing.step)
            pending.timing = timing
        while self._pending and self._pending[0].timing is not None:
            self._record(self._pending.popleft())

    def _record(self, done: _Pending) -> None:
        assert done.timing is not None
        tokens = int(done.tokens)
        utilisation = self._monitor.utilisation()
        loss = None if done.loss is None else float(done.loss)
        record = StepRecord(
            attempt=self._recorder.attempt,
            step=done.step,
            time=done.time,
            seconds=done.timing.seconds,
            tokens=tokens,
            padded_tokens=tokens if done.padded_tokens is None else int(done.padded_tokens),
            loss=loss,
            spans=done.timing.spans,
            memory=device_memory(self._device, self._monitor),
            utilisation=utilisation,
            extra=StepExtra(
                lr=done.lr,
                grad_norm=None if done.grad_norm is None else float(done.grad_norm),
                metrics=done.metrics,
            ),
        )
        self._recorder.step(record)
        self._tokens += tokens
        self._seconds += record.seconds
        self._speed.see(record)
        if loss is not None:
            self._trend.see(loss)
        if "gpu" in utilisation:
            self._busy.append(utilisation["gpu"])


def flops_of(model: nn.Module, *, sequence_length: int | None) -> tuple[Flops, str | None]:
    """FLOPs of a token, from the weights that multiply; and why they are not known, if they are not.

    Attention is counted where the model has a transformers configuration with its sizes.
    """
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    heads = {id(part.weight) for part in model.modules() if isinstance(part, nn.Linear)}
    weights = [p for p in model.parameters() if p.dim() >= 2 and (id(p) not in tables or id(p) in heads)]
    multiplied = sum(p.numel() for p in weights)
    trained = sum(p.numel() for p in weights if p.requires_grad)
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, width = _number(config, "num_hidden_layers"), _number(config, "hidden_size")
    width = (_number(config, "head_dim") or 0) * (_number(config, "num_attention_heads") or 0) or width or 0
    length = sequence_length or 0
    attention = 4.0 * (layers or 0) * width * (length + 1) / 2 if length else 0.0
    flops = Flops(
        forward=2.0 * multiplied + attention,
        backward=2.0 * multiplied + 2.0 * trained + 2 * attention,
        recomputed=0.0,
        common=6.0 * multiplied + 12.0 * (layers or 0) * width * length,
        attention=3 * attention,
    )
    unknown = None
    if any(_number(config, name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        unknown = "a token uses only some of this model's experts"
    elif not multiplied:
        unknown, flops = "the model has no matrices", Flops(**(asdict(flops) | {"forward": 1.0}))
    return flops, unknown


def _number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _precision(model: nn.Module) -> Precision:
    kinds: dict[torch.dtype, Precision] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    largest = max(model.parameters(), key=lambda parameter: parameter.numel())
    if largest.dtype == torch.float32 and largest.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return kinds.get(largest.dtype, "fp32")


def _later(value: Any) -> Any:
    """A number that may still be on the device; copied to the host without waiting, before the step's end is marked."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if value.numel() != 1:
        raise UsageError(f"a tensor of shape {tuple(value.shape)} is not one number: give its mean or sum")
    if not value.is_cuda:
        return value.clone()
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return host.copy_(value, non_blocking=True)
