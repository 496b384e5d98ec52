"""Reads the training log of another tool (`flatout doctor --log FILE`), and names what the log does not contain.

Every line of a known kind becomes a few named numbers: Hugging Face Trainer (trainer_state.json, printed dictionaries),
nanoGPT, nanochat, torchtitan, verl, JSON lines, CSV, and lines of `key=value` or `key: value`. Nothing is evaluated,
and a number that is not in the log is never made up: the diagnosis lists what is missing instead.
"""

from __future__ import annotations

import ast
import csv
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from flatout import hardware
from flatout.errors import UsageError
from flatout.files import BadFile, read_bytes
from flatout.insight.diagnose import ranked, verdict_of
from flatout.insight.diagnose.health import loss_finding
from flatout.insight.diagnose.limit import too_good
from flatout.record import Diagnosis, Finding

_WARM_LINES = 2  # compilation and filling caches
_MOST_BYTES = 200_000_000
# A printed line is shorter. What is matched against a longer one could take for ever, so it is no line of a log.
_LONGEST_LINE = 1 << 14
_LONGEST_NUMBER = 64
# Possessive throughout: a run of digits is looked at once.
_NUMBER = r"[-+]?(?:\d++(?:,\d++)*+(?:\.\d*+)?+(?:[eE][-+]?\d++)?+|nan|inf)"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

# What a number is called in one log or another.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "step": ("step", "iter", "iteration", "global_step", "training/global_step", "train/step"),
    "loss": (
        "loss",
        "train_loss",
        "train/loss",
        "loss/train",
        "loss_metrics/global_avg_loss",
    ),
    "policy_loss": ("actor/loss", "actor/pg_loss"),
    "val_loss": ("val_loss", "eval_loss", "val/loss", "eval/loss", "validation_loss", "validate loss"),
    "lr": ("lr", "learning_rate", "train/learning_rate", "actor/lr"),
    "grad_norm": ("grad_norm", "actor/grad_norm", "train/grad_norm", "gnorm"),
    "tokens_per_s": (
        "tok/sec",
        "tok/s",
        "tokens/s",
        "tokens/sec",
        "tokens_per_s",
        "tokens_per_sec",
        "tokens_per_second",
        "train_tokens_per_second",
        "tps",
        "throughput",
        "perf/throughput",
    ),
    "mfu": ("mfu", "bf16_mfu", "perf/mfu/actor", "train/mfu"),
    "seconds": (
        "dt",
        "time",
        "step_time",
        "time_per_step",
        "iter_time",
        "timing_s/step",
        "perf/time_per_step",
        "seconds",
    ),
    "tokens": ("tokens", "num_tokens", "perf/total_num_tokens", "tokens_per_step"),
    "tokens_seen": ("num_input_tokens_seen", "tokens_seen", "total_tokens"),
    "runtime": ("train_runtime",),
    "samples_per_s": ("train_samples_per_second", "samples_per_second", "samples/s"),
    "steps_per_s": ("train_steps_per_second", "it/s"),
    "gen_s": ("timing_s/gen",),
    "reward_s": ("timing_s/reward",),
    "eval_s": ("timing_s/testing",),
    "save_s": ("timing_s/save_checkpoint",),
    "data_s": ("timing_s/data", "data_time", "data_loading", "time_metrics/data_loading(s)"),
    "memory_share": ("memory_share",),
}
_CANON = {name: canon for canon, names in _NAMES.items() for name in names}


@dataclass(frozen=True, kw_only=True)
class Log:
    """What a log says: rows of named numbers, and what was printed once."""

    kind: str
    rows: Sequence[Mapping[str, float]]
    once: Mapping[str, float] = field(default_factory=dict)  # tokens_per_step, parameters, sequence_length
    per_gpu: bool = False  # its tokens a second are of one GPU

    def values(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]

    def steady(self, name: str) -> float | None:
        """The middle of what was logged after warm-up; of all, where there is little."""
        found = [value for value in self.values(name) if math.isfinite(value)]
        return median(found[_WARM_LINES:] or found) if found else None


