"""The agent itself: the stages from the first optimizer step to the end of the watch."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from .facts import compile_seconds, gpu_facts, optimizer_facts, own_cores, plain_lr, process_cpu_s
from .forwards import Forwards
from .hooks import ImportHook, Patches, quietly
from .losses import Losses
from .profiler import Profiler
from .replays import Replays
from .settings import Settings
from .stacks import Sampler, framework_of_stack, user_site
from .switches import Switches
from .timeline import WHOLE, Timeline
from .torch_hooks import TorchHooks
from .updates import OwnUpdates, Updater, Updaters, parameters_of
from .writing import Writer

PROFILED_STEPS = 2
PROFILING_COSTS = 3.0  # times the time of a step, reading included
LONGEST_ROUND = 8  # steps of one optimizer for each of another; a rarer one is not waited for
MOST_RESTARTS = 16  # of the warm-up; then every update is a step
FEWEST_TIMED = 3  # however long they take


class Agent:
    """Everything that is observed in one process."""

    def __init__(self, settings: Settings, imports: ImportHook) -> None:
        self.settings, self.imports = settings, imports
        self.pid, self.thread = os.getpid(), threading.main_thread().ident or 0
        self.torch: Any = None
        self.on_step: Any = None
        self.stage = "waiting"  # warm, timed, profiled, done
        self.primary: int | None = None  # the number of the updater whose steps are counted
        self.num_steps, self.began, self.step_began, self.cpu_began = 0, 0.0, 0.0, 0.0
        self.shortest_s = 0.0  # of the steps so far: the first ones may compile
        self.facts: dict[str, Any] = {"framework": "torch", "loaders": [], "optimizers": {}}
        self.counts: defaultdict[str, float] = defaultdict(int)  # of this step; seconds where the name ends in _s
        self.stepped: Counter[int] = Counter()  # the steps of each updater
        self.stepped_since: Counter[int] = Counter()  # since the primary one stepped
        self.warm_until, self.extra_steps = settings.warm, 0
        self.backwards = 0  # backward passes in all
        self.updated_at = ""  # where the script updates its parameters itself
        self.restarts = 0  # of the warm-up, because a step ends with another updater than was thought
        self.rest_of_round = False  # a step has ended with one of several optimizers, and the others follow
        self.totals: defaultdict[str, float] = defaultdict(int)
        self.profile_until, self.num_profiled = 0, PROFILED_STEPS
        self.compile_seen = 0.0
        self.activity = ""  # of the agent itself, where it takes long
        self.probing = False  # inside our own replay: nothing is counted
        self.ended = False
        self.timeline, self.patches = Timeline(), Patches()
        self.hooks, self.switches = TorchHooks(self), Switches(self)
        self.forwards, self.losses = Forwards(self), Losses(self)
        self.updaters, self.own_updates = Updaters(), OwnUpdates(self)
        self.sampler, self.profiler, self.writer = Sampler(self), Profiler(self), Writer(self)

    # -- installation

    def on_torch(self, torch: Any) -> None:
        """torch has just been imported: take the official hook points."""
        self.torch = torch
        from torch.optim import optimizer

        self.on_step = optimizer.register_optimizer_step_post_hook
        self.patches.add(optimizer.register_optimizer_step_pre_hook(self.before_optimizer).remove)
        self.patches.add(optimizer.register_optimizer_step_post_hook(self.after_optimizer).remove)
        self.facts["default_threads"] = max(
            torch.get_num_threads(), own_cores() if "OMP_NUM_THREADS" in os.environ else 1
        )
        self.hooks.install(torch)
        self.switches.install(torch)
        if self.settings.stop:
            threading.Thread(target=self.writer.tell_phases, name="flatout-phases", daemon=True).start()

    # -- phases

    def is_training_thread(self) -> bool:
        return threading.get_ident() == self.thread and not self.probing and os.getpid() == self.pid

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a block, unless it is inside a phase that includes it: an evaluation reads data too."""
        if name != "backward":
            self.own_updates.check()
        if not self.is_training_thread() or self.timeline.phase in WHOLE:
            yield
            return
        before = self.timeline.enter(name)
        quietly(self.profiler.check)()
        try:
            yield
        finally:
            self.timeline.enter(before)

    def end_evaluation(self) -> None:
        if self.timeline.phase == "eval" and self.is_training_thread():
            self.timeline.enter("other")

    # -- steps

    def before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.own_updates.depth:
            self.own_updates.inside = True
        elif self.is_training_thread_or_first() and not self.ended:
            quietly(self._before_optimizer)(optimizer)

    def is_training_thread_or_first(self) -> bool:
        if self.primary is None and not self.probing and os.getpid() == self.pid:
            self.thread = threading.get_ident()
        return self.is_training_thread()

    def _before_optimizer(self, optimizer: Any) -> None:
        if not self.own_updates.over:
            if self.own_updates.active:  # what changed the parameters so far was no step of this loop
                self.forget_updaters()
            self.own_updates.stop()
        updater, new = self.updaters.by_optimizer(optimizer, backwards=self.backwards)
        self._takes_turn(updater, lambda: parameters_of(optimizer))
        if new == "first":
            self.facts["optimizers"][str(updater.number)] = optimizer_facts(optimizer)
            self.forwards.discover(parameters_of(optimizer))
            self._count_by_newest(updater)
        elif new:
            self.counts[f"new-{new}"] += 1
            if new == "model":
                self.forwards.follow_any()
        self.end_evaluation()
        self.timeline.enter("optimizer")

    def _takes_turn(self, updater: Updater, parameters: Callable[[], list[Any]]) -> None:
        updater.steps += 1
        self.stepped[updater.number] += 1
        if self.primary is None:
            self.primary = updater.number
            self.facts["framework"] = framework_of_stack()
            self.facts["step_site"] = user_site()
            self._note_device(parameters())
            self.stage = "warm" if self.stage == "waiting" else self.stage

    def forget_updaters(self) -> None:
        """Count anew: what was counted until now were no steps."""
        self.updaters, self.stepped, self.primary = Updaters(), Counter(), None
        self._warm_again()

    def _warm_again(self) -> None:
        if self.stage in ("warm", "timed"):
            self.stage = "warm"
            self.sampler.stop()
            self.warm_until, self.extra_steps = self.num_steps + self.settings.warm, self.num_steps

    def _count_by_newest(self, updater: Updater) -> None:
        started = self.primary is not None and self.stepped[self.primary] <= LONGEST_ROUND
        if started and self.restarts < MOST_RESTARTS:
            self._count_by(updater.number)

    def _count_by(self, number: int) -> None:
        """Let a step end with this updater: where several alternate, a step is one round of all of them."""
        if number != self.primary and self.stage in ("warm", "timed"):
            self.restarts += 1
            self.primary, self.rest_of_round = number, True
            self._warm_again()

    def after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.is_training_thread() or self.ended or self.own_updates.depth:
            return
        quietly(self.timeline.enter)("other")
        if quietly(self._ends_step)(self.updaters.by_optimizer(optimizer, backwards=self.backwards)[0]):
            self._end_step(optimizer)

    def after_own_update(self, changed: tuple[Any, ...]) -> None:
        """The script has updated parameters itself, since the last backward pass."""
        if self.primary is None:
            self.thread = threading.get_ident()
        updater, new = self.updaters.by_code(changed)
        parameters = [tensor for leaf in self.own_updates.leaves if (tensor := leaf.tensor()) is not None]
        quietly(self._takes_turn)(updater, lambda: parameters)
        if new:
            quietly(self._count_by_newest)(updater)
        ends = self._ends_step(updater)
        if new:
            self.updated_at = user_site()
        if ends:
            self._end_step(None)
        if new and not self.ended:
            quietly(self.forwards.discover)(parameters)

    def _ends_step(self, updater: Updater) -> bool:
        """Whether a step ends with this update. An updater that has taken no turn for long is not waited for."""
        if updater.number == self.primary or self.restarts >= MOST_RESTARTS:
            self.stepped_since.clear()
            return True
        self.stepped_since[updater.number] += 1
        if self.stepped_since[updater.number] <= LONGEST_ROUND:
            return False
        self.stepped_since.clear()
        self._count_by(updater.number)
        return True

    def _end_step(self, optimizer: Any) -> None:
        quietly(self.end_step)(optimizer)
        if self.stage == "done" and not self.ended:
            self.ended = True
            self.finish(optimizer)

    def _note_device(self, parameters: list[Any]) -> None:
        torch = self.torch
        devices = Counter(parameter.device.type for parameter in parameters)
        self.facts["device"] = devices.most_common(1)[0][0] if devices else None
        used_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.facts["cuda_used"] = used_cuda
        if used_cuda:

            def record_event() -> Any:
                if torch.cuda.is_current_stream_capturing():
                    return None
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                return event

            self.timeline.make_event = record_event

    def end_step(self, optimizer: Any) -> None:
        """The parameters were updated: write down this step and decide what the next one is for."""
        now = time.perf_counter()
        host, spans = self.timeline.take()
        compiled = compile_seconds()
        micro = self.forwards.take()
        rest, self.rest_of_round = self.rest_of_round and not micro, False
        if rest:  # another optimizer has ended the step already
            self.step_began, self.cpu_began = time.perf_counter(), process_cpu_s()
            return
        line = {
            "step": self.num_steps,
            "stage": self.stage,
            "time": time.time(),
            "seconds": now - self.step_began if self.step_began else None,
            "host": host,
            "spans": spans,
            "micro": micro,
            "loss": self.losses.take(),
            "memory": self.memory(),
            "compile_s": compiled - self.compile_seen,
            "counts": dict(self.counts),
            "lr": None if optimizer is None else plain_lr(optimizer),
            "cpu_s": process_cpu_s() - self.cpu_began,
        }
        if self.step_began:
            self.shortest_s = min(self.shortest_s or now - self.step_began, now - self.step_began)
        self.compile_seen = compiled
        for name, count in self.counts.items():
            self.totals[name] += count
        self.facts["accumulation"] = max(1, len(micro))
        self.counts = defaultdict(int)
        self.writer.waiting.append(line)
        self.writer.write_ready()
        self.num_steps += 1
        self.writer.write_sometimes()
        self._next_stage(now)
        self.step_began, self.cpu_began = time.perf_counter(), process_cpu_s()
        self.timeline.take()  # what we did ourselves just now belongs to no step

    def _next_stage(self, now: float) -> None:
        asked = self.settings
        if self.stage == "warm" and self.facts["accumulation"] > 8:
            self.num_profiled = 1  # reading a profile takes a tenth of a millisecond an event
        profiled = self.num_profiled if asked.look else 0
        if self.stage == "warm" and self.num_steps >= self.warm_until:
            rarest = min(self.stepped.values())
            often = self.stepped[self.primary or 0]
            if rarest < often <= LONGEST_ROUND and self.restarts < MOST_RESTARTS:
                self._count_by(next(one for one in reversed(self.stepped) if self.stepped[one] == rarest))
                return
            self.stage, self.began = "timed", now
            asked.fit()
            if asked.look:
                self.sampler.start(self.shortest_s)
        elif self.stage == "timed":
            over = now - self.began > asked.seconds * (0.7 if asked.look else 1.0)
            over = self.agreed(over and self.num_steps >= self.warm_until + FEWEST_TIMED)
            if self.num_steps >= asked.steps + self.extra_steps - profiled or over:
                self.sampler.stop()
                each = (now - self.began) / max(1, self.num_steps - self.warm_until)
                if asked.ends_at - time.monotonic() < PROFILING_COSTS * profiled * each:
                    profiled = 0  # the time limit would end the watch in the middle of it
                self.stage = "profiled" if profiled else "done"
                self.profile_until = self.num_steps + profiled
                if profiled:
                    self.profiler.begin()
        elif self.stage == "profiled" and self.num_steps >= self.profile_until:
            self.writer.write_facts("running")  # reading the profile may take long, and the watch may end meanwhile
            self.activity = "reading the profile"
            self.profiler.end(self.num_profiled)
            self.activity, self.stage = "", "done"

    def agreed(self, over: bool) -> bool:
        """All ranks leave the window at the same step, so none waits forever; rank 0 announces it 2 steps ahead."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return over
        path = os.path.join(self.settings.out, "until")
        told = os.path.exists(path)
        if over and not told and self.rank() == 0:
            with open(path + ".tmp", "w") as file:
                file.write(str(self.num_steps + 2))
            os.replace(path + ".tmp", path)
        if not told:
            return False
        with open(path) as file:
            return self.num_steps >= int(file.read())

    def rank(self) -> int:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
        return int(os.environ.get("RANK", "0"))

    def loop(self) -> dict[str, Any] | None:
        """What is unusual in how the script updates its parameters; None if one optimizer does."""
        updaters, own = self.updaters.all, self.own_updates
        remade = {name: self.totals[f"new-{name}"] for name in ("optimizer", "model") if self.totals[f"new-{name}"]}
        if not own.active and len(updaters) == 1 and not remade:
            return None
        return {
            "own_code": own.active and not own.inside,
            "in_backward": own.active and own.inside,
            "replaces": own.replaces,
            "updated_at": self.updated_at,
            "updaters": [str(updater.kind[0]) for updater in updaters[:8]] if not own.active else [],
            "num_updaters": len(updaters),
            "remade": remade,
        }

    def memory(self) -> dict[str, float]:
        # Asking takes a tenth of a millisecond, which is not nothing in a short step.
        if not self.facts.get("cuda_used") or self.num_steps % 10:
            return {}
        stats, gib = self.torch.cuda.memory_stats(), 2**30
        return {
            "allocated_gib": stats.get("allocated_bytes.all.current", 0) / gib,
            "reserved_gib": stats.get("reserved_bytes.all.current", 0) / gib,
            "peak_gib": stats.get("allocated_bytes.all.peak", 0) / gib,
        }

    # -- the end

    def finish(self, optimizer: Any) -> None:
        """Ends the window: writes the observations, then stops the script or lets it continue unwatched."""
        asked = self.settings
        self.sampler.stop()
        self.facts["anomaly"], self.facts["recomputing"] = self.totals["anomaly"] > 0, self.totals["recompute"] > 0
        if self.facts.get("cuda_used"):
            self.facts["gpu"] = quietly(gpu_facts)(self.torch)  # before replays with larger batches
        if asked.stop and asked.look:
            self.probing, self.activity = True, "replaying the last batch"
            quietly(Replays(self, optimizer).run)()
        quietly(self.writer.write_ready)(wait=asked.stop)
        quietly(self.writer.write_facts)("stopped" if asked.stop else "watched")
        self.imports.wanted.clear()
        self.patches.undo()
        if not asked.stop:
            return
        if threading.current_thread() is not threading.main_thread():
            finish_process()
        # A loop that swallows SystemExit is ended at its next step.
        self.on_step(lambda *_: finish_process())
        self.patches.replace(self.torch.autograd, "backward", lambda _: lambda *_, **__: finish_process())
        raise SystemExit(0)

    def at_exit(self) -> None:
        """The script ended before the window did."""
        if os.getpid() != self.pid or self.ended or self.torch is None:
            return
        if self.primary is None:
            quietly(self.writer.write_phase)()
            return
        self.ended = True
        self.sampler.stop()
        quietly(self.profiler.end)(self.num_profiled)
        quietly(self.writer.write_ready)(wait=True)
        quietly(self.writer.write_facts)("ended")

    def on_crash(self, kind: Any, error: Any, trace: Any) -> None:
        if os.getpid() == self.pid and not issubclass(kind, KeyboardInterrupt):
            text = "".join(traceback.format_exception(kind, error, trace))
            path = os.path.join(self.settings.out, f"crash-{os.environ.get('RANK', '0')}-{self.pid}.txt")
            with contextlib.suppress(OSError), open(path, "w") as file:
                file.write(text[-20000:])


def finish_process() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)


def write_stack_on_signal(settings: Settings) -> None:
    """On a signal, writes the main thread's stack to a file; this works without any thread of the agent."""
    if settings.stack_signal is not None:
        path = os.path.join(settings.out, f"stack-{os.environ.get('RANK', '')}-{os.getpid()}.txt")
        # Kept open for the life of the process, as the handler needs it.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(settings.stack_signal, file=descriptor, all_threads=False)


def start() -> Agent:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would tell the script's stderr of itself
    imports = ImportHook()
    agent = Agent(Settings(os.environ["FLATOUT_AGENT"]), imports)
    quietly(write_stack_on_signal)(agent.settings)
    sys.meta_path.insert(0, imports)
    imports.when("torch", agent.on_torch)
    atexit.register(agent.at_exit)
    before = sys.excepthook

    def excepthook(kind: Any, error: Any, trace: Any) -> None:
        quietly(agent.on_crash)(kind, error, trace)
        before(kind, error, trace)

    sys.excepthook = excepthook
    return agent
