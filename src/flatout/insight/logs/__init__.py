"""Diagnoses the training log of another tool (`flatout doctor --log FILE`), and names what the log does not contain.

`formats` reads the log, `names` knows what its numbers are called, `trend` judges losses and speeds over the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from flatout import hardware
from flatout.insight.diagnose import ranked, verdict_of
from flatout.insight.diagnose.health import loss_finding
from flatout.insight.diagnose.host import finding_of
from flatout.insight.diagnose.limit import FAR_BELOW, too_good
from flatout.insight.logs import causes
from flatout.insight.logs.formats import OUTSIDE_A_LOOP, Log, read, size
from flatout.insight.logs.names import NAMES
from flatout.insight.logs.trend import flat_loss, skipped, slowed, target
from flatout.record import Diagnosis, Finding
from flatout.words import duration, number

__all__ = ["Log", "diagnose", "read"]

# What a dense model on one GPU usually reaches; below it, a log without a cause is not called healthy.
_USUAL_MFU = 0.3
# A finding with one of these says why the speed is low.
_OF_SPEED = (
    "data-starvation",
    "small-batch",
    "generation-batch",
    "generation-bound",
    "fp32-matmul",
    "needless-recompute",
)


def diagnose(
    path: Path, *, on: str | None = None, params: str | None = None, target_loss: float | None = None
) -> Diagnosis:
    log = read(path)
    machine = hardware.parse(on) if on else None
    parameters = size(params) if params else log.once.get("parameters")
    limit = _limit(log, machine=machine, parameters=parameters)
    if target_loss is not None:
        limit["target"] = target(log, target_loss)
    limit["wrong"] += _impossible(log, limit, machine=machine, parameters=parameters)
    findings = ranked(_findings(log, limit, machine=machine))
    verdict = "; ".join([_verdict(log, limit, findings), *limit["wrong"]])
    return Diagnosis(verdict=verdict, limit=limit, findings=findings)


def _verdict(log: Log, limit: dict[str, Any], findings: tuple[Finding, ...]) -> str:
    """Only a log with a usual MFU and without a finding is called healthy."""
    known = _called(log)
    if limit["mfu"] is None and [found.cause for found in findings] == ["low-mfu"]:
        return f"{known}: no cause found, but {_speed(limit)}"
    if findings:
        return f"{known}: {verdict_of(findings, limit)}"
    if limit["mfu"] is None or limit["mfu"] > 1:
        missing = limit["missing"][0] if limit["missing"] else "a speed above 0"
        return f"{known}: its speed cannot be judged; {_speed(limit)}. Missing: {missing}"
    if limit["mfu"] < _USUAL_MFU:
        return f"{known}: no cause found, but a dense model on one GPU usually reaches 30 % to 60 %; {_speed(limit)}"
    return f"{known} shows no problem; {_speed(limit)}"


def _called(log: Log) -> str:
    called = f"{'an' if log.kind == 'nvidia-smi' else 'a'} {log.kind}"
    if log.kind not in OUTSIDE_A_LOOP:
        called += f" log of {len(log.rows)} lines" if len(log.rows) > 1 else " log"
    return f"{called} from before and after a change (judged: before)" if log.claimed else called


def _impossible(
    log: Log, limit: dict[str, Any], *, machine: hardware.Hardware | None, parameters: float | None
) -> list[str]:
    """Figures claimed for after a change that the machine cannot reach."""
    claimed, speed, mfu = log.claimed.get("tokens_per_s"), limit["tokens_per_s"], limit["mfu"]
    if claimed and speed and mfu and (share := mfu * claimed / speed) > 1:
        return [
            f"{claimed:,.0f} tokens/s, as expected after the change, would be an MFU of {share:.0%} with the same "
            "model and machine: that number is wrong"
        ]
    if (
        claimed
        and parameters
        and machine is not None
        and (claim := too_good(claimed, parameters=parameters, hardware=machine))
    ):
        return [claim]
    return []


# -- the speed and its limit


def _limit(log: Log, *, machine: hardware.Hardware | None, parameters: float | None) -> dict[str, Any]:
    tokens_per_s, how = _tokens_per_s(log)
    mfu, mfu_how = log.steady("mfu"), "as the log says"
    peak = None if machine is None else machine.peak_flops.get("bf16") or machine.peak_flops.get("fp16")
    num = 1 if machine is None or log.per_gpu else max(1, machine.num_gpus)
    if mfu is None and peak and (tflops := log.steady("tflops")):
        mfu, mfu_how = tflops * 1e12 / peak, "logged TFLOP/s of a GPU over its bf16 peak"
    if mfu is None and tokens_per_s and parameters and peak:
        mfu, mfu_how = 6 * parameters * tokens_per_s / (peak * num), "6 x weights x tokens/s over the bf16 peak"
    ceiling = None if not (parameters and peak) else peak * num / (6 * parameters)
    wrong = []
    if mfu is not None and mfu > 1:
        wrong.append(f"an MFU of {mfu:.0%} is above the peak of the device: that number is wrong")
    if tokens_per_s and parameters and machine is not None and not wrong:
        one = replace(machine, num_gpus=num)
        wrong += [claim] if (claim := too_good(tokens_per_s, parameters=parameters, hardware=one)) else []
    limit = {
        "kind": log.kind,
        "lines": len(log.rows),
        "tokens_per_s": tokens_per_s,
        "per_gpu": log.per_gpu,
        "step_s": log.steady("seconds"),
        "ceiling_tokens_per_s": ceiling,
        "share": mfu,
        "mfu": mfu,
        "gpu_util": log.steady("gpu_util"),
        "cpu_util": log.steady("cpu_util"),
        "epoch_s": log.steady("epoch_s") or log.steady("wall_s"),
        "source": how,
        "model": mfu_how if mfu is not None else "MFU unknown",
        "peak_flops": peak,
        "wrong": wrong,
        "missing": _missing(log, tokens_per_s=tokens_per_s, mfu=mfu, machine=machine, parameters=parameters),
    }
    return {**limit, "line": _speed(limit)}


def _tokens_per_s(log: Log) -> tuple[float | None, str]:
    if (logged := log.steady("tokens_per_s")) is not None:
        return logged, "logged" + (", of one GPU" if log.per_gpu else "")
    seconds = log.steady("seconds")
    tokens = log.steady("tokens") or log.once.get("tokens_per_step")
    if seconds and tokens:
        return tokens / seconds, "tokens per step over step time"
    seen = [row for row in log.rows if "tokens_seen" in row]
    if (timed := [row for row in seen if row.get("runtime")]) and timed[-1]["runtime"] > 0:
        return timed[-1]["tokens_seen"] / timed[-1]["runtime"], "tokens seen over runtime"
    placed = [row for row in seen if "step" in row]
    if seconds and len(placed) > 1 and (steps := placed[-1]["step"] - placed[0]["step"]) > 0:
        per_step = (placed[-1]["tokens_seen"] - placed[0]["tokens_seen"]) / steps
        return per_step / seconds, "tokens seen per step over step time"
    samples, length = log.steady("samples_per_s"), log.once.get("sequence_length")
    if samples and length:
        return samples * length, "samples/s x sequence length"
    return None, "not in the log"


def _speed(limit: dict[str, Any]) -> str:
    """The speed in one line."""
    speed, step_s = limit["tokens_per_s"], limit["step_s"]
    if speed is not None:
        of = " of one GPU" if limit["per_gpu"] else ""
        said = f"{number(speed)} tokens/s{of} ({limit['source']})"
    elif step_s:
        said = f"{number(step_s)} s per step; tokens/s unknown"
    elif limit["epoch_s"]:
        said = f"{duration(limit['epoch_s'])} in all; tokens/s unknown"
    else:
        said = "the log does not show the speed"
    said += "" if limit["gpu_util"] is None else f", GPU busy {limit['gpu_util']:.0%} of the time"
    return said + ("" if limit["mfu"] is None else f", MFU {limit['mfu']:.1%} ({limit['model']})")


def _missing(
    log: Log, *, tokens_per_s: float | None, mfu: float | None, machine: Any, parameters: float | None
) -> list[str]:
    """What would have to be known to say more."""
    lacks = []
    if tokens_per_s is None:
        wanted = "tokens per step" if log.steady("seconds") else "tokens/s, or tokens and seconds of a step"
        wanted = "the sequence length, for tokens/s" if log.steady("samples_per_s") else wanted
        trainer = ": TrainingArguments(include_num_input_tokens_seen=True)" if log.kind in _TRAINERS else ""
        lacks.append(f"{wanted}{trainer or ' (`flatout doctor -- COMMAND` measures both)'}")
    if mfu is None:
        lacks += [] if machine is not None else ["the machine, for MFU: --on NAME"]
        lacks += [] if parameters or log.values("tflops") else ["the model's size, for MFU: --params 124M"]
    lacks += causes.suspicions(log, machine=machine)
    if not (log.values("data_s") or log.values("gen_s")):
        lacks.append("where a step's time goes: run it as `flatout doctor -- COMMAND`")
    if not log.values("memory_share") and not (log.values("memory_gib") and machine is not None):
        lacks.append("the GPU's memory: how much is used, of how much")
    if not log.values("grad_norm"):
        lacks.append("gradient norms, to judge stability")
    return lacks


_TRAINERS = ("Hugging Face Trainer", "Hugging Face Trainer state", "TRL")


# -- what can be concluded


def _findings(log: Log, limit: dict[str, Any], *, machine: hardware.Hardware | None) -> Iterable[Finding]:
    # A policy's loss may rise and change its sign: only one that is no number says something.
    losses = log.values("loss") or [x for x in log.values("policy_loss") if not math.isfinite(x)]
    lr = log.values("lr")
    at = [row.get("step") for row in log.rows if "loss" in row]
    health = loss_finding(losses, clipped=None, lr=lr[-1] if lr else None, steps=at if len(at) == len(losses) else ())
    yield from (found for found in (health, skipped(log)) if found)
    if health is None:
        yield from (found for found in (flat_loss(log), _rising_validation(log)) if found)
    if (slower := slowed(log)) is not None:
        yield slower
    of_speed = [*causes.findings(log, slow=(limit["mfu"] or 1.0) < FAR_BELOW, machine=machine), *_parts(log)]
    yield from of_speed
    if not any(found.cause in _OF_SPEED for found in of_speed):
        yield from (found for found in [_low_mfu(log, limit) or causes.idle_gpu(log)] if found)


def _parts(log: Log) -> Iterable[Finding]:
    """The parts of a step that take too large a share of it."""
    step = log.steady("seconds")
    for cause, name, least, sentence, fix in _PARTS:
        part = log.steady(name)
        if step and part and part / step >= least:
            share = part / step
            evidence = f"{part:.3g} of {step:.3g} s a step ({NAMES[name][0]} in the log)"
            yield finding_of(cause, sentence.format(share=f"{share:.0%}"), share, share * 0.8, [evidence], fix)


def _low_mfu(log: Log, limit: dict[str, Any]) -> Finding | None:
    mfu = limit["mfu"]
    if mfu is None or mfu >= FAR_BELOW:
        return None
    whose = "The actor's update" if log.kind == "verl" else "Training"
    return finding_of(
        "low-mfu",
        f"{whose} reaches {mfu:.1%} of the hardware's peak; the log does not show why.",
        None,
        None,
        [limit["line"], "a dense model on one GPU usually reaches 30 % to 60 %"],
        "measure one step: `flatout doctor -- COMMAND` gives its phases, precision, kernels and the GPU's idle time",
    )


def _rising_validation(log: Log) -> Finding | None:
    # Some tools repeat the last evaluation on every line.
    vals = [value for value, _ in groupby(log.values("val_loss"))]
    if len(vals) < 4 or not all(map(math.isfinite, vals)) or min(vals[-2:]) < vals[0]:
        return None
    return finding_of(
        "slow-convergence",
        f"The validation loss was {vals[0]:.4g} at first and is {vals[-1]:.4g} now.",
        None,
        None,
        [f"{len(vals)} evaluations in the log"],
        "as advice: check the learning rate, the warm-up, and whether the data is shuffled",
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