def diagnose(path: Path, *, on: str | None = None, params: str | None = None) -> Diagnosis:
    log = read(path)
    machine = hardware.parse(on) if on else None
    parameters = _size(params) if params else log.once.get("parameters")
    limit = _limit(log, machine=machine, parameters=parameters)
    findings = ranked(_findings(log))
    said = verdict_of(findings, {"share": limit["mfu"]}) if findings else _healthy(limit)
    return Diagnosis(verdict="; ".join([said, *limit["wrong"]]), limit=limit, findings=findings)


def read(path: Path) -> Log:
    """The log, whichever kind it is."""
    try:
        text = _COLOURS.sub("", read_bytes(path, limit=_MOST_BYTES).decode(errors="replace"))
    except FileNotFoundError:
        raise UsageError(f"{path} cannot be read: there is no such file") from None
    except BadFile as error:
        raise UsageError(f"{error}: give a text file, or the relevant part of it") from None
    for reader in (_trainer_state, _json_lines, _csv, _lines):
        found = reader(text)
        if found is not None and found.rows:
            return found
    raise UsageError(
        f"{path} is not a known training log: give a Hugging Face Trainer, nanoGPT, nanochat, torchtitan, verl, JSON "
        "lines, CSV, or lines with a step and key=value or key: value"
    )


# -- what can be concluded


def _limit(log: Log, *, machine: hardware.Hardware | None, parameters: float | None) -> dict[str, Any]:
    tokens_per_s, how = _tokens_per_s(log)
    mfu, mfu_how = log.steady("mfu"), "as the log says"
    peak = None if machine is None else machine.peak_flops.get("bf16") or machine.peak_flops.get("fp16")
    num = 1 if machine is None or log.per_gpu else max(1, machine.num_gpus)
    if mfu is None and tokens_per_s and parameters and peak:
        mfu, mfu_how = 6 * parameters * tokens_per_s / (peak * num), "6 x weights x tokens/s over the bf16 peak"
    ceiling = None if not (parameters and peak) else peak * num / (6 * parameters)
    wrong = []
    if mfu is not None and mfu > 1:
        wrong.append(f"an MFU of {mfu:.0%} is above the peak of the device: that number is wrong")
    if tokens_per_s and parameters and machine is not None and not wrong:
        one = replace(machine, num_gpus=num)
        wrong += [claim] if (claim := too_good(tokens_per_s, parameters=parameters, hardware=one)) else []
    return {
        "kind": log.kind,
        "lines": len(log.rows),
        "tokens_per_s": tokens_per_s,
        "per_gpu": log.per_gpu,
        "ceiling_tokens_per_s": ceiling,
        "share": mfu if ceiling is None or tokens_per_s is None else tokens_per_s / ceiling,
        "mfu": mfu,
        "source": how,
        "model": mfu_how if mfu is not None else "MFU unknown",
        "peak_flops": peak,
        "wrong": wrong,
        "missing": _missing(log, tokens_per_s=tokens_per_s, mfu=mfu, machine=machine, parameters=parameters),
    }


def _tokens_per_s(log: Log) -> tuple[float | None, str]:
    if (logged := log.steady("tokens_per_s")) is not None:
        return logged, "logged" + (", of one GPU" if log.per_gpu else "")
    seconds = log.steady("seconds")
    tokens = log.steady("tokens") or log.once.get("tokens_per_step")
    if seconds and tokens:
        return tokens / seconds, "tokens per step over step time"
    seen = [(row["tokens_seen"], row["runtime"]) for row in log.rows if "tokens_seen" in row and row.get("runtime")]
    if seen:
        return seen[-1][0] / seen[-1][1], "tokens seen over runtime"
    samples, length = log.steady("samples_per_s"), log.once.get("sequence_length")
    if samples and length:
        return samples * length, "samples/s x sequence length"
    return None, "not in the log"


