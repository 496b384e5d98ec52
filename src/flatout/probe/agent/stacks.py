"""Stacks of the training thread: what it is doing, at which line of the user's code, and in whose loop."""

from __future__ import annotations

import linecache
import os
import re
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from .hooks import quietly

if TYPE_CHECKING:
    from .agent import Agent

SAMPLE_EVERY_S = 0.01
# How a stack shows what the host is at; the innermost frame that matches decides.
KINDS = tuple(
    (kind, re.compile(files), re.compile(functions))
    for kind, files, functions in (
        ("save", r"torch/serialization|safetensors|distributed/checkpoint", r"save|checkpoint_to|write_checkpoint"),
        (
            "log",
            r"/(wandb|tensorboard|tensorboardX|mlflow|comet_ml|logging|tqdm)/",
            r"^_?log(?!its|prob|sum)|add_(scalar|histo)",
        ),
        ("reward", r"/reward", r"reward|judge|grade|verif|score"),
        ("eval", r"$^", r"^_?(eval|evaluate|evaluation|validate|validation|estimate_loss)|_eval"),
        ("generate", r"transformers/generation", r"^_?(generate|rollout|sample_completions)"),
        (
            "data",
            r"torch/utils/data|/datasets/",
            r"batch|collate|__getitem__|token|encode|augment|transform|load|pad|fetch",
        ),
    )
)
LOG_LINE = re.compile(r"\bprint\(|\.write\(|flush|fsync|json\.dump|logger?\.|\.log\(|savefig")
FRAMEWORKS = (
    ("litgpt", "/litgpt/"),
    ("trl", "/trl/trainer/"),
    ("trainer", "/transformers/trainer.py"),
    ("lightning", "/lightning/"),
    ("lightning", "/pytorch_lightning/"),
    ("accelerate", "/accelerate/optimizer.py"),
)
_OWN = os.path.dirname(__file__) + os.sep
_NOT_USERS = (
    *("<", _OWN, os.path.dirname(os.__file__) + os.sep),
    *(os.path.join(prefix, "lib") + os.sep for prefix in (sys.prefix, sys.base_prefix)),
)


class Sampler:
    """Samples the training thread's stack a hundred times per second and counts the locations by phase."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self._stopping = threading.Event()

    def start(self) -> None:
        """Begins to sample; what was sampled before is dropped."""
        self.counts, self._stopping = Counter(), threading.Event()
        threading.Thread(target=self._loop, args=(self._stopping,), name="flatout-sampler", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()

    def _loop(self, stopping: threading.Event) -> None:
        look = quietly(self._look)
        while not stopping.wait(SAMPLE_EVERY_S):
            look()

    def _look(self) -> None:
        frame = sys._current_frames().get(self.agent.thread)
        phase = self.agent.timeline.phase
        if frame is not None:
            self.counts[(phase, *kind_and_site(frame))] += 1


def is_users(filename: str) -> bool:
    return not filename.startswith(_NOT_USERS) and "site-packages" not in filename


def kind_and_site(frame: Any) -> tuple[str, str]:
    """What the stack is at, and the innermost line of the user's own code in it."""
    kind = site = ""
    while frame is not None:
        filename, function = frame.f_code.co_filename, frame.f_code.co_name
        if not filename.startswith(_OWN):
            users = is_users(filename)
            if not site and users:
                site = f"{filename}:{frame.f_lineno} in {function}"
                if not kind and LOG_LINE.search(linecache.getline(filename, frame.f_lineno)):
                    kind = "log"
            if not kind:
                kind = next((k for k, files, names in KINDS if files.search(filename) or names.search(function)), "")
        frame = frame.f_back
    return kind, site


def user_site(skip: int = 1) -> str:
    """The line of the user's own code that is running now."""
    frame: Any = sys._getframe(skip)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def framework_of_stack() -> str:
    """Whose loop called us."""
    frame: Any = sys._getframe(1)
    found = set()
    while frame is not None:
        found |= {name for name, part in FRAMEWORKS if part in frame.f_code.co_filename}
        # TRL's trainers inherit the loop of transformers, so only the object tells them apart.
        if "trainer" in found and any(
            c.__module__.startswith("trl.") for c in type(frame.f_locals.get("self")).__mro__
        ):
            found.add("trl")
        frame = frame.f_back
    return next((name for name, _ in FRAMEWORKS if name in found), "torch")
