"""A thread on every rank that ends a run in which nothing moves any more, and names the rank and its phase.

Every second it reports this rank's phase to the others through a key-value store, which works while the main thread
waits in a collective. A rank whose report no longer changes is stopped or gone. If all report, but this rank's phase
has not changed for `train.hang_s`, the rank to blame is the one that does not wait for the others, or the one furthest
behind. All live ranks then write the stacks of their threads to the run folder and exit.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from flatout.engine import ranks as waiting
from flatout.engine.ranks import Ranks
from flatout.errors import RunFailed
from flatout.probe import Phases, launched
from flatout.record import Recorder, Run
from flatout.record.events import Hung

BEAT_S = 1.0
# A rank that reports nothing for this long is stopped or gone: its thread reports whatever its main thread does.
SILENT_S = 60.0
# How long the ranks have to write their stacks.
STACKS_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A rank's last report."""

    count: int
    moves: int
    step: int
    phase: str
    waits: bool  # in a collective


@dataclass(frozen=True, kw_only=True)
class Verdict:
    rank: int
    silent: bool
    seconds: float
    beat: Beat | None


def blamed(beats: Mapping[int, Beat]) -> int:
    """The rank that the others wait for: not in a collective itself, and the one furthest behind among these."""
    busy = {rank: beat for rank, beat in beats.items() if not beat.waits} or dict(beats)
    return min(busy, key=lambda rank: (busy[rank].step, busy[rank].moves, rank))


class Watch:
    """What one rank knows about all of them. Times are of its own clock; a pause of this process itself counts for
    nobody."""

    def __init__(self, *, world: int, silent_s: float, now: float) -> None:
        self.silent_s = silent_s
        self.beats: dict[int, Beat] = {}
        self._changed = dict.fromkeys(range(world), now)
        self.looked = now

    def see(self, beats: Mapping[int, Beat], *, now: float) -> int | None:
        """Takes the newest reports; returns a rank that is silent."""
        if now - self.looked > 5 * BEAT_S:
            self._changed = dict.fromkeys(self._changed, now)
        self.looked = now
        for rank, beat in beats.items():
            known = self.beats.get(rank)
            if known is None or known.count != beat.count:
                self._changed[rank] = now
            self.beats[rank] = beat
        late = [rank for rank, changed in self._changed.items() if now - changed > self.silent_s]
        return min(late, key=lambda rank: self._changed[rank]) if late else None