def _missing(
    log: Log, *, tokens_per_s: float | None, mfu: float | None, machine: Any, parameters: float | None
) -> list[str]:
    """What would have to be known to say more."""
    lacks = []
    if tokens_per_s is None:
        wanted = "tokens a step" if log.steady("seconds") else "tokens/s, or tokens and seconds of a step"
        trainer = (
            ": TrainingArguments(include_num_input_tokens_seen=True)" if log.kind.startswith("Hugging Face") else ""
        )
        lacks.append(f"{wanted}{trainer}")
    if mfu is None:
        lacks += [] if machine is not None else ["the machine, for MFU: --on NAME"]
        lacks += [] if parameters else ["the model's size, for MFU: --params 124M"]
    if not (log.values("data_s") or log.values("gen_s")):
        lacks.append("where a step's time goes: run it as `flatout doctor -- COMMAND`")
    if not log.values("grad_norm"):
        lacks.append("gradient norms, to judge stability")
    return lacks


def _findings(log: Log) -> Iterable[Finding]:
    # A policy's loss may rise and change its sign: only one that is no number says something.
    losses = log.values("loss") or [x for x in log.values("policy_loss") if not math.isfinite(x)]
    clipped = None  # a log does not say
    if found := loss_finding(losses, clipped=clipped, lr=log.values("lr")[-1] if log.values("lr") else None):
        yield found
    step = log.steady("seconds")
    for cause, name, least, sentence, fix in _PARTS:
        part = log.steady(name)
        if step and part and part / step >= least:
            share = part / step
            yield Finding(
                cause=cause,
                sentence=sentence.format(share=f"{share:.0%}"),
                share=share,
                gain=share * 0.8,
                status="estimated",
                evidence=(f"{part:.3g} of {step:.3g} s a step ({_NAMES[name][0]} in the log)",),
                fix=fix,
            )
    used = log.steady("memory_share")
    if used is not None and used < 0.5:
        yield Finding(
            cause="small-batch",
            sentence=f"Only {used:.0%} of the GPU's memory is used: a larger micro-batch would fit.",
            share=None,
            gain=None,
            status="estimated",
            evidence=("memory share as logged; a log does not show how much time it saves",),
            fix="double the micro-batch and halve accumulation until memory is about 80 % used; compare tokens/s",
        )
    vals = log.values("val_loss")
    if len(vals) >= 4 and all(map(math.isfinite, vals)) and min(vals[-2:]) >= vals[0]:
        yield Finding(
            cause="slow-convergence",
            sentence=f"The validation loss was {vals[0]:.4g} at first and is {vals[-1]:.4g} now.",
            share=None,
            gain=None,
            status="estimated",
            evidence=(f"{len(vals)} evaluations in the log",),
            fix="as advice: check the learning rate, the warm-up, and whether the data is shuffled",
        )


_PARTS = (
    (
        "data-starvation",
        "data_s",
        0.1,
        "{share} of a step waits for data.",
        "use more loader workers, or prepare the data",
    ),
    (
        "reward-bound",
        "reward_s",
        0.15,
        "{share} of a step computes rewards.",
        "compute rewards in parallel workers during generation",
    ),
    ("evaluation", "eval_s", 0.2, "{share} of a step is validation.", "trainer.test_freq higher"),
    ("checkpointing", "save_s", 0.2, "{share} of a step is saving.", "trainer.save_freq higher, or asynchronous saves"),
    (
        "generation-batch",
        "gen_s",
        0.6,
        "{share} of a step is generation.",
        "actor_rollout_ref.rollout.max_num_seqs and gpu_memory_utilization higher; enforce_eager=False",
    ),
)


def _healthy(limit: Mapping[str, Any]) -> str:
    speed = limit["tokens_per_s"]
    known = "it does not show the speed" if speed is None else f"{speed:,.0f} tokens/s"
    mfu = "" if limit["mfu"] is None else f", MFU {limit['mfu']:.1%}"
    return f"a {limit['kind']} log of {limit['lines']} lines shows no problem; {known}{mfu}"


