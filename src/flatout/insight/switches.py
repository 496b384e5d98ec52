"""The optimizations of the five guides as named switches, with what the guides claim for each.

A switch has a value `before` (the guides' starting point) and, in the full plan, the value that the plan chose. Some
calls that guides recommend are not settings of flatout, because they do nothing for a transformer or cost time. They
are here as code that a trial runs first, so that this can be shown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flatout.config import to_mapping
from flatout.config.recipes import RECIPES
from flatout.config.settings import Settings
from flatout.insight.compare import flatten

# Numerics: the same training with other rounding, so the loss must stay equal. Recipe: another training.
Kind = Literal["numerics", "recipe"]
PLAN, PRESET, TRAIN = "plan.", "plan.preset", "train."
LR, WARMUP, SCHEDULE = "train.lr", "train.warmup_steps", "train.schedule"
# The setting of concurrent sequences.
ROWS = "sample.rows"
# Decisions that follow from others, and from the sizes of a recipe.
FOLLOW = ("plan.accumulation", "plan.loss_chunk")
FOLLOW_SIZES = (*FOLLOW, "plan.micro_batch")
# A starting point of the micro-batch and of concurrent sequences.
EIGHTH = "an eighth of the plan's"


@dataclass(frozen=True, kw_only=True)
class Switch:
    name: str
    task: str  # its number in the list of the guides' capabilities
    claim: str  # of the guides
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)  # where it is not the plan's choice
    code: str = ""  # for calls that are not settings: what runs before the command where the switch is on
    code_before: str = ""  # the same, where it is off
    kind: Kind = "numerics"
    trains: bool = True  # whether it changes how a model is trained
    samples: bool = False  # whether it changes how completions are generated
    needs_gpu: bool = False  # where no setting of the plan says so
    compiles: bool = False  # it takes time at the start, which has to pay off
    some_steps: bool = False  # it costs or saves time in some steps only, which a median would not show
    on_request: bool = False  # measured only if it is named, because its trials take minutes


_EMPTY_CACHE = """
import torch
from flatout.engine.step import Engine
_end_step = Engine.end_step
def _end_and_empty(self):
    _end_step(self)
    if torch.cuda.is_available() and self._taken % 10 == 0:
        torch.cuda.empty_cache()
