"""Run folders made by hand through the real recorder, for what cannot be trained here: an H200, a million steps.

python -m tests.insight.made FOLDER STEPS makes one to look at.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

from flatout.config.settings import CriteriaSettings
from flatout.cost import ModelShape
from flatout.hardware import named
from flatout.plan import Job, Plan, decide
from flatout.record import Outcome, Recorder, Run, Span, StepExtra, StepRecord
from flatout.record.events import Ended, Evaluated, HardwareFound, PathsActive, Planned, Saved, Started
from flatout.verdict import Speedometer, judge

BEGAN = 1_790_000_000.0
SHAPE = ModelShape(
    layers=12, hidden=768, heads=12, kv_heads=12, head_dim=64, intermediate=2048, vocab=50304, positions=1024
)
CRITERIA = {"tokens_per_s": 500000.0, "mfu": 0.45, "memory_share": 0.9, "loss_falling": True}
CONFIG_TEXT = "recipe: pretrain\nmodel: {layers: 12, hidden: 768, heads: 12, vocab: 50304}\n"


def h200_plan(steps: int) -> Plan:
    hardware = named("H200")
    return decide(
        Job(shape=SHAPE, hardware=hardware, sequence_length=1024, batch_tokens=65536, num_ranks=1, steps=steps)
    )


def make(path: Path, *, steps: int = 600, ended: bool = True, spike_at: int | None = None, **parts: Any) -> Run:
    """One attempt on an H200, recorded step by step; `parts` replaces what is written at the start."""
    plan = h200_plan(steps)
    kept = {
        "config_text": CONFIG_TEXT,
        "config": {"recipe": "pretrain", "train": {"lr": 6e-4, "steps": steps}, "criteria": CRITERIA},
        "plan": plan.to_json(),
        "hardware": plan.job.hardware.to_json(),
        "environment": {"python": "3.11.7", "packages": {"torch": "2.11.0"}, "driver": None},
    }
    run = Run.create(path, **{**kept, **parts})
    with run.recorder() as recorder:
        begin(recorder, plan, steps=steps)
        meter = Speedometer(plan.rates)
        clock, every = BEGAN, max(1, min(1000, steps // 8))
        for step in range(steps):
            record = h200_step(step, attempt=recorder.attempt, clock=clock, steps=steps, spike_at=spike_at)
            if math.floor(record.time) > math.floor(clock):
                recorder.sample(h200_sample(record.time, step=step))
            clock = record.time
            recorder.step(record)
            meter.see(record)
            if (step + 1) % every == 0:
                recorder.event(Evaluated(step=step + 1, val_loss=float(record.loss or 0.0) + 0.05))
                recorder.event(Saved(step=step + 1, checkpoint=f"step-{step + 1:08}"))
        if ended:
            end(recorder, steps=steps, seconds=clock - BEGAN, meter=meter)
    return run


def begin(recorder: Recorder, plan: Plan, *, steps: int) -> None:
    recorder.event(HardwareFound(facts=plan.job.hardware.to_json()))
    recorder.event(Planned(facts=plan.to_json()))
    granted = {"device": "NVIDIA H200", "precision": "bf16", "attention": "cudnn: takes bf16 heads of 64 here"}
    recorder.event(PathsActive(facts=granted))
    recorder.event(Started(folder="runs/h200", total_steps=steps))


def end(recorder: Recorder, *, steps: int, seconds: float, meter: Speedometer) -> None:
    outcome = Outcome(
        stopped_by="end",
        steps=steps,
        tokens=65536 * steps,
        hours=seconds / 3600,
        speed=meter.read(),
        loss_first_tenth=8.0,
        loss_last_tenth=3.4,
        peak_gib=25.0,
        memory_share=25.0 / 139.8,
    )
    verdicts = judge(CriteriaSettings(**CRITERIA), outcome)
    recorder.event(Ended(step=steps, outcome=outcome, verdicts=tuple(verdicts)))


def h200_step(step: int, *, attempt: int, clock: float, steps: int, spike_at: int | None) -> StepRecord:
    chance = random.Random(step)
    slow = 1.0 + 0.02 * chance.random() + (9.0 if step == 0 else 0.0)
    spent = {"data": 0.0016, "forward": 0.036, "backward": 0.071, "optimize": 0.0068, "record": 0.0004}
    spans = [Span(phase=phase, seconds=seconds * slow) for phase, seconds in spent.items()]
    if step and step % max(1, min(1000, steps // 8)) == 0:
        spans.append(Span(phase="eval", seconds=0.4))
    seconds = sum(span.seconds for span in spans) + 0.0003
    loss = 3.1 + 7.8 * math.exp(-6 * step / steps) + 0.15 * (chance.random() - 0.5)
    return StepRecord(
        attempt=attempt,
        step=step,
        time=clock + seconds,
        seconds=seconds,
        tokens=65536,
        padded_tokens=65536,
        loss=loss + (40.0 if step == spike_at else 0.0),
        spans=tuple(spans),
        memory={"allocated_gib": 2.1, "reserved_gib": 27.5, "peak_gib": 25.0, "total_gib": 139.8},
        utilisation={"gpu": 0.98, "cpu": 0.08 + 0.03 * chance.random(), "ram": 0.05, "gpu_memory": 0.2},
        extra=StepExtra(lr=6e-4 * min(1.0, (step + 1) / 100), grad_norm=0.8 + 0.1 * chance.random()),
    )


def h200_sample(time: float, *, step: int) -> dict[str, Any]:
    chance = random.Random(-step - 1)
    gpu = {
        "index": 0,
        "memory_gib": 29.0,
        "memory_total_gib": 139.8,
        "throttle": ["power_cap"] if step % 11 == 0 else [],
        "busy": 0.97 + 0.03 * chance.random(),
        "sm_active": 0.86 + 0.04 * chance.random(),
        "tensor_active": 0.43 + 0.03 * chance.random(),
        "dram_active": 0.52 + 0.03 * chance.random(),
        "power_w": 610 + 40 * chance.random(),
        "temperature_c": 58,
        "sm_clock_mhz": 1860,
    }
    return {"time": time, "ram_gib": 12.0, "ram_total_gib": 128.0, "process_rss_gib": 4.0, "cpu": 0.1, "gpus": [gpu]}


if __name__ == "__main__":
    make(Path(sys.argv[1]), steps=int(sys.argv[2]), spike_at=int(sys.argv[2]) * 2 // 3)