def _size(text: str) -> float:
    match = re.fullmatch(r"(\d{1,40}(?:\.\d{0,40})?)\s*([KMBT]?)", text.strip(), re.IGNORECASE)
    size = float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2].upper()] if match else 0.0
    if not size:
        raise UsageError(f"--params {text[:_LONGEST_NUMBER]!r} is not a size: write 124M, 7B or a number")
    return size


# -- readers


def _canonical(values: Mapping[str, Any]) -> dict[str, float]:
    row: dict[str, float] = {}
    for key, value in values.items():
        name = _CANON.get(str(key).strip().lower())
        number = _number(value)
        if name is not None and number is not None:
            row.setdefault(name, number)
    if "mfu" in row and row["mfu"] > 1.5:  # in percent
        row["mfu"] /= 100
    return row


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and len(value) > _LONGEST_NUMBER:
        return None
    try:
        return float(value.replace(",", "")) if isinstance(value, str) else float(value)
    except (ValueError, OverflowError):
        return None


def _trainer_state(text: str) -> Log | None:
    if not text.lstrip().startswith("{") or "log_history" not in text:
        return None
    try:
        state = json.loads(text)
        rows = [_canonical(entry) for entry in state["log_history"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return Log(kind="Hugging Face Trainer state", rows=[row for row in rows if len(row) > 1])


def _json_lines(text: str) -> Log | None:
    rows = []
    for line in text.splitlines():
        if line.startswith("{") and '"' in line:
            try:
                row = _canonical(_flat(json.loads(line)))
            except (ValueError, RecursionError):
                continue
            if row.keys() - {"step"}:
                rows.append(row)
    return Log(kind="JSON lines", rows=rows) if rows else None


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
    if "," not in head or "=" in head or not any(cell.strip().lower() in _CANON for cell in head.split(",")):
        return None
    try:
        rows = [_canonical(row) for row in csv.DictReader(text.splitlines()) if None not in row]
    except csv.Error:
        return None
    return Log(kind="CSV", rows=[row for row in rows if row])


def _lines(text: str) -> Log | None:
    """Printed logs, line by line; the kind with the most lines wins."""
    found: dict[str, list[dict[str, float]]] = {}
    for line in re.split(r"[\r\n]+", text):
        if len(line) > _LONGEST_LINE:
            continue
        for kind, reader in _LINE_READERS:
            row = reader(line)
            if row:
                found.setdefault(kind, []).append(row)
                break
    if not found:
        return None
    # Evaluations of nanoGPT and the like are printed in lines of their own.
    beside = found.pop("evaluation", [])
    if not found:
        return None
    kind, rows = max(found.items(), key=lambda item: len(item[1]))
    return Log(kind=kind, rows=[*rows, *beside], once=_printed_once(text), per_gpu=kind in ("verl", "torchtitan"))


def _printed_once(text: str) -> dict[str, float]:
    once = {}
    for name, pattern in (
        ("tokens_per_step", r"(?:tokens per iteration will be|Total batch size|tokens per step)[^\d]{0,20}([\d,]+)"),
        ("parameters", r"number of parameters:?\s*([\d,.]+\s*[KMB]?)"),
        ("parameters", r"Number of (?:trainable )?parameters\s*[:=]\s*([\d,]+)"),
        ("parameters", r"[Mm]odel .{0,40}size: ([\d,]+) total parameters"),
        ("sequence_length", r"(?:seq_len|sequence[ _]length|block_size)\s*[:=]\s*([\d,]+)"),
    ):
        if name not in once and (match := re.search(pattern, text)):
            with suppress(UsageError):  # something else is printed there
                once[name] = _size(match[1].replace(",", "").replace(" ", "").rstrip("."))
    return once


def _of_nanogpt(line: str) -> dict[str, float] | None:
    match = re.search(rf"iter (\d++): loss ({_NUMBER}), time ({_NUMBER})ms(?:, mfu ({_NUMBER})%)?", line)
    if match is None:
        return None
    row = _numbers(step=match[1], loss=match[2], seconds=match[3], mfu=match[4])
    row |= {"seconds": row["seconds"] / 1e3} if "seconds" in row else {}
    # It prints -100 % until it has measured.
    mfu = row.pop("mfu", 0.0) / 100
    return row | ({"mfu": mfu} if mfu > 0 else {})


def _of_nanogpt_evaluation(line: str) -> dict[str, float] | None:
    match = re.search(rf"step (\d++): train loss {_NUMBER}, val loss ({_NUMBER})", line)
    return _numbers(step=match[1], val_loss=match[2]) if match else None


def _of_nanochat(line: str) -> dict[str, float] | None:
    step = re.search(r"step (\d++)(?:/\d++)? ", line)
    if step is None:
        return None
    printed = dict(re.findall(rf"\| ([\w/]++): ({_NUMBER})", line))
    mfu = next((value for name, value in printed.items() if re.fullmatch(r"(?:\w+_)?mfu", name)), None)
    row = _numbers(
        step=step[1], loss=printed.get("loss"), seconds=printed.get("dt"), tokens_per_s=printed.get("tok/sec"), mfu=mfu
    )
    if len(row) < 5:
        return None
    return row | {"seconds": row["seconds"] / 1e3, "mfu": row["mfu"] / 100}


def _numbers(**printed: str | None) -> dict[str, float]:
    """Those that are numbers."""
    return {name: number for name, text in printed.items() if (number := _number(text)) is not None}


def _of_torchtitan(line: str) -> dict[str, float] | None:
    if "tps:" not in line or "step:" not in line:
        return None
    row = _canonical(dict(re.findall(rf"(?<!\w)(\w++):\s++({_NUMBER})", line)))
    row.pop("mfu", None)
    mfu = re.search(rf"mfu:\s++({_NUMBER})%", line)
    memory = re.search(rf"memory:\s++{_NUMBER}GiB\(({_NUMBER})%\)", line)
    shares = _numbers(mfu=mfu[1] if mfu else None, memory_share=memory[1] if memory else None)
    return row | {name: value / 100 for name, value in shares.items()}


def _of_verl(line: str) -> dict[str, float] | None:
    if " - " not in line or not re.search(r"\bstep:\d+ - ", line):
        return None
    row: dict[str, float] = {}
    for key, value in re.findall(rf"(?<![\w/@.-])([\w/@.-]++):(?:np\.\w+\()?({_NUMBER})", line):
        row |= {k: v for k, v in _canonical({key: value}).items() if k not in row}
    return row if row.keys() & {"tokens_per_s", "seconds", "grad_norm"} else None


def _of_trainer(line: str) -> dict[str, float] | None:
    match = re.search(r"\{'[^{}]+\}", line)
    if match is None:
        return None
    try:
        value = ast.literal_eval(match[0])
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
    if not isinstance(value, dict):
        return None
    row = _canonical(value)
    # The summary's own loss is a mean over the run.
    return {k: v for k, v in row.items() if k != "loss"} if "train_loss" in value else row


def _of_pairs(line: str) -> dict[str, float] | None:
    """`step=10 loss=2.1 tok/s=5,000` and `step: 10 | loss: 2.1`."""
    pairs = re.findall(rf"(?<![\w/.-])([A-Za-z][\w/.-]*+)\s*+[=:]\s*+({_NUMBER})(ms)?(?=$|[\s,|;)%\]])", line)
    row: dict[str, float] = {}
    for key, value, milliseconds in pairs:
        named = _canonical({key: value})
        if milliseconds:
            named = {name: number / 1e3 for name, number in named.items()}
        row |= {k: v for k, v in named.items() if k not in row}
    return row if "step" in row and len(row) > 1 else None


_LINE_READERS = (
    ("nanoGPT", _of_nanogpt),
    ("evaluation", _of_nanogpt_evaluation),
    ("nanochat", _of_nanochat),
    ("torchtitan", _of_torchtitan),
    ("verl", _of_verl),
    ("Hugging Face Trainer", _of_trainer),
    ("key=value", _of_pairs),
)
