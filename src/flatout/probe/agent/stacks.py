"""Stacks of the script's threads: what they are doing, at which line of the user's code, and in whose loop."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import re
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .hooks import quietly

if TYPE_CHECKING:
    from .agent import Agent

# Seconds between two samples: a hundredth of a step, within these bounds. Every sample takes the GIL from the script.
SHORTEST_S, LONGEST_S = 0.01, 0.05
# Every tenth look includes the other threads; their CPU time covers the time between.
OTHERS_EVERY = 10
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
_QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")
# A line that updates parameters without an optimizer, and functions of torch that make a model or an optimizer.
UPDATE_LINE = re.compile(r"\.grad\b|\.data\.(add|sub|mul|copy|addc\w+)_\(|\.data(\[.*\])? *[-+*/]?= ")
MAKES, MAKES_IN = re.compile(r"^__init__$|^reset_parameters$|^_init_group$"), re.compile(r"torch/(nn|optim)/")
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
    """Samples the training thread's stack, a hundred times per second or per step, and counts the locations by phase.

    Every tenth time it also looks at the script's other threads: those that use the CPU compete for the GIL.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.others = Others(agent)
        self._stopping = threading.Event()

    def start(self, step_s: float) -> None:
        """Begins to sample a script whose steps take this long; what was sampled before is dropped."""
        self.counts, self.others, self._stopping = Counter(), Others(self.agent), threading.Event()
        every = min(max(step_s / 100, SHORTEST_S), LONGEST_S)
        threading.Thread(target=self._loop, args=(self._stopping, every), name="flatout-sampler", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()

    def _loop(self, stopping: threading.Event, every: float) -> None:
        look, look_at_others, looks = quietly(self._look), quietly(self.others.look), 0
        while not stopping.wait(every):
            look()
            looks += 1
            if looks % OTHERS_EVERY == 0:
                look_at_others()

    def _look(self) -> None:
        frame = sys._current_frames().get(self.agent.thread)
        phase = self.agent.timeline.phase
        if frame is not None:
            self.counts[(phase, *kind_and_site(frame))] += 1


@dataclass
class Seen:
    """A thread: its name, its CPU seconds when it was first seen and since then, and where it spent them."""

    name: str
    first_s: float
    spent_s: float = 0.0
    places: Counter[tuple[str, str]] = field(default_factory=Counter)


class Others:
    """The script's own threads besides the training thread."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._began = self._now = time.monotonic()
        self._seen: dict[int, Seen] = {}  # by the thread's native id

    def look(self) -> None:
        frames, self._now = sys._current_frames(), time.monotonic()
        for thread in threading.enumerate():
            number, frame = thread.native_id, frames.get(thread.ident or 0)
            if thread.ident == self.agent.thread or thread.name.startswith("flatout-") or number is None:
                continue
            now = cpu_seconds(number)
            if frame is None or now is None:
                continue
            seen = self._seen.setdefault(number, Seen(thread.name, now))
            if now - seen.first_s > seen.spent_s:
                seen.places[kind_and_site(frame)] += 1
            seen.spent_s = now - seen.first_s

    def busiest(self, most: int = 3) -> list[dict[str, Any]]:
        """The threads that run the user's code and use the CPU most, with their share of the time."""
        seconds, found = max(self._now - self._began, 1e-9), []
        # The sampler goes on meanwhile, so this works on copies.
        for seen in sorted(self._seen.copy().values(), key=lambda thread: -thread.spent_s):
            (kind, site), _ = next(iter(seen.places.copy().most_common(1)), (("", ""), 0))
            if site:
                found.append({"name": seen.name, "share": seen.spent_s / seconds, "kind": kind, "site": site})
        return found[:most]


def cpu_seconds(thread: int) -> float | None:
    """The CPU time of a thread of this process by its number; None where Linux does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/self/task/{thread}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return None


def is_users(filename: str) -> bool:
    return not filename.startswith(_NOT_USERS) and "site-packages" not in filename


@functools.lru_cache(maxsize=8192)
def _about(filename: str, function: str) -> tuple[bool, str]:
    """Whether a function is the user's own, and what it is at; remembered, because every sample asks for each frame."""
    if filename.startswith(_OWN):
        return False, ""
    kind = next((k for k, files, names in KINDS if files.search(filename) or names.search(function)), "")
    if not kind and MAKES.search(function) and MAKES_IN.search(filename):
        kind = "make"
    return is_users(filename), kind


@functools.lru_cache(maxsize=8192)
def _line_kind(filename: str, line: int) -> str:
    text = _QUOTED.sub("", linecache.getline(filename, line))
    return "log" if LOG_LINE.search(text) else "update" if UPDATE_LINE.search(text) else ""


def kind_and_site(frame: Any) -> tuple[str, str]:
    """What the stack is at, and the innermost line of the user's own code in it."""
    kind = site = ""
    while frame is not None and not (kind and site):
        code = frame.f_code
        users, about = _about(code.co_filename, code.co_name)
        if users and not site:
            site = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
            kind = kind or _line_kind(code.co_filename, frame.f_lineno)
        kind = kind or about
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
