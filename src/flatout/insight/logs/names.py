"""The names and units of the numbers in training logs: what each tool calls a loss, a step time, a speed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

LONGEST_NUMBER = 64
LONGEST_NAME = 200
# Possessive throughout: a run of digits is looked at once.
NUMBER = r"(?i:[-+]?(?:\d++(?:,\d{3}(?!\d))*+(?:\.\d*+)?+(?:e[-+]?\d++)?+|\.\d++|nan|inf(?:inity)?))"
# A value with its unit, such as 31.0%, 120.2ms, 9.5GB, 65k.
_VALUE = re.compile(rf"\s*+({NUMBER})\s?([A-Za-z%]*+)\s*+")

NAMES: Mapping[str, tuple[str, ...]] = {
    "step": (
        *("step", "steps", "iter", "iters", "iteration", "global_step", "global step", "training step", "train step"),
        *("training/global_step", "train/step", "train/global_step", "trainer/global_step"),
    ),
    "epoch": ("epoch", "train/epoch"),
    "loss": (
        *(
            "loss",
            "train_loss",
            "train loss",
            "training loss",
            "train/loss",
            "training/loss",
            "loss/train",
            "loss train",
        ),
        *(
            "loss_metrics/global_avg_loss",
            "lm loss",
            "avg loss",
            "mean loss",
            "tr_loss",
            "train_loss_step",
            "loss_step",
        ),
    ),
    "policy_loss": ("actor/loss", "actor/pg_loss", "policy_loss", "pg_loss"),
    "val_loss": (
        *("val_loss", "val loss", "eval_loss", "eval loss", "val/loss", "eval/loss", "validation_loss", "valid_loss"),
        *("validation loss", "validate loss", "validate_loss", "val_loss_epoch", "valid loss"),
    ),
    "reward": ("reward", "critic/rewards/mean", "critic/score/mean", "reward/mean"),
    "kl": ("kl", "actor/kl_loss", "actor/ppo_kl"),
    "lr": ("lr", "learning_rate", "learning rate", "train/learning_rate", "train/lr", "training/lr", "actor/lr"),
    "grad_norm": (
        *("grad_norm", "grad norm", "gnorm", "norm", "actor/grad_norm", "train/grad_norm", "training/grad_norm"),
    ),
    "tokens_per_s": (
        *("tok/sec", "tok/s", "tokens/s", "tokens/sec", "tokens/second", "tokens_per_s", "tokens_per_sec", "tps"),
        *("tokens_per_second", "tok_per_sec", "train/tok_per_sec", "train_tokens_per_second", "throughput"),
        *("throughput(tps)", "tokens per second", "tokens per sec"),
    ),
    "gpu_tokens_per_s": (
        *("perf/throughput", "tokens_per_second_per_gpu", "tokens_per_sec_per_gpu", "tokens/train_per_sec_per_gpu"),
        *("tgs", "tokens/s/gpu", "tokens/sec/gpu", "tok/s/gpu"),
    ),
    "mfu": ("perf/mfu/actor", "perf/mfu/done"),  # always shares
    "mfu_as_printed": ("mfu", "bf16_mfu", "train/mfu", "est_mfu", "estimated_mfu"),  # a share, or percent
    "tflops": ("tflops", "tflops/gpu", "throughput per gpu(tflop/s/gpu)", "throughput(tflops)"),
    "seconds": (
        *("dt", "train/dt", "time", "step_time", "step time", "time_per_step", "iter_time", "iter time", "seconds"),
        *("timing_s/step", "perf/time_per_step", "elapsed time per iteration", "time_metrics/end_to_end", "sec/step"),
        *("train/step_time", "time per step", "seconds_per_step", "s/step"),
    ),
    "tokens": ("tokens", "perf/total_num_tokens", "tokens_per_step", "batch_tokens"),
    "tokens_seen": ("num_input_tokens_seen", "tokens_seen", "total_tokens", "consumed tokens"),
    "num_tokens": ("num_tokens",),  # of a step in nanochat, of the whole run in TRL
    "runtime": ("train_runtime",),
    "samples_per_s": (
        *("train_samples_per_second", "samples_per_second", "samples/s", "samples/sec", "currsamplespersec"),
    ),
    "steps_per_s": ("train_steps_per_second", "it/s", "steps/s", "iter/s", "steps_per_second"),
    "batch_rows": ("global batch size",),
    "skipped": ("skipped",),  # of all steps so far
    "skipped_now": ("number of skipped iterations",),  # since the last line
    "nan_now": ("number of nan iterations",),
    "gen_s": ("timing_s/gen",),
    "reward_s": ("timing_s/reward",),
    "eval_s": ("timing_s/testing",),
    "save_s": ("timing_s/save_checkpoint",),
    "data_s": ("timing_s/data", "data_time", "data time", "data_loading", "time_metrics/data_loading", "data t"),
    "gpu_util": (
        *("gpu utilization", "gpu utilisation", "gpu util", "gpu-util", "gpu usage", "gpu_utilization", "util"),
        *("utilization", "utilization.gpu [%]", "volatile gpu-util"),
    ),
    "cpu_util": ("cpu", "cpu utilization", "cpu utilisation", "cpu util", "cpu usage", "cpu_percent"),
    "ram_share": ("ram", "ram usage"),
    "memory_share": ("memory_share", "memory/max_reserved(%)"),
    "memory_total_gib": ("memory.total [mib]", "memory_total"),
    "memory_gib": (
        *("memory", "mem", "peak_memory", "peak memory", "maxmemallocated", "memory/max_reserved", "memory/max_alloc"),
        *("memory/max_active", "memory/max_allocated", "max_memory", "gpu_mem", "vram", "perf/max_memory_reserved_gb"),
        *("perf/memory_gib", "memory.used [mib]"),
    ),
}


def _plain(key: str) -> str:
    """One spelling of a name: lower case, with `_` between its words."""
    return re.sub(r"[\s_-]++", "_", key.strip().lower()).replace("_(", "(")


CANON: Mapping[str, str] = {_plain(name): canon for canon, names in NAMES.items() for name in names}
_SECONDS = ("seconds", "gen_s", "reward_s", "eval_s", "save_s", "data_s")
SHARES = ("gpu_util", "cpu_util", "ram_share")
_MEMORY = ("memory_gib", "memory_total_gib")
_MANY = {"k": 1e3, "m": 1e6, "b": 1e9}
_GIB = {"gb": 1.0, "gib": 1.0, "g": 1.0, "mb": 1 / 1024, "mib": 1 / 1024, "m": 1 / 1024}
# Words that logging libraries put in front of a message.
_LEVELS = {"info", "debug", "warning", "error", "train", "training", "main", "root"}
# Seconds since 1970: the time at which a line was written.
_CLOCK = 1e8


def named(key: str, value: Any, unit: str = "") -> tuple[str, float] | None:
    """The known name of a number in a log, and the number in seconds, shares, tokens or GiB. None if it is unknown."""
    if isinstance(value, str) and not unit:
        found = _VALUE.fullmatch(value) if len(value) <= LONGEST_NUMBER else None
        if found is None:
            return None
        value, unit = found[1], found[2]
    reader = reader_of(key, unit)
    number = None if reader is None else reader[1](value)
    return None if reader is None or number is None else (reader[0], number)


@lru_cache(1 << 12)
def reader_of(key: str, unit: str) -> tuple[str, Callable[[Any], float | None]] | None:
    """The known name of a number that stands behind `key`, and how it is read; None if it is unknown."""
    if len(key) > LONGEST_NAME:
        return None
    name, factor = _name_of(key)
    unit = unit.lower()
    if name is None:
        return None
    if name in ("mfu_as_printed", "mfu") and (unit == "%" or factor == 0.01):
        return "mfu", partial(_number, 0.01)
    if name in SHARES:  # a bare number may be anything
        return (name, partial(_number, 0.01)) if unit == "%" or factor == 0.01 else None
    if name in _SECONDS:
        return name, partial(_duration, factor * {"ms": 1e-3, "us": 1e-6}.get(unit, 1.0))
    if name in _MEMORY:
        if unit == "%":
            return "memory_share", partial(_number, 0.01)
        of_name = re.search(r"([gm]i?b)[)\]]?$", key.lower())
        unit = unit if unit in _GIB else of_name[1] if of_name else ""
        if unit not in _GIB:
            return None  # nobody says of what
        return name, partial(_number, factor * _GIB[unit])
    factor *= _MANY.get(unit, 1.0)
    return name, number_of if factor == 1 else partial(_number, factor)


def _number(factor: float, value: Any) -> float | None:
    number = number_of(value)
    return None if number is None else number * factor


def _duration(factor: float, value: Any) -> float | None:
    number = _number(factor, value)
    return None if number is None or number >= _CLOCK else number


def _name_of(key: str) -> tuple[str | None, float]:
    plain = _plain(key)
    while plain not in CANON and "_" in plain and plain.partition("_")[0] in _LEVELS:
        plain = plain.partition("_")[2]
    if plain in CANON:
        return CANON[plain], 0.01 if plain.endswith(("(%)", "[%]")) else 1.0
    for ending, factor in (("(ms)", 1e-3), ("_ms", 1e-3), ("(s)", 1.0), ("(gib)", 1.0), ("(gb)", 1.0), ("(%)", 0.01)):
        if plain.endswith(ending) and (name := CANON.get(plain.removesuffix(ending))):
            return name, factor
    return None, 1.0


def number_of(value: Any) -> float | None:
    text = type(value) is str
    if (text and len(value) > LONGEST_NUMBER) or not (text or type(value) in (int, float)):
        return None
    try:
        return float(value)
    except ValueError:
        pass
    except OverflowError:
        return None
    try:
        return float(value.replace(",", ""))
    except (ValueError, OverflowError):
        return None


def canonical(values: Mapping[Any, Any]) -> dict[str, float]:
    """The numbers with a known name; of two with the same name, the first."""
    row: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(key, str) and (found := named(key, value)):
            row.setdefault(*found)
    return row