Engine.end_step = _end_and_empty
"""

_PLAIN_SAMPLER = """
from flatout.sample import generate
generate.no_kernels = lambda device: "requested"
"""

_BENCHMARK = "import torch\ntorch.backends.cudnn.benchmark = True"

SWITCHES = (
    Switch(
        name="mixed precision",
        task="T01-T03",
        claim="1.5 to 3 times as fast",
        before={"plan.precision": "fp32"},
        samples=True,
    ),
    Switch(name="TF32", task="T04", claim="1.2 to 1.5 times on Ampere and later", before={"plan.tf32": False}),
    Switch(name="8-bit matmuls", task="T05", claim="2 times as fast on an H100", before={"plan.fp8": False}),
    Switch(name="no recomputation", task="T08", claim="20 to 30 % faster", before={"plan.recompute": "full"}),
    Switch(name="micro-batch", task="T06", claim="4 to 8 times the GPU use", before={"plan.micro_batch": EIGHTH}),
    Switch(
        name="fused kernels",
        task="T11",
        claim="none",
        before=dict.fromkeys(("plan.fused_qkv", "plan.fused_mlp", "plan.fused_loss"), False),
    ),
    Switch(name="attention kernel", task="T11", claim="no figure", before={"plan.attention": "math"}),
    Switch(
        name="torch.compile",
        task="T09",
        claim="1.2 to 1.5 times as fast",
        before={"plan.compile": "none"},
        after={"plan.compile": "default"},
        compiles=True,
    ),
    Switch(
        name="torch.compile max-autotune",
        task="T09",
        claim="no figure",
        before={"plan.compile": "none"},
        after={"plan.compile": "max-autotune"},
        compiles=True,
        on_request=True,
    ),
    Switch(name="CUDA graphs", task="T09", claim="no figure", before={"plan.graphs": False}),
    Switch(name="fused optimizer", task="T10", claim="faster, no figure", before={"plan.fused_optimizer": False}),
    Switch(
        name="data loader",
        task="T12, T14",
        claim="1.5 to 5 times as fast",
        before={"plan.workers": 0, "plan.prefetch": 1, "plan.pin_memory": False},
    ),
    Switch(
        name="concurrent sequences",
        task="T06",
        claim="6 to 10 times as fast",
        before={ROWS: EIGHTH},
        trains=False,
        samples=True,
    ),
    Switch(
        name="sampling kernels and CUDA graphs",
        task="T11",
        claim="none",
        code_before=_PLAIN_SAMPLER,
        trains=False,
        samples=True,
        needs_gpu=True,
    ),
    Switch(name="expandable segments", task="T15", claim="no figure", before={"plan.expandable_segments": False}),
    Switch(
        name="manual garbage collection", task="T15", claim="none", before={"plan.manual_gc": False}, some_steps=True
    ),
    Switch(
        name="rare logging",
        task="T19",
        claim="2 to 5 % faster",
        before={"log.every": 10},
        after={"log.every": 50},
        some_steps=True,
    ),
    Switch(
        name="cudnn.benchmark",
        task="T16",
        claim="10 to 20 % faster",
        code=_BENCHMARK,
    ),
    Switch(
        name="empty_cache every 10 steps",
        task="T16",
        claim="less fragmentation, 50 ms a call",
        code=_EMPTY_CACHE,
        some_steps=True,
    ),
)


def recipe_changes(settings: Settings) -> list[Switch]:
    """What guides change in the training itself, each with the value from before: a quarter where it is a size."""
    train, data, rl, sample = settings.train, settings.data, settings.rl, settings.sample
    if RECIPES[settings.recipe].samples:
        return []
    if RECIPES[settings.recipe].rolls_out:
        unit, fewest = len(rl.tasks) * rl.updates, 1 if rl.algorithm == "ppo" else 2
        claim = "24 times as fast, all three together"
        sizes = [
            ("more prompts", claim, {"rl.prompts": max(unit, rl.prompts // 4 // unit * unit)}),
            ("longer completions", claim, {"sample.max_tokens": max(1, sample.max_tokens // 4)}),
            ("more samples per prompt", claim, {"rl.samples": max(fewest, rl.samples // 4)}),
        ]
    else:
        length = data.sequence_length
        claim, batch = "4 to 8 times the GPU use", max(1, train.batch_tokens // length // 4) * length
        sizes = [
            ("larger batch", claim, {"train.batch_tokens": batch}),
            ("longer sequences", "no figure", {"data.sequence_length": length if length % 4 else length // 4}),
        ]
    changes: list[tuple[str, str, str, dict[str, Any]]] = [
        *(("T21", *size) for size in sizes),
        ("T17", "higher learning rate", "faster convergence", {LR: train.lr * 2 / 3}),
        ("T17", "cosine with warm-up", "2 epochs instead of 3", {SCHEDULE: "constant", WARMUP: 0}),
        ("T18", "gradient clipping", "more stable", {"train.clip": None}),
    ]
    own = dict(flatten(to_mapping(settings)))
    return [
        Switch(name=name, task=task, claim=claim, before=before, after={key: own[key] for key in before}, kind="recipe")
        for task, name, claim, before in changes
    ]


def before_of(switch: Switch, full: Mapping[str, Any]) -> dict[str, Any]:
    """The values where the switch is off."""
    found = dict(switch.before)
    if found.get(ROWS) == EIGHTH:
        found[ROWS] = max(1, (full.get(ROWS) or 8) // 8)
    if found.get("plan.micro_batch") == EIGHTH:
        size, sequences = full["micro_batch"], full["micro_batch"] * full["accumulation"]
        found["plan.micro_batch"] = max(one for one in range(1, max(1, size // 8) + 1) if sequences % one == 0)
    return found


def planned_of(switch: Switch, full: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the full plan has."""
    return {key: full.get(key.removeprefix(PLAN), switch.after.get(key)) for key in switch.before}


def after_of(switch: Switch, full: Mapping[str, Any]) -> dict[str, Any]:
    """The values where the switch is on: its own, or those that the plan chose."""
    return planned_of(switch, full) | dict(switch.after)


def changes(switch: Switch, full: Mapping[str, Any]) -> bool:
    """Whether the switch, turned on, differs from the guides' starting point here."""
    return bool(switch.code or switch.code_before) or before_of(switch, full) != after_of(switch, full)


def of_baseline(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, without: Collection[str]) -> list[Switch]:
    """A switch for every setting, by dotted key, in which a configuration differs from a baseline.

    `without` has those that every trial sets itself.
    """
    return [
        Switch(
            name=key,
            task="",
            claim="none",
            before={key: value},
            after={} if key.startswith(PLAN) and key != PRESET else {key: ours.get(key)},
            kind="numerics" if key.startswith((PLAN, "log.")) else "recipe",
            samples=True,
        )
        for key, value in theirs.items()
        if value != ours.get(key) and key not in (*FOLLOW, *without) and not key.startswith("criteria.")
    ]


def applies(switch: Switch, settings: Settings) -> bool:
    """Whether trials of a recipe can show it: recipe rl trains and samples, and of recipe rft trials only sample."""
    recipe = RECIPES[settings.recipe]
    return (switch.trains and not recipe.samples) or (switch.samples and (recipe.samples or recipe.rolls_out))
