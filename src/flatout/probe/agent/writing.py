"""The agent's files: steps as lines, all else as one JSON object that is replaced as a whole."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from .facts import VARIABLES, flags_of, gpu_facts, graph_count, num_cores, trainer_arguments, version_of
from .hooks import ERRORS
from .tensors import number

if TYPE_CHECKING:
    from .agent import Agent


PACKAGES = ("transformers", "accelerate", "lightning", "trl", "datasets", "litgpt")
# The facts are written this often, so that whatever ends the script, few of them are lost.
FACTS_EVERY_S, PHASE_EVERY_S = 2.0, 2.0


class Writer:
    """Writes the steps once the device has passed them, and the facts."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.waiting: list[dict[str, Any]] = []  # steps whose device times are not read yet
        self._file: int | None = None
        self._facts_at = 0.0

    def tell_phases(self) -> None:
        """A thread that writes the present phase to a file from time to time, so that the doctor can tell the user."""
        while not self.agent.ended or self.agent.activity:
            with contextlib.suppress(OSError):
                self.write_phase()
            time.sleep(PHASE_EVERY_S)

    def write_phase(self) -> None:
        path = os.path.join(self.agent.settings.out, f"phase-{os.environ.get('RANK', '0')}-{self.agent.pid}.json")
        told = {
            "phase": self.agent.activity or self.agent.timeline.phase,
            "steps": self.agent.num_steps,
            "torch": str(self.agent.torch.__version__),
            "backwards": self.agent.backwards,
        }
        with open(path + ".tmp", "w") as file:
            json.dump(told, file)
        os.replace(path + ".tmp", path)

    def write_sometimes(self) -> None:
        if time.monotonic() - self._facts_at > FACTS_EVERY_S:
            self.write_facts("running")

    def write_ready(self, wait: bool = False) -> None:
        """Write the steps whose events the device has passed; on a CPU that is all of them.

        The first waits for the second: its forward passes were not followed yet, and they tell what its losses are.
        """
        while self.waiting and (wait or self.agent.num_steps > 0):
            line = self.waiting[0]
            spans = line["spans"]
            if spans and not spans[-1][2].query():
                if not wait:
                    return
                spans[-1][2].synchronize()
            self.waiting.pop(0)
            device: dict[str, float] = defaultdict(float)
            for phase, start, end in spans:
                with contextlib.suppress(RuntimeError):  # on another stream or device, and not passed there yet
                    device[phase] += start.elapsed_time(end) / 1e3
            line["device"] = dict(device)
            del line["spans"]
            for micro in line["micro"]:
                micro["real"] = number(micro["real"])
            known = [loss for loss in map(number, line["loss"]) if loss is not None]
            line["loss"] = sum(known) / (1 if self.agent.losses.in_parts else len(known)) if known else None
            self._append(line)

    def _append(self, line: dict[str, Any]) -> None:
        if self._file is None:
            path = os.path.join(self.agent.settings.out, f"steps-{self.agent.rank()}-{self.agent.pid}.jsonl")
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self.write_facts("running")
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def write_facts(self, state: str) -> None:
        self._facts_at = time.monotonic()
        torch = self.agent.torch
        facts = {
            **self.agent.facts,
            "state": state,
            "pid": self.agent.pid,
            "rank": self.agent.rank(),
            "world": int(os.environ.get("WORLD_SIZE", "1")),
            "argv": sys.argv,
            "python": sys.version.split()[0],
            "torch": str(torch.__version__),
            "versions": {name: version_of(name) for name in PACKAGES},
            "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
            "cores": num_cores(),
            "threads": torch.get_num_threads(),
            "flags": flags_of(torch),
            "trainer_arguments": trainer_arguments(),
            "totals": dict(self.agent.totals),
            "gpu": self.agent.facts.get("gpu") or (gpu_facts(torch) if self.agent.facts.get("cuda_used") else None),
            "forwards": [[*key, count] for key, count in self.agent.forwards.counts.most_common(200)],
            "generations": self.agent.hooks.generations,
            "samples": [[*key, count] for key, count in self.agent.sampler.counts.copy().most_common(200)],
            "other_threads": self.agent.sampler.others.busiest(),
            "recompiles": {"count": graph_count(), "reasons": dict(self.agent.hooks.recompile_reasons.most_common(8))},
            "num_steps": self.agent.num_steps,
            "errors": ERRORS,
        }
        if (loop := self.agent.loop()) is not None:
            facts["loop"] = loop
        path = os.path.join(self.agent.settings.out, f"facts-{facts['rank']}-{self.agent.pid}.json")
        with open(path + ".tmp", "w") as file:
            json.dump(facts, file, default=str)
        os.replace(path + ".tmp", path)
