"""Reads the rows of a training log, whichever tool wrote it.

One reader takes every printed line: pairs such as `loss: 3.1`, `lr=1e-4`, `'loss': 3.1` and `mfu 31.0%`, speeds that
stand before their unit (`65,000 tok/s`, `1.22s/it`), and steps such as `[10/100]`. `KINDS` tells the tools apart, where
the same word means something else. Nothing is evaluated, and a number that is not in the log is never made up.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from flatout.errors import UsageError
from flatout.files import BadFile, read_bytes, typed
from flatout.insight.logs.lines import Shapes
from flatout.insight.logs.names import LONGEST_NUMBER, canonical
from flatout.insight.logs.summary import summary_of
from flatout.record import StepRecord

_MOST_BYTES = 200_000_000
# A printed line is shorter. What is matched against a longer one could take for ever, so it is no line of a log.
_LONGEST_LINE = 1 << 14
_WARM_LINES = 2  # compilation and filling caches
_COLOURS = re.compile(r"\x1b\[[0-9;]*[mKA-D]")

# What tells the tools apart, the first that fits.
KINDS: Sequence[tuple[str, re.Pattern[str]]] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("flatout", r"^\s*step \d+/\d+  .* tok/s  .* it/s  MFU|^\s*step \d+: validation loss "),
        ("nanochat", r"step \d+/\d+ .*\| (?:loss|Training loss): .*\| lrm: "),
        ("llm.c", r"step +\d+/\d+ \| .*\| norm .* tok/s"),
        ("nanoGPT", r"iter \d+: loss |step \d+: train loss .*, val loss "),
        ("torchtitan", r"step: .*loss: .*(?:tps|memory): "),
        ("torchtune", r"tokens_per_second_per_gpu:"),
        ("verl", r"\bstep:\d+ - "),
        ("Megatron", r"elapsed time per iteration \(ms\):"),
        ("DeepSpeed", r"RunningAvgSamplesPerSec=|step=\d+, skipped=\d+, lr="),
        ("LitGPT", r"iter \d+ step \d+ \| ?loss train:|iter \d+: val loss"),
        ("TRL", r"'(?:completions|rewards)/|'rewards?':"),
        ("Hugging Face Trainer", r"\{['\"].*['\"]:"),
        ("nvidia-smi", r"MiB\s*/\s*\d+MiB\s*\|\s*\d+%"),
        ("progress bar", r"\d+/\d+ \[[\d:]+<"),
        ("key=value", ""),
    )
)
_ITS_SPEED_IS_OF_ONE_GPU = ("verl", "torchtitan")
_PERCENT_WITHOUT_SIGN = ("nanochat",)
# Kinds of text that no training loop printed.
OUTSIDE_A_LOOP = ("summary", "list of settings")
_NAMES_OF_A_STEP = {"step", "total", "epoch", "lr"}
# Lines of a monitor, which know no step.
_OF_A_MONITOR = {"gpu_util", "memory_share", "cpu_util", "ram_share"}
# What a loop prints is not looked for around it.
_OF_THE_LOOP = {"loss", "seconds"}


@dataclass(frozen=True, kw_only=True)
class Log:
    """What a log says: rows of named numbers, and what was printed once."""

    kind: str
    rows: Sequence[Mapping[str, float]]
    once: Mapping[str, float] = field(default_factory=dict)  # tokens_per_step, parameters, sequence_length
    per_gpu: bool = False  # its tokens a second are of one GPU
    settings: Mapping[str, float] = field(default_factory=dict)  # as printed; a switch is 0 or 1
    claimed: Mapping[str, float] = field(default_factory=dict)  # figures for after a change
    _columns: dict[str, list[float]] = field(default_factory=dict, compare=False, repr=False)

    def values(self, name: str) -> list[float]:
        if (found := self._columns.get(name)) is None:
            found = self._columns[name] = [row[name] for row in self.rows if name in row]
        return found

    def finite(self, name: str) -> list[float]:
        """Those after warm-up that are finite; all finite ones, where there are few."""
        found = [value for value in self.values(name) if math.isfinite(value)]
        return found[_WARM_LINES:] or found

    def steady(self, name: str) -> float | None:
        """The middle of what was logged after warm-up."""
        found = self.finite(name)
        return median(found) if found else None


def read(path: Path) -> Log:
    """The log, whichever kind it is."""
    try:
        text = _COLOURS.sub("", read_bytes(path, limit=_MOST_BYTES).decode(errors="replace"))
    except FileNotFoundError:
        raise UsageError(f"{path} cannot be read: there is no such file") from None
    except BadFile as error:
        raise UsageError(f"{error}: give a text file, or the relevant part of it") from None
    for reader in (_trainer_state, _json_lines, _csv, _printed):
        found = reader(text)
        if found is not None and (found.rows or found.settings):
            return _settled(found)
    raise UsageError(
        f"{path} is not a known training log: give what a trainer printed (a step, and numbers as key=value, key: "
        "value or in a dictionary), a progress bar, trainer_state.json, JSON lines, or CSV"
    )


def _says_something(row: Mapping[str, float], line: str) -> bool:
    """Whether a line is one of a training log, and not prose with a number in it."""
    told = row.keys() - _NAMES_OF_A_STEP
    if "step" in row or ("loss" in row and len(row) > 1) or len(row.keys() & _OF_A_MONITOR) > 1:
        return bool(told)
    return bool(told) and line.lstrip().startswith("{")


def _lines(text: str) -> Log | None:
    """Printed logs, line by line. A progress bar writes over itself, so a carriage return also ends a line."""
    found: list[tuple[str, dict[str, float]]] = []
    step = None
    shapes = Shapes()
    for line in re.split(r"[\r\n]+", text):
        # Trainer prints its dictionary behind the bar.
        parts = re.split(r"(?=\{['\"])", line) if "{" in line else [line]
        for part in parts if len(line) <= _LONGEST_LINE else ():
            shape = shapes.of(part)
            row = shape.row_of(part)
            if not _says_something(row, part):
                continue
            if shape.kind is None:
                shape.kind = next(kind for kind, pattern in KINDS if pattern.search(part))
            kind = shape.kind
            if kind == "progress bar":
                step = row.get("step", step)
            elif "step" not in row and step is not None:
                row["step"] = step
            if kind == "nanoGPT" and "val_loss" in row:  # an estimate over other batches
                row.pop("loss", None)
            if "runtime" in row and "train_loss" in part:  # the mean over the run
                row.pop("loss", None)
            found.append((kind, row))
    if not found:
        return None
    bars = Counter(row.get("total") for kind, row in found if kind == "progress bar")
    usual = bars.most_common(1)[0][0] if bars else None
    rows = [(kind, row) for kind, row in found if kind != "progress bar" or row.get("total") == usual]
    kinds = Counter(kind for kind, _ in rows)
    known = [kind for kind in kinds if kind not in ("progress bar", "key=value", "nvidia-smi")]
    kind = max(known or kinds, key=kinds.__getitem__)
    return Log(
        kind=kind,
        rows=[row for _, row in rows],
        once=_printed_once(text),
        per_gpu=kind in _ITS_SPEED_IS_OF_ONE_GPU,
    )


def _printed(text: str) -> Log | None:
    """A log that was printed, and what stands around its lines: settings, a summary, before and after."""
    log, summary = _lines(text), summary_of(text)
    if log is None:
        more = [summary.figures] if summary.figures else []
        kind = OUTSIDE_A_LOOP[0] if more else OUTSIDE_A_LOOP[1]
        return Log(kind=kind, rows=more, once=_printed_once(text), settings=summary.settings, claimed=summary.claimed)
    logged = set().union(*log.rows)
    figures = {name: value for name, value in summary.figures.items() if name not in logged | _OF_THE_LOOP}
    rows = [*log.rows, figures] if figures else log.rows
    return replace(log, rows=rows, settings=summary.settings, claimed=summary.claimed)


def _printed_once(text: str) -> dict[str, float]:
    once = {}
    for name, pattern in (
        ("tokens_per_step", r"(?:tokens per iteration will be|tokens per step)[^\d]{0,20}([\d,]+)"),
        ("tokens_per_step", r"Total batch size ([\d,]+) =>"),
        ("parameters", r"Trainable parameters = [\d,]+ of ([\d,]+)"),
        ("parameters", r"number of parameters:?\s*([\d,.]+\s*[KMB]?)"),
        ("parameters", r"Number of (?:trainable )?parameters\s*[:=]\s*([\d,]+)"),
        ("parameters", r"[Mm]odel .{0,40}size: ([\d,]+) total parameters"),
        ("sequence_length", r"(?:seq_len(?:gth)?|sequence[ _]length|block_size)(?:\s*[:=]| \.{3,})\s*([\d,]+)"),
    ):
        if name not in once and (match := re.search(pattern, text)):
            with suppress(UsageError):  # something else is printed there
                once[name] = size(match[1].replace(",", "").replace(" ", "").rstrip("."))
    return once


def size(text: str) -> float:
    match = re.fullmatch(r"(\d{1,40}(?:\.\d{0,40})?)\s*([KMBT]?)", text.strip(), re.IGNORECASE)
    found = float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2].upper()] if match else 0.0
    if not found:
        raise UsageError(f"--params {text[:LONGEST_NUMBER]!r} is not a size: write 124M, 7B or a number")
    return found


# -- files with a schema


def _trainer_state(text: str) -> Log | None:
    if not text.lstrip().startswith("{") or "log_history" not in text:
        return None
    try:
        state = json.loads(text)
        rows = [canonical(entry) for entry in state["log_history"]]
        for entry, row in zip(state["log_history"], rows, strict=True):
            if "train_loss" in entry:  # the mean over the run
                row.pop("loss", None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return Log(kind="Hugging Face Trainer state", rows=[row for row in rows if len(row) > 1])


def _json_lines(text: str) -> Log | None:
    rows = []
    own = 0
    for line in text.splitlines():
        if line.startswith("{") and '"' in line:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            row = _of_flatout(value)
            own += row is not None
            with suppress(RecursionError):
                row = row or canonical(_flat(value))
            if row and row.keys() - _NAMES_OF_A_STEP:
                rows.append(row)
    return Log(kind="flatout steps.jsonl" if own else "JSON lines", rows=rows) if rows else None


def _of_flatout(value: Any) -> dict[str, float] | None:
    """A line of flatout's own steps.jsonl."""
    if not isinstance(value, dict) or not {"attempt", "padded_tokens", "spans"} <= value.keys():
        return None
    try:
        step = typed(StepRecord, value, source="steps.jsonl")
    except BadFile:
        return None
    row = {
        "step": float(step.step),
        "seconds": step.seconds if step.profiled else step.training_s,
        "tokens": float(step.tokens),
    }
    if not step.tokens:  # nobody counted them
        del row["tokens"]
    more = {
        "loss": step.loss,
        "lr": step.extra.lr,
        "grad_norm": step.extra.grad_norm,
        "data_s": step.phases.get("data"),
        "memory_gib": step.memory.get("peak_gib"),
    }
    row |= {name: number for name, number in more.items() if number is not None}
    if step.memory.get("total_gib") and "peak_gib" in step.memory:
        row["memory_share"] = step.memory["peak_gib"] / step.memory["total_gib"]
    return row


