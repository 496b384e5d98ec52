"""`flatout.hf.Callback`: the Trainer of transformers writes a run folder, for `watch`, `doctor` and `report`.

    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[flatout.hf.Callback("runs/mine")])

Phases: `data` until the model is called, `forward`, `backward`, `optimize`, and `eval` and `save` between two steps.
Tokens are those of `input_ids` that the attention mask shows. Nothing waits for the device.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatout.errors import EnvironmentLacks, UsageError
from flatout.meter import Meter
from flatout.record import Run

try:
    from transformers import TrainerCallback
except ImportError:
    raise EnvironmentLacks("flatout.hf needs transformers: pip install 'flatout[hf]'") from None


class Callback(TrainerCallback):  # type: ignore[misc]
    """Records a run of the Trainer in `folder`. A run that is resumed continues the folder that it began."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._meter: Meter | None = None
        self._hooks: list[Any] = []
        self._resume = False
        # Of the step that is under way.
        self._tokens: int | Tensor = 0
        self._padded = 0
        self._losses: list[Tensor] = []
        self._whole = False
        self._lr: float | None = None

    # -- the Trainer's events

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._resume = state.global_step > 0 and Run.is_at(self.folder)
        if not self._resume and Run.is_at(self.folder):
            raise UsageError(f"{self.folder} already holds a run: give flatout.hf.Callback another folder")
        self._args, self._state, self._model = args, state, model
        self._forget()
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, with_kwargs=True),
        ]

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._mark("data")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, lr_scheduler: Any = None, **_: Any) -> None:
        self._mark("optimize")
        rates = None if lr_scheduler is None else lr_scheduler.get_last_lr()  # after the step it is the next one's
        self._lr = float(rates[0]) if rates else None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._meter is None:
            return
        loss = None
        if self._losses:
            total = torch.stack([one.float() for one in self._losses]).sum()
            loss = total if self._whole else total / len(self._losses)
        ranks = args.world_size
        self._meter.step(
            tokens=self._tokens * ranks,
            padded_tokens=self._padded * ranks,
            loss=loss,
            lr=self._lr,
        )
        self._forget()
        self._mark("save" if control.should_save and not control.should_evaluate else "data")

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **_: Any) -> None:
        if self._meter is None or not logs:
            return
        every = args.logging_strategy == "steps" and args.logging_steps == 1
        self._meter.amend(grad_norm=_number(logs.get("grad_norm")), loss=_number(logs.get("loss")) if every else None)

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Any = None, **_: Any) -> None:
        if self._meter is None:
            return
        if (loss := _number((metrics or {}).get("eval_loss"))) is not None:
            self._meter.evaluated(loss)
        self._mark("save" if control.should_save else "data")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._meter is None:
            return
        self._meter.saved(f"checkpoint-{state.global_step}")
        self._mark("data")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._meter is not None:
            done = state.max_steps is None or state.global_step >= state.max_steps
            self._meter.close(stopped_by="end" if done else "the Trainer")
            self._meter = None

    # -- the model's passes

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not model.training:
            self._mark("eval")
            return
        if not isinstance(ids, Tensor):
            raise UsageError("flatout.hf.Callback counts input_ids, and this model is called without any")
        if self._meter is None:
            self._begin(ids)
        mask = kwargs.get("attention_mask")
        shown = mask if isinstance(mask, Tensor) and mask.shape == ids.shape else None
        self._padded += ids.numel()
        self._tokens = self._tokens + (ids.numel() if shown is None else shown.sum())
        self._whole = kwargs.get("num_items_in_batch") is not None
        self._mark("forward")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not model.training:
            return
        loss = None
        with suppress(KeyError, TypeError, IndexError):
            loss = output["loss"]
        if isinstance(loss, Tensor):
            self._losses.append(loss.detach())
        self._mark("backward")

    def _begin(self, ids: Tensor) -> None:
        """Opens the run folder at the first pass, when the length of the sequences is known."""
        args, state = self._args, self._state
        kept = ["learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "optim", "seed"]
        kept += ["per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "bf16", "fp16"]
        values = args.to_dict()
        self._meter = Meter(
            self.folder,
            self._model,
            steps=state.max_steps,
            sequence_length=ids.shape[-1],
            precision="bf16" if args.bf16 else "fp16" if args.fp16 else None,
            num_devices=args.world_size,
            config={
                "recipe": "trainer",
                "model": {"name": _name(self._model)},
                "train": {k: values.get(k) for k in kept},
            },
            start=state.global_step,
            resume=self._resume,
        )
        self._meter.__enter__()

    def _mark(self, phase: str) -> None:
        if self._meter is not None:
            self._meter.phase(phase)

    def _forget(self) -> None:
        self._tokens, self._padded, self._losses, self._whole, self._lr = 0, 0, [], False, None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _name(model: Any) -> str:
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__)