class Watchdog:
    """Started before the first step. `phases` is set once the engine exists; before that only silence counts.

    Between the trainings of a recipe of several stages another one looks after silence, with more patience than theirs.
    """

    def __init__(
        self, run: Run, recorder: Recorder, ranks: Ranks, *, hang_s: float | None, name: str = "training"
    ) -> None:
        self.run, self.recorder, self.ranks, self.hang_s, self.name = run, recorder, ranks, hang_s, name
        self.silent_s = min(SILENT_S, hang_s or SILENT_S) * (1.0 if name == "training" else 1.5)
        self.phases: Phases | None = None
        self._end = threading.Event()
        self._store: Any = None
        self._parent = os.getppid()
        self._thread = threading.Thread(target=self._guarded, name="watchdog", daemon=True)
        self._asked: float | None = None  # since when an answer of the store is awaited
        self._beats: dict[int, Beat] = {}

    def __enter__(self) -> Watchdog:
        if self.hang_s is not None:
            if self.ranks.world > 1:
                self._store = _store(self.name)
                if self.ranks.rank and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                    threading.Thread(target=self._watch_store, name="watchdog-store", daemon=True).start()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(2 * BEAT_S)

    def _guarded(self) -> None:
        try:
            self._watch()
        except Exception as error:  # the store is gone: the ranks notice by their collectives
            sys.stderr.write(f"rank {self.ranks.rank} is not watched any more: {error}\n")

    def _watch(self) -> None:
        assert self.hang_s is not None
        silent_s = self.silent_s
        watch = Watch(world=self.ranks.world, silent_s=silent_s, now=time.monotonic())
        count, moved, orphaned = 0, (0, time.monotonic()), 0.0
        while not self._end.wait(BEAT_S):
            now, count = time.monotonic(), count + 1
            mine = self._beat(count)
            if mine.moves != moved[0] or self.phases is None or now - watch.looked > 5 * BEAT_S:
                moved = (mine.moves, now)
            self._asked = now
            try:
                found = self._exchange(mine)
            finally:
                self._asked, self._beats = None, watch.beats
            if isinstance(found, Verdict):
                self._finish(found, declared=False)
                return
            silent = watch.see(found, now=now)
            if silent is not None:
                beat = watch.beats.get(silent)
                self._finish(Verdict(rank=silent, silent=True, seconds=silent_s, beat=beat), declared=True)
            if now - moved[1] > self.hang_s:
                rank = blamed(watch.beats)
                verdict = Verdict(rank=rank, silent=False, seconds=now - moved[1], beat=watch.beats[rank])
                self._finish(verdict, declared=True)
            # The kernel has sent SIGTERM; a rank that is stuck must not outlive its launcher either.
            orphaned = (orphaned or now) if launched.job() and os.getppid() != self._parent else 0.0
            if orphaned and now - orphaned > silent_s:
                self._leave("the launcher is gone, and the run did not stop")

    def _watch_store(self) -> None:
        """The first rank holds the store: if that rank is stopped, a question to the store never returns.

        A rank that still moves is not ended, whatever the store does.
        """
        assert self.hang_s is not None
        silent_s, looked, moved = self.silent_s, time.monotonic(), (-1, 0.0)
        while not self._end.wait(BEAT_S):
            now, asked, moves = time.monotonic(), self._asked, self._beat(0).moves
            if moves != moved[0] or now - looked > 5 * BEAT_S:  # or this process paused, which is not the store's fault
                moved = (moves, now)
            looked = now
            if asked is not None and now - max(asked, moved[1]) > silent_s:
                verdict = Verdict(rank=0, silent=True, seconds=silent_s, beat=self._beats.get(0))
                self._finish(verdict, declared=True, agreed=True)  # without the store, every rank speaks for itself

    def _beat(self, count: int) -> Beat:
        phases = self.phases
        return Beat(
            count=count,
            moves=0 if phases is None else phases.moves,
            step=-1 if phases is None else phases.step,
            phase=("set-up" if self.name == "training" else self.name) if phases is None else phases.phase,
            waits=waiting.in_collective(),
        )

    def _exchange(self, mine: Beat) -> dict[int, Beat] | Verdict:
        """Reports, and reads what the others reported last; or the verdict of another rank."""
        if self._store is None:
            return {0: mine}
        self._store.set(f"beat/{self.ranks.rank}", json.dumps(asdict(mine)))
        if self._store.check(["verdict"]):
            found = json.loads(self._store.get("verdict"))
            beat = found.pop("beat")
            return Verdict(**found, beat=None if beat is None else Beat(**beat))
        keys = {rank: f"beat/{rank}" for rank in range(self.ranks.world)}
        present = [rank for rank, key in keys.items() if self._store.check([key])]
        texts = self._store.multi_get([keys[rank] for rank in present]) if present else []
        return {rank: Beat(**json.loads(text)) for rank, text in zip(present, texts, strict=True)}

    def _finish(self, verdict: Verdict, *, declared: bool, agreed: bool = False) -> None:
        """Ends this process with the verdict, after the stacks of all live ranks are on disk."""
        if declared and not agreed and self._store is not None:
            text = json.dumps(asdict(verdict))
            won = self._store.compare_set("verdict", "", text).decode() == text
            declared = won
        with suppress(OSError), self.run.stacks_path(self.ranks.rank).open("w") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
        beat = verdict.beat
        hung = Hung(
            step=None if beat is None or beat.step < 0 else beat.step,
            rank=verdict.rank,
            phase="unknown" if beat is None else beat.phase or "between steps",
            seconds=verdict.seconds,
            silent=verdict.silent,
            stacks=str(self.run.stacks_path(0).with_name("stacks-rank*.txt")),
        )
        if declared or self.ranks.first:
            self.recorder.event(hung)
        # The others write their stacks meanwhile. The one that prints goes first: without the others it would fail.
        time.sleep(STACKS_S if declared else 2 * STACKS_S)
        self._leave(hung.sentence() if declared else "")

    def _leave(self, text: str) -> None:
        """Ends this process, whose main thread may be in a call that never returns, and the ones it started."""
        if text:
            sys.stderr.write(f"error: {text}\n")
            sys.stderr.flush()
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
        os._exit(RunFailed.exit_code)


def _store(name: str) -> Any:
    """A connection of our own to the store that the ranks met at: the group's is in use by the main thread."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    library: Any = dist
    patience = timedelta(seconds=SILENT_S)
    store = library.TCPStore(address, port, is_master=False, timeout=patience, wait_for_workers=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return library.PrefixStore(f"flatout/watchdog/{name}/{attempt}", store)
