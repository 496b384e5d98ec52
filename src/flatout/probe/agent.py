"""The doctor's agent: watches the training loop of any PyTorch script from inside its process (`flatout doctor -- …`).

One file, standard library only, torch taken from whoever imports it: it runs in anybody's environment, with torch from
2.4 on, on Python from 3.9 on. It never prints, never changes what the script computes while it watches, and never lets
an error of its own reach the script.

    warm-up      the optimizer's steps are the beat; the model is found by the parameters it steps
    timed        the training thread's time is tiled into phases (CUDA events where the work is on a GPU) and its
                 stack is sampled, so that time between the phases has a file and a line
    profiled     two steps under torch.profiler, with the places that wait for the device
    what if      only when the script is stopped anyway: its last batch is replayed with one thing changed
                 (precision, batch, no recomputation, ...), so that an estimate stands on this model and this device

What was seen goes to two files in the folder named by FLATOUT_AGENT: steps as lines, all else as one JSON object.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib.machinery
import json
import linecache
import os
import re
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

SAMPLE_EVERY_S = 0.01
WARM_STEPS = 3
PROFILED_STEPS = 2
FEWEST_TIMED = 3  # however long they take
ENOUGH_TOKENS = 2048  # in a micro-batch on a GPU: thin work is no matter of the batch from there on
# Settings of the environment that cost time or tell how the job was started; never the whole environment.
VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_DEBUG",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_COMPILE_DISABLE",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_LOGS",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TORCHDYNAMO_DISABLE",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
)

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


class Settings:
    """What the doctor asked for, from the environment variable FLATOUT_AGENT."""

    def __init__(self, text: str) -> None:
        asked = json.loads(text)
        self.out: str = asked["out"]
        self.steps: int = asked["steps"]
        self.seconds: float = asked["seconds"]
        self.stop: bool = asked["stop"]
        self.look: bool = asked.get("look", True)  # profile and ask what if; a proof only times
        self.switch: dict[str, Any] = asked.get("switch", {})
        self.ends_at: float = asked.get("ends_at", float("inf"))  # of the whole watch, on the monotonic clock
        self.stack_signal: int | None = asked.get("stack_signal")
        self.warm = min(WARM_STEPS, max(1, self.steps // 4))
        self.fit()

    def fit(self) -> None:
        """No longer than what is left of the whole watch, replays included."""
        self.seconds = min(self.seconds, max(0.0, 0.7 * (self.ends_at - time.monotonic())))
        # What one replay may take, and all of them together.
        self.replay_s, self.replays_s = self.seconds / 40, self.seconds / 3


# -- telling a module from its import


class ImportHook:
    """Calls back once a module has been executed, in front of every other finder; the module itself is untouched."""

    def __init__(self) -> None:
        self.wanted: dict[str, Callable[[Any], None]] = {}

    def when(self, name: str, callback: Callable[[Any], None]) -> None:
        module = sys.modules.get(name)
        if module is not None:
            callback(module)
        else:
            self.wanted[name] = callback

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        callback = self.wanted.pop(name, None)
        if callback is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = (
                None if finder is self or find is None else find(name, path, target)
            )
            if spec is not None:
                self._listen(spec, callback)
                return spec
        return None

    def _listen(self, spec: importlib.machinery.ModuleSpec, callback: Callable[[Any], None]) -> None:
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: Any) -> None:
            execute(module)
            quietly(callback)(module)

        with contextlib.suppress(AttributeError):  # a loader without a __dict__ is left alone
            loader.exec_module = exec_module


ERRORS: list[str] = []


def quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Our own mistakes are kept for the report and never reach the script."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if len(ERRORS) < 20:
                where = traceback.extract_tb(error.__traceback__)[-1]
                ERRORS.append(f"{type(error).__name__}: {error} (agent.py:{where.lineno})")
            return None

    return wrapped


class Patches:
    """Attributes replaced for the time of watching, put back in reverse."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        own = name in vars(owner)
        original = getattr(owner, name)
        setattr(owner, name, make(original))
        self._undo.append(lambda: setattr(owner, name, original) if own else delattr(owner, name))

    def add(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            quietly(self._undo.pop())()


# -- time


class Timeline:
    """Tiles the training thread's time into phases; on CUDA a timing event on the stream stands at every seam.

    On the device, a phase lasts from the moment it has passed one seam to the next: a phase in which the host kept
    the device waiting shows as that wait, and one the device never noticed as nothing.
    """

    def __init__(self) -> None:
        self.phase = "other"
        self.host: dict[str, float] = defaultdict(float)
        self.make_event: Callable[[], Any] | None = None
        self._since = time.perf_counter()
        self._event: Any = None
        self._seams: list[tuple[str, Any, Any]] = []

    def enter(self, phase: str) -> str:
        """Go over to `phase`; returns the one left, to be entered again."""
        before, now = self.phase, time.perf_counter()
        self.host[before] += now - self._since
        self._since = now
        if self.make_event is not None and phase != before:
            event = self.make_event()
            if event is not None:
                if self._event is not None:
                    self._seams.append((before, self._event, event))
                self._event = event
        self.phase = phase
        return before

    def cut(self) -> tuple[dict[str, float], list[tuple[str, Any, Any]]]:
        """Everything since the last cut."""
        self.enter(self.phase)
        if self.make_event is not None:
            event = self.make_event()
            if event is not None and self._event is not None:
                self._seams.append((self.phase, self._event, event))
            self._event = event
        host, seams = dict(self.host), self._seams
        self.host, self._seams = defaultdict(float), []
        return host, seams


class Sampler:
    """Looks at the training thread's stack a hundred times a second and counts where it was, by phase."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="flatout-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _loop(self) -> None:
        look = quietly(self._look)
        while not self._stopping.wait(SAMPLE_EVERY_S):
            look()

    def _look(self) -> None:
        frame = sys._current_frames().get(self.agent.thread)
        phase = self.agent.timeline.phase
        if frame is not None:
            self.counts[(phase, *kind_and_site(frame))] += 1


_SYSTEM = tuple(
    {os.path.dirname(os.__file__) + os.sep, *(os.path.join(p, "lib") + os.sep for p in (sys.prefix, sys.base_prefix))}
)


def is_users(filename: str) -> bool:
    return not filename.startswith(("<", *_SYSTEM)) and filename != __file__ and "site-packages" not in filename


def kind_and_site(frame: Any) -> tuple[str, str]:
    """What the stack is at, and the innermost line of the user's own code in it."""
    kind = site = ""
    while frame is not None:
        filename, function = frame.f_code.co_filename, frame.f_code.co_name
        if filename != __file__:
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


FRAMEWORKS = (
    ("trl", "/trl/trainer/"),
    ("trainer", "/transformers/trainer.py"),
    ("lightning", "/lightning/"),
    ("lightning", "/pytorch_lightning/"),
    ("accelerate", "/accelerate/optimizer.py"),
)


def framework_of_stack() -> str:
    """Whose loop called us."""
    frame: Any = sys._getframe(1)
    found = set()
    while frame is not None:
        found |= {name for name, part in FRAMEWORKS if part in frame.f_code.co_filename}
        frame = frame.f_back
    return next((name for name, _ in FRAMEWORKS if name in found), "torch")


# -- tensors


def tensors_of(value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Named tensors in a forward's arguments."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        yield "", value
    elif depth < 3 and hasattr(value, "items"):
        for key, item in value.items():
            for name, tensor in tensors_of(item, depth + 1):
                yield name or str(key), tensor
    elif depth < 3 and isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item, depth + 1)


def mapped(value: Any, function: Callable[[Any], Any], depth: int = 0) -> Any:
    """The same arguments with every tensor replaced."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return function(value)
    if depth < 3 and type(value) in (dict, list, tuple):
        if isinstance(value, dict):
            return {key: mapped(item, function, depth + 1) for key, item in value.items()}
        return type(value)([mapped(item, function, depth + 1) for item in value])
    return value


class Batch:
    """Token ids and mask found in a forward's arguments."""

    def __init__(self, torch: Any, args: Any, kwargs: Any) -> None:
        named = list(tensors_of([args, kwargs]))
        whole = (torch.int64, torch.int32, torch.int16, torch.uint8)
        ids = [t for name, t in named if name in ("input_ids", "tokens", "idx")]
        ids += [t for name, t in named if t.dtype in whole and t.dim() == 2 and "mask" not in name]
        self.ids = ids[0] if ids and ids[0].dim() == 2 else None
        masks = [t for name, t in named if name in ("attention_mask", "mask", "padding_mask")]
        fits = [m for m in masks if self.ids is not None and m.shape == self.ids.shape]
        self.mask = fits[0] if fits else None
        first = next((t for _, t in named if t.dim() > 0), None)
        self.rows = None if first is None else int(first.shape[0])
        self.length = None if self.ids is None else int(self.ids.shape[1])

    def real_tokens(self, pad_id: int | None) -> Any:
        """How many tokens are no padding, as a tensor that is read later: no wait for the device here."""
        ids = self.ids
        if ids is None:
            return None
        if self.mask is not None:
            return (self.mask != 0).sum()
        if pad_id is not None:
            # Padding is a run at an end of the row; the same id inside it is text.
            same = ids == pad_id
            ends = same.flip(1).cumprod(1).sum() + same.cumprod(1).sum()
            return ids.numel() - ends
        # Unknown: a row's last id, repeated from some point on. Text repeats an id once or twice, padding for long.
        run = (ids == ids[:, -1:]).flip(1).cumprod(1).sum(1)
        return ids.numel() - (run * (run > 4)).sum()


def number(value: Any) -> float | None:
    """A late read of a scalar; None for what is none."""
    if value is None:
        return None
    try:
        return float(value)
    except Exception:
        return None


def read_later(value: Any) -> Any:
    """A scalar on its way to the host: reading a device tensor itself would wait for all that is queued before it."""
    if not getattr(value, "is_cuda", False):
        return number(value)
    return value.to("cpu", non_blocking=True)  # into pinned memory; whole once the step's last event has passed


def scalings_of(loss: Any) -> list[float]:
    """By how much a loss was scaled just before its backward pass: after the last operation, the last two, and so on.

    Only constants on the host count: reading another would wait for the device.
    """
    found: list[float] = []
    node = loss.grad_fn
    while node is not None and len(found) < 4 and node.name() in ("DivBackward0", "MulBackward0"):
        other = node._saved_other
        if other is None or other.is_cuda or other.requires_grad or other.numel() != 1 or not float(other):
            break
        by = 1 / float(other) if node.name().startswith("Div") else float(other)
        found.append(by * (found[-1] if found else 1.0))
        node = node.next_functions[0][0]
    return found


def scalar_loss(torch: Any, out: Any) -> Any:
    """Something to call backward on: the loss where the model gives one, else the mean of what it puts out."""
    loss = getattr(out, "loss", None)
    found = [loss] if loss is not None else [t for _, t in tensors_of(out if isinstance(out, (tuple, list)) else [out])]
    if not found and hasattr(out, "values"):
        found = [t for _, t in tensors_of(dict(out))]
    useful = [t for t in found if t.is_floating_point() and t.requires_grad]
    if not useful:
        return None
    return min(useful, key=lambda t: t.dim() > 0).float().mean()


# -- the agent


class Model:
    """One root module: the one that is trained, or another that only runs."""

    def __init__(self, module: Any, ids: set[int]) -> None:
        self.module = module
        parameters = list(module.parameters())
        self.trained = any(id(p) in ids for p in parameters)
        self.size = sum(p.numel() for p in parameters)


class Agent:
    """Everything that is seen of one process."""

    def __init__(self, settings: Settings, imports: ImportHook) -> None:
        self.settings, self.imports = settings, imports
        self.pid, self.thread = os.getpid(), threading.main_thread().ident or 0
        self.torch: Any = None
        self.on_step: Any = None
        self.timeline, self.patches, self.sampler = Timeline(), Patches(), Sampler(self)
        self.stage = "waiting"  # warm, timed, profiled, done
        self.primary: int | None = None  # the optimizer whose steps are the beat
        self.num_steps, self.began, self.step_began, self.cpu_began = 0, 0.0, 0.0, 0.0
        self.facts: dict[str, Any] = {"framework": "torch", "loaders": [], "optimizers": {}}
        self.counts: Counter[str] = Counter()
        self.models: list[Model] = []
        self.depth = 0
        self._outside: str | None = None
        self.autocast: Any = None
        self.totals: Counter[str] = Counter()
        self.profile_until, self.profiled = 0, PROFILED_STEPS
        self.micro: list[dict[str, Any]] = []
        self.last: tuple[Any, Any, Any] | None = None
        self.mixed: tuple[bool, Any] = (False, None)  # autocast, as it was around the forward pass
        self.losses: list[Any] = []  # one a micro-batch
        self.scalings: list[list[float]] = []  # of those losses, while warming up
        self.unscaled: tuple[Any, Any] = (None, None)  # what a GradScaler gave, and from what
        self.in_parts = False  # losses of micro-batches are parts of their mean already, and add up to it
        self.waiting: list[dict[str, Any]] = []  # steps whose device times are not read yet
        self.forwards: Counter[tuple[str, int, int]] = Counter()
        self.recompile_reasons: Counter[str] = Counter()
        self.compile_seen = 0.0
        self.sync_sites: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        self.generations: list[dict[str, Any]] = []
        self.profiler: Any = None
        self.profile_began = 0.0
        self.probing = False  # inside our own replay: nothing is booked
        self.file: Any = None
        self.ended = False

    # -- installation

    def on_torch(self, torch: Any) -> None:
        """torch has just been imported: take the official hook points."""
        self.torch = torch
        from torch.optim import optimizer

        self.on_step = optimizer.register_optimizer_step_post_hook
        self.patches.add(optimizer.register_optimizer_step_pre_hook(self.before_optimizer).remove)
        self.patches.add(optimizer.register_optimizer_step_post_hook(self.after_optimizer).remove)
        self.patches.replace(torch.autograd, "backward", self._backward)
        self.patches.replace(torch, "save", functools.partial(self._phase, "save"))
        self.patches.replace(torch.cuda, "empty_cache", functools.partial(self._phase, "empty-cache"))
        self.patches.replace(gc, "collect", functools.partial(self._phase, "empty-cache"))
        self.patches.replace(torch.nn.utils, "clip_grad_norm_", self._counted("clip"))
        self.facts["default_threads"] = max(
            torch.get_num_threads(), own_cores() if "OMP_NUM_THREADS" in os.environ else 1
        )
        # `when` and not an import: a build of torch without one of these parts must still be watched.
        self.imports.when("torch.utils.data.dataloader", self._on_dataloader)
        self.imports.when("torch.utils.checkpoint", self._on_checkpoint)
        self.imports.when("torch.amp.grad_scaler", self._on_scaler)
        self.imports.when("torch.amp.autocast_mode", self._on_autocast)
        self.imports.when("torch._dynamo.guards", self._on_dynamo)
        self.imports.when("safetensors.torch", self._on_safetensors)
        self.imports.when("transformers.generation.utils", self._on_generation)
        Switches(self, self.settings.switch).install(torch)

    def _on_dataloader(self, module: Any) -> None:
        agent = self

        def iterate(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def __iter__(loader: Any) -> Any:
                agent.note_loader(loader)
                with agent.phase("data"):
                    return original(loader)

            return __iter__

        def next_of(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def __next__(iterator: Any) -> Any:
                with agent.phase("data"):
                    return original(iterator)

            return __next__

        self.patches.replace(module.DataLoader, "__iter__", iterate)
        self.patches.replace(module._BaseDataLoaderIter, "__next__", next_of)

    def _on_checkpoint(self, module: Any) -> None:
        agent = self

        def checkpoint_of(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                agent.counts["recompute"] += 1
                if agent.settings.switch.get("no-recompute") or agent.facts.get("replay_without_recompute"):
                    kwargs = {k: v for k, v in kwargs.items() if k not in RECOMPUTE_OPTIONS}
                    return function(*args, **kwargs)
                return original(function, *args, **kwargs)

            return checkpoint

        self.patches.replace(module, "checkpoint", checkpoint_of)

    def _on_scaler(self, module: Any) -> None:
        def scale_of(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def scale(scaler: Any, outputs: Any) -> Any:
                self.counts["scaled"] += bool(scaler.is_enabled())
                scaled = original(scaler, outputs)
                self.unscaled = (scaled, outputs)
                return scaled

            return scale

        self.patches.replace(module.GradScaler, "scale", scale_of)

    def _on_autocast(self, module: Any) -> None:
        def enter_of(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def __enter__(context: Any) -> Any:
                self.counts["autocast"] += bool(getattr(context, "_enabled", True))  # models switch it off in parts
                return original(context)

            return __enter__

        self.patches.replace(module.autocast, "__enter__", enter_of)

    def _on_dynamo(self, guards: Any) -> None:
        for name in ("get_and_maybe_log_recompilation_reasons", "get_and_maybe_log_recompilation_reason"):
            if hasattr(guards, name):
                self.patches.replace(guards, name, self._reasons)
                # convert_frame and eval_frame look it up in the module at each call.
                return

    def _reasons(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def reasons(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            with contextlib.suppress(Exception):
                for reason in [found] if isinstance(found, str) else found:
                    self.recompile_reasons[str(reason).strip().splitlines()[0][:300]] += 1
            return found

        return reasons

    def _on_safetensors(self, module: Any) -> None:
        for name in ("save_file", "save_model"):
            self.patches.replace(module, name, functools.partial(self._phase, "save"))

    def _on_generation(self, module: Any) -> None:
        agent = self

        def generate_of(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
                Switches.generation(agent.settings.switch, kwargs)
                began = time.perf_counter()
                with agent.phase("generate"):
                    out = original(model, *args, **kwargs)
                if agent.is_ours():
                    agent.note_generation(model, args, kwargs, out, time.perf_counter() - began)
                return out

            return generate

        self.patches.replace(module.GenerationMixin, "generate", generate_of)

    def _phase(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += self.is_ours()
            with self.phase(name):
                return original(*args, **kwargs)

        return wrapped

    def _counted(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                self.counts[name] += 1
                return original(*args, **kwargs)

            return wrapped

        return make

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self.note_loss(tensors)
            self.end_evaluation()
            with self.phase("backward"):
                return original(tensors, *args, **kwargs)

        return backward

    # -- phases

    def is_ours(self) -> bool:
        return threading.get_ident() == self.thread and not self.probing and os.getpid() == self.pid

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the time of a block, unless it is inside a phase that has it all: an evaluation reads data too."""
        if not self.is_ours() or self.timeline.phase in WHOLE:
            yield
            return
        before = self.timeline.enter(name)
        try:
            yield
        finally:
            self.timeline.enter(before)

    @quietly
    def note_loss(self, tensors: Any) -> None:
        first = tensors if hasattr(tensors, "detach") else next(iter(tensors), None)
        scaled, plain_loss = self.unscaled
        self.unscaled = (None, None)
        if first is not None and first is scaled:
            first = plain_loss
        if first is not None and first.numel() == 1 and self.is_ours() and len(self.losses) < 4096:
            self.losses.append(read_later(first.detach()))
            if self.stage in ("waiting", "warm"):
                self.scalings.append(scalings_of(first))

    def note_parts(self) -> None:
        """Losses divided by the number of micro-batches, as frameworks and most loops do; told while warming up."""
        count = len(self.losses)
        if count > 1 and len(self.scalings) == count:
            self.in_parts |= all(any(abs(by * count - 1) < 1e-3 for by in found) for found in self.scalings)
        self.scalings = []

    @quietly
    def note_loader(self, loader: Any) -> None:
        if not self.is_ours():
            return
        names = ("batch_size", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "drop_last")
        facts = {name: plain(getattr(loader, name, None)) for name in names}
        facts["dataset"] = type(getattr(loader, "dataset", None)).__name__
        facts["batches"] = quietly(lambda: len(loader))()
        facts["evaluating"] = self.timeline.phase == "eval"
        if facts not in self.facts["loaders"] and len(self.facts["loaders"]) < 8:
            self.facts["loaders"].append(facts)

    @quietly
    def note_generation(self, model: Any, args: Any, kwargs: Any, out: Any, seconds: float) -> None:
        prompt = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        sequences = getattr(out, "sequences", out)
        config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
        cache = kwargs.get("use_cache", getattr(config, "use_cache", None))
        if prompt is not None and len(self.generations) < 1000:
            self.generations.append(
                {
                    "step": self.num_steps,
                    "rows": int(sequences.shape[0]),
                    "prompt": int(prompt.shape[1]),
                    "new": int(sequences.shape[1]) - int(prompt.shape[1]),
                    "cache": None if cache is None else bool(cache),
                    "seconds": seconds,
                    "site": user_site(),
                }
            )

    # -- the model

    def discover(self, optimizer: Any) -> None:
        """Find the modules whose parameters are stepped, and hear of their forwards from now on."""
        module_type = self.torch.nn.Module
        # `type(o)`, because some objects answer for their class with an import or an error.
        modules = [o for o in gc.get_objects() if issubclass(type(o), module_type)]
        inner = {id(child) for m in modules for child in vars(m).get("_modules", {}).values()}
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        roots = [Model(m, stepped) for m in modules if id(m) not in inner and "_parameters" in vars(m)]
        self.models = sorted((m for m in roots if m.size), key=lambda m: (not m.trained, -m.size))[:8]
        for model in self.models:
            for module in self._chain(model.module, model.size):
                self._listen(module, model)
        if self.models:
            Switches.model(self.settings.switch, self.models[0].module)
            self.note_model(self.models[0].module, optimizer)

    def _chain(self, module: Any, size: int) -> Iterator[Any]:
        """A root and, below it, whatever holds most of its weights: a framework may call any of them."""
        while module is not None:
            yield module
            if hasattr(module, "_orig_mod") or vars(module).get("_compiled_call_impl") is not None:
                return  # below is compiled code, which a hook would break
            big = [c for c in module.children() if sum(p.numel() for p in c.parameters()) > size / 2]
            module = big[0] if big else None

    def _listen(self, module: Any, model: Model) -> None:
        compiled = vars(module).get("_compiled_call_impl")
        if compiled is not None:  # module.compile(): hooks would be traced, so the call is wrapped instead

            def call(*args: Any, **kwargs: Any) -> Any:
                self.before_forward(model, module, args, kwargs)
                try:
                    return compiled(*args, **kwargs)
                finally:
                    self.after_forward()

            module._compiled_call_impl = call
            self.patches.add(lambda: setattr(module, "_compiled_call_impl", compiled))
            return
        is_compiling = self.torch.compiler.is_compiling

        def before(found: Any, args: Any, kwargs: Any) -> None:
            if not is_compiling():
                self.before_forward(model, found, args, kwargs)

        def after(found: Any, args: Any, out: Any) -> None:
            if not is_compiling():
                self.after_forward()

        self.patches.add(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        self.patches.add(module.register_forward_hook(after, always_call=True).remove)

    @quietly
    def before_forward(self, model: Model, module: Any, args: Any, kwargs: Any) -> None:
        self.depth += 1
        if self.depth > 1 or not self.is_ours():
            return
        torch = self.torch
        self._outside = None
        training = model.trained and torch.is_grad_enabled() and module.training
        batch = Batch(torch, args, kwargs)
        if training:
            self.end_evaluation()
            # The Trainer's way: the model divides its sum by the tokens of all micro-batches.
            self.in_parts |= kwargs.get("num_items_in_batch") is not None
            self.note_micro(module, batch)
            Switches.forward(self, module, len(self.micro))
            device = self.facts["device"]
            mixed = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            if mixed[0] and (self.facts.get("model") or {}).get("compiled"):  # no hook sees inside
                self.facts["compute_dtype"] = dtype_name(mixed[1])
            if self.settings.stop:
                self.last, self.mixed = (module, args, kwargs), mixed
        phase = "forward" if training else "reference" if module.training or not model.trained else "eval"
        self.forwards[(phase, batch.rows or 0, batch.length or 0)] += 1
        if self.timeline.phase not in WHOLE:
            # An evaluation lasts until training goes on: its data and its metrics are part of it.
            before = self.timeline.enter(phase)
            self._outside = None if phase == "eval" else before

    def end_evaluation(self) -> None:
        if self.timeline.phase == "eval" and self.is_ours():
            self.timeline.enter("other")

    @quietly
    def after_forward(self) -> None:
        self.depth = max(0, self.depth - 1)
        if self.depth == 0 and self.is_ours() and self._outside is not None:
            self.timeline.enter(self._outside)
            self._outside = None
        Switches.after_forward(self)

    def note_micro(self, module: Any, batch: Batch) -> None:
        torch = self.torch
        if torch.is_anomaly_enabled():
            self.counts["anomaly"] += 1
        if getattr(module, "require_backward_grad_sync", False):
            self.counts["synced"] += 1
        if len(self.micro) < 4096:
            self.micro.append(
                {
                    "rows": batch.rows,
                    "length": batch.length,
                    "tokens": None if batch.ids is None else batch.ids.numel(),
                    "real": read_later(batch.real_tokens(self.facts.get("pad_id"))),
                }
            )

    @quietly
    def note_model(self, module: Any, optimizer: Any) -> None:
        """What the trained model is; asked once."""
        torch = self.torch
        parameters = list(module.parameters())
        config = next((c for c in (getattr(m, "config", None) for m in module.modules()) if c is not None), None)
        linear = {id(m.weight): m.weight.numel() for m in module.modules() if is_linear(m)}
        tables = [m.weight for m in module.modules() if isinstance(m, torch.nn.Embedding)]
        table = {id(weight) for weight in tables}
        largest = max(tables, key=lambda weight: weight.numel(), default=None)
        wrapped = getattr(module, "_orig_mod", getattr(module, "module", module))
        self.facts["model"] = {
            "class": type(wrapped).__name__,
            "wrapper": type(module).__name__,
            "parameters": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "tensors": len(parameters),
            "matmul_weights": sum(linear.values()),
            "embedding_only": sum(p.numel() for p in parameters if id(p) in table and id(p) not in linear),
            "dtypes": dict(Counter(dtype_name(p.dtype) for p in parameters)),
            "devices": dict(Counter(p.device.type for p in parameters)),
            "config": config_of(config),
            "vocabulary": None if largest is None else int(largest.shape[0]),
            "compiled": hasattr(module, "_orig_mod") or vars(module).get("_compiled_call_impl") is not None,
            "attention": getattr(config, "_attn_implementation", None),
            "modules": dict(Counter(type(m).__name__ for m in module.modules()).most_common(30)),
        }
        pad = getattr(config, "pad_token_id", None)
        self.facts["pad_id"] = pad if isinstance(pad, int) else None
        if not self.facts["model"]["compiled"]:
            self.watch_dtype(module)

    def watch_dtype(self, module: Any) -> None:
        """The type the largest product really has, whatever the flags say."""
        linear = [m for m in module.modules() if is_linear(m)]
        if not linear:
            return
        largest = max(linear, key=lambda m: m.weight.numel())

        def note(found: Any, args: Any, out: Any) -> None:
            if hasattr(out, "dtype") and self.torch.is_grad_enabled() and not self.probing:
                self.facts["compute_dtype"] = dtype_name(out.dtype)
                handle.remove()

        handle = largest.register_forward_hook(note)
        self.patches.add(handle.remove)

    # -- the beat

    def before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.is_ours_or_first() and not self.ended:
            quietly(self._before_optimizer)(optimizer)

    def is_ours_or_first(self) -> bool:
        if self.primary is None and not self.probing and os.getpid() == self.pid:
            self.thread = threading.get_ident()
        return self.is_ours()

    def _before_optimizer(self, optimizer: Any) -> None:
        if self.primary is None:
            self.primary = id(optimizer)
            self.facts["framework"] = framework_of_stack()
            self.facts["step_site"] = user_site()
            self.discover(optimizer)
            self._take_device(optimizer)
            self.stage = "warm"
        if str(id(optimizer)) not in self.facts["optimizers"]:
            self.facts["optimizers"][str(id(optimizer))] = optimizer_facts(optimizer)
        self.end_evaluation()
        self.timeline.enter("optimizer")

    def after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.is_ours() or self.ended:
            return
        quietly(self.timeline.enter)("other")
        if id(optimizer) == self.primary:
            quietly(self.end_step)(optimizer)
            if self.stage == "done" and not self.ended:
                self.ended = True
                self.leave(optimizer)

    def _take_device(self, optimizer: Any) -> None:
        torch = self.torch
        devices = Counter(p.device.type for group in optimizer.param_groups for p in group["params"])
        self.facts["device"] = devices.most_common(1)[0][0] if devices else None
        used_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.facts["cuda_used"] = used_cuda
        if used_cuda:

            def stamp() -> Any:
                if torch.cuda.is_current_stream_capturing():
                    return None
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                return event

            self.timeline.make_event = stamp

    def end_step(self, optimizer: Any) -> None:
        """The optimizer has stepped: close the books of this step and decide what the next one is for."""
        now = time.perf_counter()
        host, seams = self.timeline.cut()
        compiled = compile_seconds()
        self.note_parts()
        line = {
            "step": self.num_steps,
            "stage": self.stage,
            "time": time.time(),
            "seconds": now - self.step_began if self.step_began else None,
            "host": host,
            "seams": seams,
            "micro": self.micro,
            "loss": self.losses,
            "memory": self.memory(),
            "compile_s": compiled - self.compile_seen,
            "counts": dict(self.counts),
            "lr": plain_lr(optimizer),
            "cpu_s": time.process_time() - self.cpu_began,
        }
        self.compile_seen = compiled
        self.totals.update(self.counts)
        self.facts["accumulation"] = max(1, len(self.micro))
        self.counts = Counter()
        self.micro, self.losses, self.depth = [], [], 0
        self.waiting.append(line)
        self.write_ready()
        self.num_steps += 1
        self._next_stage(now)
        self.step_began, self.cpu_began = time.perf_counter(), time.process_time()
        self.timeline.cut()  # what we did ourselves just now belongs to no step

    def _next_stage(self, now: float) -> None:
        asked = self.settings
        if self.stage == "warm" and self.facts["accumulation"] > 8:
            self.profiled = 1  # reading a profile takes a tenth of a millisecond an event
        profiled = self.profiled if asked.look else 0
        if self.stage == "warm" and self.num_steps >= asked.warm:
            self.stage, self.began = "timed", now
            asked.fit()
            if asked.look:
                self.sampler.start()
        elif self.stage == "timed":
            over = now - self.began > asked.seconds * (0.7 if asked.look else 1.0)
            over = self.agreed(over and self.num_steps >= asked.warm + FEWEST_TIMED)
            if self.num_steps >= asked.steps - profiled or over:
                self.sampler.stop()
                self.stage = "profiled" if profiled else "done"
                self.profile_until = self.num_steps + profiled
                if profiled:
                    self.begin_profile()
        elif self.stage == "profiled" and self.num_steps >= self.profile_until:
            self.end_profile()
            self.stage = "done"

    def agreed(self, over: bool) -> bool:
        """Ranks leave the window at the same step, or one would wait for ever: rank 0 says which, two steps ahead."""
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

    # -- profile

    def begin_profile(self) -> None:
        # autograd's own front to the same profiler: torch.profiler's would import dynamo and inductor first.
        on_gpu = bool(self.facts.get("cuda_used"))
        if on_gpu:
            self.watch_syncs()
        profile = self.torch.autograd.profiler.profile
        # Without use_kineto this front times operators by CUDA events, and sees no kernel at all.
        self.profiler = profile(record_shapes=True, use_device="cuda" if on_gpu else None, use_kineto=True)
        self.profiler.__enter__()
        self.profile_began = time.perf_counter()

    def watch_syncs(self) -> None:
        """Time the calls that bring a value to the host, with the line that makes them."""
        tensor = self.torch.Tensor
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero"):
            self.patches.replace(tensor, name, functools.partial(self._sync, f"Tensor.{name}"))
        self.patches.replace(self.torch.cuda, "synchronize", functools.partial(self._sync, "torch.cuda.synchronize"))

    def _sync(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            on_device = name == "torch.cuda.synchronize" or getattr(args[0], "is_cuda", False)
            if not on_device or not self.is_ours() or self.stage != "profiled":
                return original(*args, **kwargs)
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seen = self.sync_sites[f"{name} at {user_site(2)}"]
                seen[0] += 1
                seen[1] += time.perf_counter() - began

        return wrapped

    def end_profile(self) -> None:
        if self.profiler is None:
            return
        seconds = time.perf_counter() - self.profile_began
        profiler, self.profiler = self.profiler, None
        before, self.probing = self.probing, True  # it waits for the device as it ends: no wait of the script's
        try:
            profiler.__exit__(None, None, None)
        finally:
            self.probing = before
        steps = self.profiled
        self.facts["profile"] = summary_of(profiler, seconds=seconds, steps=steps)
        self.facts["syncs"] = [
            {"site": site, "count": count / steps, "seconds": spent / steps}
            for site, (count, spent) in sorted(self.sync_sites.items(), key=lambda s: -s[1][1])[:12]
        ]

    # -- writing

    def write_ready(self, wait: bool = False) -> None:
        """Write the steps whose events the device has passed; on a CPU that is all of them.

        The first waits for the second: its forwards were not heard of yet, which tell what its losses are.
        """
        while self.waiting and (wait or self.num_steps > 0):
            line = self.waiting[0]
            seams = line["seams"]
            if seams and not seams[-1][2].query():
                if not wait:
                    return
                seams[-1][2].synchronize()
            self.waiting.pop(0)
            device: dict[str, float] = defaultdict(float)
            for phase, start, end in seams:
                with contextlib.suppress(RuntimeError):  # on another stream or device, and not passed there yet
                    device[phase] += start.elapsed_time(end) / 1e3
            line["device"] = dict(device)
            del line["seams"]
            for micro in line["micro"]:
                micro["real"] = number(micro["real"])
            known = [loss for loss in map(number, line["loss"]) if loss is not None]
            line["loss"] = sum(known) / (1 if self.in_parts else len(known)) if known else None
            self.append(line)

    def append(self, line: dict[str, Any]) -> None:
        if self.file is None:
            path = os.path.join(self.settings.out, f"steps-{self.rank()}-{self.pid}.jsonl")
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self.write_facts("running")
        os.write(self.file, (json.dumps(line) + "\n").encode())

    def rank(self) -> int:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
        return int(os.environ.get("RANK", "0"))

    def write_facts(self, state: str) -> None:
        torch = self.torch
        facts = {
            **self.facts,
            "state": state,
            "pid": self.pid,
            "rank": self.rank(),
            "world": int(os.environ.get("WORLD_SIZE", "1")),
            "argv": sys.argv,
            "python": sys.version.split()[0],
            "torch": str(torch.__version__),
            "versions": {
                name: version_of(name) for name in ("transformers", "accelerate", "lightning", "trl", "datasets")
            },
            "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
            "cores": num_cores(),
            "threads": torch.get_num_threads(),
            "flags": flags_of(torch),
            "trainer_arguments": trainer_arguments(),
            "totals": dict(self.totals),
            "gpu": self.facts.get("gpu") or (gpu_facts(torch) if self.facts.get("cuda_used") else None),
            "forwards": [[*key, count] for key, count in self.forwards.most_common(200)],
            "generations": self.generations,
            "samples": [[*key, count] for key, count in self.sampler.counts.most_common(200)],
            "recompiles": {"count": graph_count(), "reasons": dict(self.recompile_reasons.most_common(8))},
            "num_steps": self.num_steps,
            "errors": ERRORS,
        }
        path = os.path.join(self.settings.out, f"facts-{facts['rank']}-{self.pid}.json")
        with open(path + ".tmp", "w") as file:
            json.dump(facts, file, default=str)
        os.replace(path + ".tmp", path)

    # -- leaving

    def leave(self, optimizer: Any) -> None:
        """The window is over: write down what was seen, then end the script or let it go on as if never watched."""
        asked = self.settings
        self.sampler.stop()
        self.facts["anomaly"], self.facts["recomputing"] = self.totals["anomaly"] > 0, self.totals["recompute"] > 0
        if self.facts.get("cuda_used"):
            self.facts["gpu"] = quietly(gpu_facts)(self.torch)  # before replays with larger batches
        if asked.stop and asked.look:
            self.probing = True
            quietly(Replays(self, optimizer).run)()
        quietly(self.write_ready)(wait=asked.stop)
        quietly(self.write_facts)("stopped" if asked.stop else "watched")
        self.imports.wanted.clear()
        self.patches.undo()
        if not asked.stop:
            return
        if threading.current_thread() is not threading.main_thread():
            finish_process()
        # A loop that swallows SystemExit is ended at its next step.
        self.on_step(lambda *_: finish_process())
        raise SystemExit(0)

    def at_exit(self) -> None:
        """The script ended before the window did."""
        if os.getpid() != self.pid or self.ended or self.torch is None or self.primary is None:
            return
        self.ended = True
        self.sampler.stop()
        if self.profiler is not None:
            quietly(self.end_profile)()
        quietly(self.write_ready)(wait=True)
        quietly(self.write_facts)("ended")

    def on_crash(self, kind: Any, error: Any, trace: Any) -> None:
        if os.getpid() == self.pid and not issubclass(kind, KeyboardInterrupt):
            text = "".join(traceback.format_exception(kind, error, trace))
            path = os.path.join(self.settings.out, f"crash-{os.environ.get('RANK', '0')}-{self.pid}.txt")
            with contextlib.suppress(OSError), open(path, "w") as file:
                file.write(text[-20000:])


# Phases that keep all the time inside them.
WHOLE = ("generate", "save", "empty-cache", "backward", "eval")
RECOMPUTE_OPTIONS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


def finish_process() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)


# -- facts


def plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def dtype_name(dtype: Any) -> str:
    return str(dtype).replace("torch.", "")


def is_linear(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__ in ("Linear", "Conv1D", "NonDynamicallyQuantizableLinear")
        and weight is not None
        and weight.dim() == 2
    )


def config_of(config: Any) -> dict[str, Any]:
    """The numbers and words of a model's configuration; nothing nested, nothing executable."""
    values = config.to_dict() if hasattr(config, "to_dict") else getattr(config, "__dict__", {})
    return {str(k): v for k, v in values.items() if isinstance(v, (int, float, str, bool)) and len(str(v)) < 100}


def optimizer_facts(optimizer: Any) -> dict[str, Any]:
    group = optimizer.param_groups[0]
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    return {
        "class": type(optimizer).__name__,
        "module": type(optimizer).__module__,
        "fused": group.get("fused"),
        "foreach": group.get("foreach"),
        "lr": number(group.get("lr")),
        "tensors": len(parameters),
        "elements": sum(p.numel() for p in parameters),
        "devices": dict(Counter(p.device.type for p in parameters)),
        "dtypes": dict(Counter(dtype_name(p.dtype) for p in parameters)),
    }


def plain_lr(optimizer: Any) -> float | None:
    """A learning rate that is a tensor on the device is not read: that would wait for it."""
    rate = optimizer.param_groups[0].get("lr")
    return float(rate) if isinstance(rate, (int, float)) else None


def trainer_arguments() -> list[str] | None:
    """The names this version of transformers knows, so that no advice names another."""
    module = sys.modules.get("transformers.training_args")
    fields = getattr(getattr(module, "TrainingArguments", None), "__dataclass_fields__", None)
    return None if fields is None else sorted(fields)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_cores() -> int:
    """This rank's part of the cores."""
    return max(1, num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def version_of(name: str) -> str | None:
    module = sys.modules.get(name)
    return None if module is None else str(getattr(module, "__version__", "unknown"))


def matmul_precision(torch: Any) -> str:
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # from 2.9 on: set by fp32_precision, after which this question is refused
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def flags_of(torch: Any) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "matmul_precision": matmul_precision(torch),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": dtype_name(torch.get_default_dtype()),
    }
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        enabled = getattr(torch.backends.cuda, f"{name}_sdp_enabled", None)
        flags[f"{name}_sdp"] = None if enabled is None else quietly(enabled)()
    return flags


def gpu_facts(torch: Any) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    stats = torch.cuda.memory_stats()
    return {
        "name": properties.name,
        "sm": [properties.major, properties.minor],
        "memory_gib": properties.total_memory / 2**30,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "alloc_retries": stats.get("num_alloc_retries", 0),
        "device_mallocs": stats.get("num_device_alloc", None),
    }


def compile_seconds() -> float:
    """Seconds torch.compile has worked so far in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    times = getattr(utils, "compilation_time_metrics", None) or {}
    with contextlib.suppress(Exception):
        # The outermost entry holds all others; its name has changed once.
        outer = [v for k, v in times.items() if k.endswith("compile_inner")] or [
            v for k, v in times.items() if "_compile" in k
        ][:1]
        return float(sum(sum(v) for v in outer))
    return 0.0


def graph_count() -> int | None:
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    return None if counters is None else int(counters["stats"].get("unique_graphs", 0))


def summary_of(profiler: Any, *, seconds: float, steps: int) -> dict[str, Any]:
    """What a profiled stretch says, per step: operators on the host, kernels on the device, why the device waited."""
    operators: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    busy: list[tuple[float, float]] = []
    calls: list[tuple[float, float, str]] = []
    for event in profiler.function_events:
        start, end = event.time_range.start, event.time_range.end
        if "cuda" in str(event.device_type).lower():
            if not getattr(event, "is_user_annotation", False) and not event.name.startswith(
                ("aten::", "ProfilerStep", "Optimizer.", "##", "enumerate(")
            ):
                kernels[event.name][0] += 1
                kernels[event.name][1] += end - start
                busy.append((start, end))
        else:
            shapes = json.dumps([s for s in (event.input_shapes or []) if s][:3])
            operators[(event.name, shapes)][0] += 1
            operators[(event.name, shapes)][1] += event.self_cpu_time_total
            if event.name.startswith("cuda") and WAITS.search(event.name):
                calls.append((start, end, event.name))
    top = sorted(operators.items(), key=lambda o: -o[1][1])
    chosen = top[:60] + [o for o in top[60:] if ATTENTION.search(o[0][0])][:20]
    return {
        "seconds": seconds / steps,
        "num_operators": sum(c for (n, _), (c, _) in operators.items() if n.startswith("aten::")) / steps,
        "operators": [[name, shapes, c / steps, us / 1e6 / steps] for (name, shapes), (c, us) in chosen],
        "kernels": [
            [name[:160], c / steps, us / 1e6 / steps]
            for name, (c, us) in sorted(kernels.items(), key=lambda k: -k[1][1])[:60]
        ],
        "num_kernels": sum(c for c, _ in kernels.values()) / steps,
        "busy_s": covered(busy) / 1e6 / steps,
        "waits": {name: us / 1e6 / steps for name, us in waits_of(busy, calls).items()},
        "copies_pageable_s": sum(us for n, (_, us) in kernels.items() if "HtoD" in n and "Pageable" in n) / 1e6 / steps,
    }


WAITS = re.compile(r"Synchronize|Malloc|Free|Memcpy(?!Async)")
ATTENTION = re.compile(r"softmax|scaled_dot_product|bmm|attention")


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def waits_of(busy: list[tuple[float, float]], calls: list[tuple[float, float, str]]) -> dict[str, float]:
    """The device's idle microseconds by what the host did: asked for memory, waited for a value, or was too slow."""
    found: dict[str, float] = defaultdict(float)
    calls = sorted(calls)
    reach, index = None, 0
    for start, end in sorted(busy):
        if reach is not None and start > reach:
            while index < len(calls) and calls[index][1] < reach - 100:
                index += 1
            inside = [c for c in calls[index : index + 64] if c[0] < start and c[1] > reach - 100]
            asked = [(max(0.0, min(e, start) - max(b, reach)), n) for b, e, n in inside if "Malloc" in n or "Free" in n]
            memory = sum(us for us, _ in asked)
            rest = start - reach - memory
            found["memory"] += memory
            found["malloc"] += sum(us for us, name in asked if "Malloc" in name)
            # After a synchronisation the host begins to launch anew: the queue was empty because of it.
            found["sync" if any("Malloc" not in c[2] and "Free" not in c[2] for c in inside) else "launch"] += rest
        reach = end if reach is None else max(reach, end)
    return dict(found)


# -- what if


class Replays:
    """The last batch, forward and backward again, with one thing changed at a time.

    Only when the script is stopped afterwards: gradients and random numbers are not what they were.
    """

    def __init__(self, agent: Agent, optimizer: Any) -> None:
        self.agent, self.torch, self.optimizer = agent, agent.torch, optimizer
        self.found: dict[str, Any] = {}
        self.replay_s = agent.settings.replay_s
        self.deadline = time.perf_counter() + agent.settings.replays_s
        self.device = agent.facts.get("device") or "cpu"
        self.anomaly = bool(agent.facts.get("anomaly"))

    def run(self) -> None:
        agent = self.agent
        agent.facts["replays"] = self.found
        self.found["matmul_flops"] = quietly(self.matmul_peak)()
        quietly(self.optimizers)()
        quietly(self.attention)()
        if agent.last is None or agent.facts["model"]["compiled"]:
            return  # compiled code would be compiled anew for every change
        module, args, kwargs = agent.last
        self.mixed = agent.mixed
        if self.is_sharded(module):
            return  # a collective that the other ranks do not join would hang
        self.synced = module
        self.module = module.module if hasattr(module, "require_backward_grad_sync") else module
        self.args, self.kwargs = args, kwargs
        doubles = "float64" in agent.facts["model"]["dtypes"]
        for question in (self.no_sync, self.switches, self.precision, self.single if doubles else self.larger_batch):
            quietly(question)()

    @staticmethod
    def is_sharded(module: Any) -> bool:
        return "FullyShardedDataParallel" in type(module).__name__ or "FSDP" in type(module).__name__

    # -- the machinery

    def once(self, module: Any = None, times: int = 1) -> None:
        torch = self.torch
        rows = next((t.shape[0] for _, t in tensors_of([self.args, self.kwargs]) if t.dim() > 0), None)

        def grown(tensor: Any) -> Any:
            if times > 1 and tensor.dim() > 0 and tensor.shape[0] == rows:
                return torch.cat([tensor] * times)
            return tensor

        args, kwargs = mapped(list(self.args), grown), mapped(dict(self.kwargs), grown)
        on, dtype = self.mixed
        with torch.enable_grad(), torch.autocast(self.device, dtype=dtype, enabled=on):
            loss = scalar_loss(torch, (module or self.module)(*args, **kwargs))
        if loss is not None:
            loss.backward()

    def clock(self, call: Callable[[], None]) -> float:
        cuda = self.device == "cuda"
        if cuda:
            self.torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if cuda:
            self.torch.cuda.synchronize()
        return time.perf_counter() - began

    def against(self, plain_call: Callable[[], None], changed: Callable[[], None]) -> tuple[float, float] | None:
        """Best seconds of either, taken in turns so that a busy machine slows both."""
        best = [float("inf"), float("inf")]
        began = time.perf_counter()
        for turn in range(10):
            for which, call in enumerate((plain_call, changed)):
                seconds = self.clock(call)
                if turn > 0:  # the first turn warms up
                    best[which] = min(best[which], seconds)
            spent = time.perf_counter() - began
            if (turn >= 3 and spent > self.replay_s) or (turn >= 2 and spent > 5 * self.replay_s):
                break
        return None if float("inf") in best else (best[0], best[1])

    def ask(self, name: str, change: Callable[[], Any], times: int = 1) -> None:
        """Compare a plain replay with one inside `change()`."""
        if time.perf_counter() > self.deadline:
            return

        def changed() -> None:
            with self.state(anomaly=self.anomaly), change():
                self.once(times=times)

        try:
            taken = self.against(self.as_it_was, changed)
        except self.torch.cuda.OutOfMemoryError:
            self.found[name] = "out of memory"
            self.torch.cuda.empty_cache()
            return
        if taken:
            self.found[name] = [taken[0], taken[1] / times]

    def as_it_was(self) -> None:
        with self.state(anomaly=self.anomaly):
            self.once()

    @contextlib.contextmanager
    def state(self, anomaly: bool) -> Iterator[None]:
        before = self.torch.is_anomaly_enabled()
        self.torch.autograd.set_detect_anomaly(anomaly)
        try:
            yield
        finally:
            self.torch.autograd.set_detect_anomaly(before)

    # -- the questions

    def no_sync(self) -> None:
        if self.synced is self.module or self.agent.facts["accumulation"] < 2:
            return
        # Fixed counts: every rank must take part in the same collectives.
        timed: dict[bool, float] = {True: float("inf"), False: float("inf")}
        for _ in range(6):
            for sync in (True, False):
                with contextlib.nullcontext() if sync else self.synced.no_sync():
                    timed[sync] = min(timed[sync], self.clock(lambda: self.once(self.synced)))
        self.found["no-sync"] = [timed[True], timed[False]]

    def switches(self) -> None:
        torch, facts = self.torch, self.agent.facts
        if facts.get("anomaly"):
            self.ask("anomaly", lambda: self.state(anomaly=False))
        if facts.get("recomputing"):
            self.ask("recompute", self.without_recompute)
        if self.device == "cpu" and torch.get_num_threads() < facts["default_threads"]:
            self.ask("threads", self.all_threads)
        if torch.are_deterministic_algorithms_enabled():
            self.ask("deterministic", self.nondeterministic)
        if self.device == "cuda" and not (
            torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
        ):
            self.ask("attention-backends", self.all_backends)

    def precision(self) -> None:
        torch, facts = self.torch, self.agent.facts
        if self.device != "cuda" or torch.cuda.get_device_capability()[0] < 8:
            return
        if facts.get("compute_dtype", "float32") == "float32":
            if matmul_precision(torch) == "highest":
                self.ask("tf32", self.tf32)
            self.ask("bf16", self.in_bf16)

    def larger_batch(self) -> None:
        ids = Batch(self.torch, self.args, self.kwargs).ids
        if self.device == "cuda" and ids is not None and ids.numel() >= ENOUGH_TOKENS:
            return
        self.anomaly = False  # what a stack for every operation costs is not the batch's fault
        for times in (2, 4):
            self.ask(f"batch-{times}", contextlib.nullcontext, times=times)

    def single(self) -> None:
        """float64 to float32; last, because the module stays that way."""
        torch = self.torch
        plain_s = self.against(self.as_it_was, self.as_it_was)
        torch.set_default_dtype(torch.float32)
        self.module.float()
        self.args = mapped(list(self.args), lambda t: t.float() if t.is_floating_point() else t)
        self.kwargs = mapped(dict(self.kwargs), lambda t: t.float() if t.is_floating_point() else t)
        single_s = self.against(self.as_it_was, self.as_it_was)
        if plain_s and single_s:
            self.found["single"] = [min(plain_s), min(single_s)]

    @contextlib.contextmanager
    def without_recompute(self) -> Iterator[None]:
        self.agent.facts["replay_without_recompute"] = True
        try:
            yield
        finally:
            del self.agent.facts["replay_without_recompute"]

    @contextlib.contextmanager
    def all_threads(self) -> Iterator[None]:
        before = self.torch.get_num_threads()
        self.torch.set_num_threads(self.agent.facts["default_threads"])
        try:
            yield
        finally:
            self.torch.set_num_threads(before)

    @contextlib.contextmanager
    def nondeterministic(self) -> Iterator[None]:
        self.torch.use_deterministic_algorithms(False)
        try:
            yield
        finally:
            self.torch.use_deterministic_algorithms(True)

    @contextlib.contextmanager
    def in_bf16(self) -> Iterator[None]:
        before, self.mixed = self.mixed, (True, self.torch.bfloat16)
        try:
            yield
        finally:
            self.mixed = before

    @contextlib.contextmanager
    def tf32(self) -> Iterator[None]:
        before = matmul_precision(self.torch)
        self.torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            self.torch.set_float32_matmul_precision(before)

    @contextlib.contextmanager
    def all_backends(self) -> Iterator[None]:
        cuda = self.torch.backends.cuda
        before = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
        Switches.attention_backends(self.torch)
        try:
            yield
        finally:
            cuda.enable_flash_sdp(before[0])
            cuda.enable_mem_efficient_sdp(before[1])
            cuda.enable_math_sdp(before[2])

    def matmul_peak(self) -> float:
        """Operations a second of a large product, as the ceiling where no datasheet is at hand."""
        torch = self.torch
        side = 4096 if self.device == "cuda" else 1024
        a, b = (torch.randn(side, side, device=self.device, dtype=torch.float32) for _ in range(2))
        best = min(self.clock(lambda: torch.mm(a, b)) for _ in range(4))
        return float(2 * side**3 / best)

    def optimizers(self) -> None:
        """A sample of the parameters stepped by a twin of the optimizer, and by the fused one."""
        torch = self.torch
        parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        group = self.optimizer.param_groups[0]
        state: dict[str, Any] = next(iter(self.optimizer.state.values()), {}) if self.optimizer.state else {}
        if group.get("fused") or "exp_avg" not in state:
            return
        sample: list[Any] = []
        room = 30_000_000
        if self.device == "cuda":  # all of them, where there is room for two twins: small tensors cost launches
            room = min(500_000_000, self.torch.cuda.mem_get_info()[0] // 64)
        for parameter in parameters[:512]:
            room -= parameter.numel()
            if room < 0 and sample:
                break
            sample.append(parameter)

        def twin(kind: Any, **how: Any) -> Any:
            clones = [torch.nn.Parameter(p.detach().clone()) for p in sample]
            for clone in clones:
                clone.grad = torch.zeros_like(clone)
            return kind(clones, lr=1e-4, **how)

        kind = type(self.optimizer)
        known = kind.__module__.startswith("torch.optim")
        try:
            plain_one = twin(kind, foreach=group.get("foreach")) if known else twin(kind)
            fused_one = twin(torch.optim.AdamW, fused=True)
        except (TypeError, RuntimeError):
            return
        taken = self.against(lambda: plain_one.step(), lambda: fused_one.step())
        if taken:
            self.found["fused"] = list(taken)

    def attention(self) -> None:
        """Attention written out as products and a softmax, against the fused operator, in the shapes that were seen."""
        torch = self.torch
        shapes = Counter[tuple[int, ...]]()
        for name, text, count, _ in (self.agent.facts.get("profile") or {}).get("operators", []):
            first = (json.loads(text) or [[]])[0]
            if name == "aten::_softmax" and len(first) in (3, 4) and first[-1] == first[-2] and first[-1] > 1:
                shapes[tuple(first)] += count
        if not shapes:
            return
        shape, count = shapes.most_common(1)[0]
        width = self.head_width(shape)
        if width is None:
            return
        dtype = getattr(torch, self.agent.facts.get("compute_dtype", "float32"))
        q, k, v = (
            torch.randn(*shape[:-1], width, device=self.device, dtype=dtype, requires_grad=True) for _ in range(3)
        )
        mask = torch.ones(shape[-2], shape[-1], device=self.device, dtype=torch.bool).tril()

        on, mixed = self.agent.mixed

        def written_out() -> None:
            scores = (q @ k.transpose(-2, -1) * width**-0.5).masked_fill(~mask, float("-inf"))
            (torch.softmax(scores, -1) @ v).sum().backward()

        def fused() -> None:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

        with torch.autocast(self.device, dtype=mixed, enabled=on):  # where it is on, a softmax is in float32
            taken = self.against(written_out, fused)
        if taken:
            self.found["attention"] = [taken[0], taken[1], count, list(shape)]

    def head_width(self, shape: tuple[int, ...]) -> int | None:
        """The width of a head, from the product that made the scores."""
        heads = 1
        for size in shape[:-2]:
            heads *= size
        for name, text, _, _ in self.agent.facts["profile"]["operators"]:
            shapes = json.loads(text)
            if name == "aten::bmm" and len(shapes) >= 2 and len(shapes[0]) == 3:
                (batch, rows, inner), (_, _, columns) = shapes[0], shapes[1]
                if batch == heads and rows == shape[-2] and columns == shape[-1]:
                    return int(inner)
        return None


# -- switches: fixes put in from outside, to be measured


class Switches:
    """Global changes that `--prove` makes in the script's process, before it runs."""

    def __init__(self, agent: Agent, asked: dict[str, Any]) -> None:
        self.agent, self.asked = agent, asked

    def install(self, torch: Any) -> None:
        asked, patches = self.asked, self.agent.patches
        if asked.get("tf32"):
            torch.set_float32_matmul_precision("high")
            patches.replace(torch, "set_float32_matmul_precision", lambda _: lambda *_: None)
        if asked.get("threads"):
            torch.set_num_threads(int(asked["threads"]))
            patches.replace(torch, "set_num_threads", lambda _: lambda *_: None)
        if asked.get("empty-cache"):
            patches.replace(torch.cuda, "empty_cache", lambda _: lambda: None)
            patches.replace(gc, "collect", lambda _: lambda *_: 0)
        if asked.get("no-double"):
            patches.replace(torch.nn.Module, "double", lambda _: lambda module: module)
            patches.replace(torch.Tensor, "double", lambda _: lambda tensor: tensor.float())
            patches.replace(torch, "set_default_dtype", lambda _: lambda *_: None)
        if asked.get("dynamic"):
            patches.replace(torch, "compile", lambda original: functools.partial(original, dynamic=True))
        if asked.get("attention"):
            self.attention_backends(torch)
            for name in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_math_sdp"):
                patches.replace(torch.backends.cuda, name, lambda _: lambda *_: None)
        if asked.get("fused"):
            for name in ("Adam", "AdamW", "SGD"):
                patches.replace(getattr(torch.optim, name), "__init__", self._with(fused=True, foreach=None))
        if asked.get("nondeterministic"):
            patches.replace(torch, "use_deterministic_algorithms", lambda _: lambda *_, **__: None)
        if asked.get("loader"):
            self.agent.imports.when("torch.utils.data.dataloader", self._loader)
        if asked.get("trainer"):
            self.agent.imports.when("transformers.training_args", self._trainer)

    @staticmethod
    def attention_backends(torch: Any) -> None:
        for name in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_math_sdp"):
            getattr(torch.backends.cuda, name)(True)

    def _loader(self, module: Any) -> None:
        self.agent.patches.replace(module.DataLoader, "__init__", self._with(**self.asked["loader"]))

    def _trainer(self, module: Any) -> None:
        values = self.asked["trainer"]

        def post_init_of(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def __post_init__(arguments: Any) -> None:
                for name, value in values.items():
                    setattr(arguments, name, changed_value(getattr(arguments, name, None), value))
                original(arguments)

            return __post_init__

        self.agent.patches.replace(module.TrainingArguments, "__post_init__", post_init_of)

    @staticmethod
    def _with(**changes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """An `__init__` whose arguments, however they are passed, have these values."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            import inspect

            names = list(inspect.signature(original).parameters)

            @functools.wraps(original)
            def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
                given = {names[i + 1]: value for i, value in enumerate(args)}
                asked = {**given, **kwargs}
                asked.update({k: changed_value(asked.get(k), v) for k, v in changes.items() if k in names})
                original(self, **asked)

            return __init__

        return make

    @staticmethod
    def model(asked: dict[str, Any], module: Any) -> None:
        """Once, when the model is known."""
        for part in module.modules() if asked.get("sdpa") else ():
            if hasattr(part, "set_attn_implementation"):
                part.set_attn_implementation("sdpa")
                return

    @staticmethod
    def forward(agent: Agent, module: Any, micro: int) -> None:
        """At the start of a training forward."""
        asked = agent.settings.switch
        if asked.get("anomaly-off") and agent.torch.is_anomaly_enabled():
            agent.torch.set_anomaly_enabled(False)
        if asked.get("no-sync") and hasattr(module, "require_backward_grad_sync"):
            module.require_backward_grad_sync = micro >= int(asked["no-sync"])
        if asked.get("autocast"):
            agent.autocast = agent.torch.autocast(agent.facts["device"], dtype=agent.torch.bfloat16)
            agent.autocast.__enter__()

    @staticmethod
    def after_forward(agent: Agent) -> None:
        if agent.depth == 0 and agent.autocast is not None:
            agent.autocast.__exit__(None, None, None)
            agent.autocast = None

    @staticmethod
    def generation(asked: dict[str, Any], kwargs: dict[str, Any]) -> None:
        if asked.get("kv-cache"):
            kwargs["use_cache"] = True


def changed_value(now: Any, wanted: Any) -> Any:
    """The wanted value, or so many times what it is."""
    if not isinstance(wanted, dict):
        return wanted
    return now * wanted["times"] if isinstance(now, (int, float)) and not isinstance(now, bool) else now


def tell_stack(settings: Settings) -> None:
    """On a signal the main thread's stack goes to a file, whatever it is at: no thread of ours has to run for that."""
    if settings.stack_signal is not None:
        path = os.path.join(settings.out, f"stack-{os.environ.get('RANK', '')}-{os.getpid()}.txt")
        # Kept open for the life of the process, as the handler needs it.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(settings.stack_signal, file=descriptor, all_threads=False)


def start() -> Agent:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would tell the script's stderr of itself
    imports = ImportHook()
    agent = Agent(Settings(os.environ["FLATOUT_AGENT"]), imports)
    quietly(tell_stack)(agent.settings)
    sys.meta_path.insert(0, imports)
    imports.when("torch", agent.on_torch)
    atexit.register(agent.at_exit)
    before = sys.excepthook

    def excepthook(kind: Any, error: Any, trace: Any) -> None:
        quietly(agent.on_crash)(kind, error, trace)
        before(kind, error, trace)

    sys.excepthook = excepthook
    return agent


if os.environ.get("FLATOUT_AGENT") and __name__ == "_flatout_agent":
    AGENT = start()
