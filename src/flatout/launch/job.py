"""What is launched: the command of one rank, how many ranks, and what their exit codes mean together."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.errors import INTERRUPTED_EXIT, PREEMPTED_EXIT, EnvironmentLacks, RunFailed, UsageError
from flatout.probe.launched import JOB, RESTARTS

# A restart would end the same way, or is not wanted.
FINAL = (0, UsageError.exit_code, EnvironmentLacks.exit_code, PREEMPTED_EXIT, INTERRUPTED_EXIT)
# In the message of a rank that ended only because another did.
_FOLLOWED = ("lost the connection to another rank", "the first rank failed")


@dataclass(frozen=True, kw_only=True)
class Job:
    config: Path
    folder: Path  # of the run
    overrides: tuple[str, ...] = ()
    resume: bool = False
    nodes: int = 1
    ranks: int = 1  # on each node
    restarts: int = 0

    @property
    def name(self) -> str:
        """The folder's name in letters that every scheduler takes."""
        return re.sub(r"[^A-Za-z0-9._-]", "_", self.folder.name).lstrip("-.") or "flatout"

    @property
    def world(self) -> int:
        return self.nodes * self.ranks

    @property
    def arguments(self) -> list[str]:
        """Of `python`. The folder is a setting, because torchrun reads `--run` as an option of its own."""
        command = ["-m", "flatout", "train", str(self.config), *self.overrides, f"run={self.folder}"]
        return [*command, *(["--resume"] if self.resume else [])]

    @property
    def command(self) -> list[str]:
        return [sys.executable, *self.arguments]

    def environment(self, *, restart: int) -> dict[str, str]:
        """By it a rank knows its job, ends with its launcher, and resumes after a restart."""
        return {JOB: f"{self.name}-{self.folder.absolute()}", RESTARTS: str(restart), "WORLD_SIZE": str(self.world)}


def followed(text: str) -> bool:
    """Whether a rank with this message ended only because another did."""
    return any(words in text for words in _FOLLOWED)


def how_it_ended(code: int) -> str:
    """The end of a process that failed."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"


def ended(rank: int, code: int) -> str:
    """How the rank that failed first ended."""
    return f"rank {rank} {how_it_ended(code)} first\n"


def exit_code_of(codes: Sequence[int]) -> int:
    """The exit code of a job from those of its ranks, the first rank's first; a rank ended by a signal has failed."""
    known = {code if code >= 0 else RunFailed.exit_code for code in codes}
    if known == {0}:
        return 0
    if codes[0] in FINAL and codes[0] != 0:
        return codes[0]
    # Several ways to end: the most telling one.
    for code in (UsageError.exit_code, EnvironmentLacks.exit_code, INTERRUPTED_EXIT, PREEMPTED_EXIT):
        if known <= {0, code}:
            return code
    return RunFailed.exit_code