def _flat(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested objects as a/b: verl's file logger keeps its numbers under `data`."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, "" if key in ("data", "metrics") else f"{before}{key}/")
        else:
            flat[f"{before}{key}"] = item
    return flat


def _csv(text: str) -> Log | None:
    head = text.split("\n", 1)[0]
    if "," not in head or "=" in head or not canonical(dict.fromkeys(map(str.strip, head.split(",")), 1.0)):
        return None
    try:
        rows = [canonical(row) for row in csv.DictReader(text.splitlines()) if None not in row]
    except csv.Error:
        return None
    return Log(kind="CSV", rows=[row for row in rows if row.keys() - _NAMES_OF_A_STEP])


# -- what only the whole log tells


def _settled(log: Log) -> Log:
    """The same log, with numbers whose meaning depends on the others in it."""
    rows = [dict(row) for row in log.rows]
    printed = [row["mfu_as_printed"] for row in rows if math.isfinite(row.get("mfu_as_printed", math.nan))]
    # A share of the peak is at most 1, so a log with a larger one prints percent.
    percent = log.kind in _PERCENT_WITHOUT_SIGN or max(printed, default=0.0) > 1
    counted = [row["num_tokens"] for row in rows if "num_tokens" in row]
    of_the_run = len(counted) > 2 and all(a < b for a, b in pairwise(counted))
    of_a_gpu = log.per_gpu or (
        any("gpu_tokens_per_s" in row for row in rows) and not any("tokens_per_s" in row for row in rows)
    )
    for row in rows:
        if (as_printed := row.pop("mfu_as_printed", None)) is not None:
            row.setdefault("mfu", as_printed / 100 if percent else as_printed)
        if row.get("mfu", 1.0) <= 0:  # printed until there is a measurement
            del row["mfu"]
        if (tokens := row.pop("num_tokens", None)) is not None:
            row.setdefault("tokens_seen" if of_the_run else "tokens", tokens)
        if (speed := row.pop("gpu_tokens_per_s", None)) is not None and of_a_gpu:
            row.setdefault("tokens_per_s", speed)
        if "batch_rows" in row and "sequence_length" in log.once:
            row.setdefault("tokens", row["batch_rows"] * log.once["sequence_length"])
        if "memory_total_gib" in row and "memory_gib" in row and row["memory_total_gib"] > 0:
            row.setdefault("memory_share", row["memory_gib"] / row["memory_total_gib"])
        if row.keys() & {"reward", "kl"} and "loss" in row:
            row.setdefault("policy_loss", row.pop("loss"))
        if "steps_per_s" in row and row["steps_per_s"] > 0:
            row.setdefault("seconds", 1 / row["steps_per_s"])
    return replace(log, rows=rows, per_gpu=of_a_gpu)
