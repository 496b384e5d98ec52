"""A stand-in for `flatout train`: a run folder whose step times follow from the settings, in a tenth of a second.

Real processes and real run folders, so that searches can be killed and resumed in tests. FAILS, in the environment, has
settings that crash, hang or run out of memory: {"plan.fused_optimizer=false": "hang"}.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from flatout.config import load
from flatout.record import Run, Span, StepRecord

PLANNED = {
    "precision": "bf16",
    "micro_batch": 8,
    "accumulation": 2,
    "recompute": "none",
    "compile": "none",
    "attention": "math",
    "fused_qkv": False,
    "fused_mlp": False,
    "fused_loss": False,
    "fp8": False,
    "tf32": False,
    "graphs": False,
    "fused_optimizer": True,
    "workers": 2,
    "prefetch": 2,
    "pin_memory": False,
    "expandable_segments": False,
    "manual_gc": True,
}
# How much longer a step takes with these decisions; the loss does not depend on them.
FACTORS = {
    ("precision", "fp32"): 2.0,
    ("recompute", "full"): 1.3,
    ("recompute", "selective"): 1.1,
    ("compile", "default"): 0.9,
    ("fused_optimizer", False): 1.1,
    ("workers", 0): 1.05,
}
NOISE = 0.004


def factor(decisions: Mapping[str, object]) -> float:
    found = math.prod(FACTORS.get((name, value), 1.0) for name, value in decisions.items())
    return found * (1 + 1 / float(str(decisions["micro_batch"])))


def does_not_fit(decisions: Mapping[str, object]) -> bool:
    return int(str(decisions["micro_batch"])) * (2 if decisions["recompute"] == "none" else 1) > 16


def main() -> None:
    config, *given = sys.argv[1:]
    run, given = Path(given[given.index("--run") + 1]), given[: given.index("--run")]
    with Path(os.environ["STARTED"]).open("a") as file:
        file.write(f"{os.getpid()}\n")
    for setting, how in json.loads(os.environ.get("FAILS", "{}")).items():
        if setting in given:
            fail(how)
    settings = load(config, overrides=given).settings
    pins = {name: getattr(settings.plan, name) for name in PLANNED}
    decisions = PLANNED | {name: value for name, value in pins.items() if value is not None}
    decisions["accumulation"] = 16 // int(decisions["micro_batch"])
    if does_not_fit(decisions):
        fail("memory")
    chance = random.Random(str(run))
    plan = {"decisions": decisions, "reasons": dict.fromkeys(decisions, "")}
    made = Run.create(run, config_text="", config={"recipe": "pretrain"}, plan=plan, hardware={}, environment={})
    lr = abs(math.log(settings.train.lr / 1e-3))
    with made.recorder() as recorder:
        drawn = random.Random(settings.seed)
        drift = math.exp(chance.gauss(0, NOISE))
        for step in range(settings.train.steps or 0):
            seconds = 0.1 * factor(decisions) * drift * math.exp(chance.gauss(0, NOISE))
            recorder.step(
                StepRecord(
                    attempt=recorder.attempt,
                    step=step,
                    time=time.time(),
                    seconds=seconds,
                    tokens=1000,
                    padded_tokens=1000,
                    loss=(3 + lr + drawn.gauss(0, 0.1)),
                    spans=(Span(phase="forward", seconds=seconds),),
                    memory={"peak_gib": 2.0},
                )
            )


def fail(how: str) -> None:
    if how == "hang":
        time.sleep(3600)
    if how == "memory":
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    sys.exit("ValueError: this is the last line")


if __name__ == "__main__":
    main()
