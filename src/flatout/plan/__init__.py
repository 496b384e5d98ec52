"""Decides how a run uses its hardware: every decision with its reason, and predictions to check a run against.

Needs no torch and no device, so `flatout plan --on A100-80GBx8` works on a laptop; `flatout train` uses the same
code with the hardware it finds. A plan requests features; `engine.resolve` reports which ones are available.

    job.py        the job: settings and hardware
    decide.py     the decisions in order; kernels.py decides precision and kernels, batch.py what depends on memory
    predict.py    memory, time and MFU of a job
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from flatout.plan.decide import Plan, decide
from flatout.plan.decisions import Decisions
from flatout.plan.job import Job, adapters_of, job_of, model_settings, named_shape, shape_of, tokenizer_size
from flatout.plan.kernels import no_short
from flatout.plan.predict import Prediction, compile_break_even

__all__ = [
    "Decisions",
    "Job",
    "Plan",
    "Prediction",
    "adapters_of",
    "compile_break_even",
    "decide",
    "job_of",
    "model_settings",
    "named_shape",
    "no_short",
    "shape_of",
    "tokenizer_size",
]


class _Callable(ModuleType):
    """Lets other programs call `flatout.plan(config)`: the package and the function have one name."""

    def __call__(self, config: Any, *, on: str | None = None, **overrides: Any) -> Plan:
        plan: Plan = import_module("flatout.api").plan(config, on=on, **overrides)
        return plan


sys.modules[__name__].__class__ = _Callable
