"""The trained model and its forward passes: found by the parameters that are updated."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .facts import config_of, dtype_name, is_linear, matmul_weights
from .hooks import quietly
from .tensors import Batch, detached, mapped, read_later
from .timeline import WHOLE

if TYPE_CHECKING:
    from .agent import Agent


# More forward passes without gradients than this in a row are a loop that generates text.
MOST_WITHOUT_GRADIENT = 8


# Modules followed at most: called roots, or the parts of a model that is called part by part.
MOST_MODELS, MOST_PARTS = 8, 64


class Model:
    """One module that is called: the one that is trained, a part of it, or another that only runs."""

    def __init__(self, module: Any, *, is_trained: Callable[[Any], bool]) -> None:
        self.module = module
        parameters = list(module.parameters())
        self.trained = any(map(is_trained, parameters))
        self.size = sum(p.numel() for p in parameters)


class Forwards:
    """Follows every forward pass of the models there are, and counts the micro-batches of a step."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.models: list[Model] = []
        self.roots: list[Any] = []  # that hold stepped parameters
        self.depth = 0
        self.micro: list[dict[str, Any]] = []
        self.calls: list[tuple[Any, Any, Any]] = []  # of the training pass that is under way
        self.last: list[tuple[Any, Any, Any]] = []  # of the last one that was followed by a backward pass
        self.mixed: tuple[bool, Any] = (False, None)  # autocast, as it was around the forward pass
        self.counts: Counter[tuple[str, int, int]] = Counter()
        self._called: set[int] = set()  # the modules of the pass that is under way
        self._stepped: set[int] = set()
        self._undo: list[Callable[[], None]] = []
        self._outside: str | None = None
        self._training = False
        self._without_gradient = 0
        self._deepened, self._empty = False, 0  # steps in a row without a training forward
        self._any = False  # the script makes new models, so any that is called counts

    def take(self) -> list[dict[str, Any]]:
        """The micro-batches of the step that ends."""
        taken, self.micro, self.depth = self.micro, [], 0
        self._follow(training=True)
        self._empty = 0 if taken else self._empty + 1
        parts = [part for root in self.roots for part in root.children()]
        if self._empty == 2 and parts and not self._deepened:  # the first step after discovery began before it
            self._deepened = True  # the roots exist, but the script calls their parts
            quietly(self._follow_modules)(parts)
        return taken

    def passed_back(self) -> None:
        """A backward pass begins: what was called before it is one micro-batch."""
        if self.calls:
            self.last = self.calls
        self.calls, self._called = [], set()

    def discover(self, parameters: list[Any]) -> None:
        """Find the modules whose parameters are updated, and follow their forward passes from now on.

        Called again for every further optimizer: all of their parameters are trained.
        """
        if self._any:
            return
        module_type = self.agent.torch.nn.Module
        # `type(o)`, because some objects answer for their class with an import or an error.
        modules = [o for o in gc.get_objects() if issubclass(type(o), module_type)]
        inner = {id(child) for m in modules for child in vars(m).get("_modules", {}).values()}
        self._empty = 0
        self._stepped |= {id(p) for p in parameters}
        roots = [m for m in modules if id(m) not in inner and "_parameters" in vars(m)]
        self.roots = [m for m in roots if any(id(p) in self._stepped for p in m.parameters())]
        self._follow_modules(roots)
        if self.models:
            self.agent.switches.model(self.models[0].module)
            self._note_model(self.roots or [self.models[0].module])

    def follow_any(self) -> None:
        """Follow whatever module is called outside others: the script has made a new model, and may make more.

        The old one is let go, so that it takes no memory. Nothing can be replayed then.
        """
        if self._any:
            return
        self._any = True
        self.models, self.roots, self.calls, self.last = [], [], [], []
        while self._undo:
            quietly(self._undo.pop())()
        is_compiling = self.agent.torch.compiler.is_compiling

        def call_of(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
                inside = is_compiling() or self.depth or not self.agent.is_training_thread()
                if inside or next(module.parameters(), None) is None:
                    return original(module, *args, **kwargs)
                self._before_forward(Model(module, is_trained=lambda p: p.requires_grad), module, args, kwargs)
                try:
                    return original(module, *args, **kwargs)
                finally:
                    self._after_forward()

            return __call__

        self.agent.patches.replace(self.agent.torch.nn.Module, "__call__", call_of)

    def _follow_modules(self, roots: list[Any]) -> None:
        while self._undo:
            quietly(self._undo.pop())()
        parts = [part for root in roots for part in self._callable(root)]
        found = [Model(part, is_trained=lambda p: id(p) in self._stepped) for part in parts]
        most = MOST_MODELS if len(parts) == len(roots) and not self._deepened else MOST_PARTS
        self.models = sorted((m for m in found if m.size), key=lambda m: (not m.trained, -m.size))[:most]
        for model in self.models:
            for module in self._chain(model.module, model.size):
                self._listen(module, model)

    def _callable(self, module: Any) -> Iterator[Any]:
        """The module, or the parts of one that cannot be called, such as a ModuleList."""
        own = "forward" in vars(module)  # a compiled module has its forward in the object, not in the class
        if own or type(module).forward is not self.agent.torch.nn.Module.forward:
            yield module
            return
        for child in module.children():
            yield from self._callable(child)

    def _remember(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)
        self.agent.patches.add(undo)

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
                self._before_forward(model, module, args, kwargs)
                try:
                    return compiled(*args, **kwargs)
                finally:
                    self._after_forward()

            module._compiled_call_impl = call
            self._remember(lambda: setattr(module, "_compiled_call_impl", compiled))
            return
        is_compiling = self.agent.torch.compiler.is_compiling

        def before(found: Any, args: Any, kwargs: Any) -> None:
            if not is_compiling():
                self._before_forward(model, found, args, kwargs)

        def after(found: Any, args: Any, out: Any) -> None:
            if not is_compiling():
                self._after_forward()

        self._remember(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        self._remember(module.register_forward_hook(after, always_call=True).remove)

    @quietly
    def _before_forward(self, model: Model, module: Any, args: Any, kwargs: Any) -> None:
        if self.depth == 0 and model.trained:
            self.agent.own_updates.check()
        self.depth += 1
        if self.depth > 1 or not self.agent.is_training_thread():
            return
        torch = self.agent.torch
        self._outside = None
        self._training = training = model.trained and torch.is_grad_enabled() and module.training
        batch = Batch(torch, args, kwargs)
        self._follow(training=training)
        if training:
            self.agent.end_evaluation()
            # The Trainer's way: the model divides its sum by the tokens of all micro-batches.
            self.agent.losses.in_parts |= kwargs.get("num_items_in_batch") is not None
            self._note_micro(module, batch)
            self.agent.switches.before_forward(module, len(self.micro))
            device = self.agent.facts["device"]
            mixed = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            if mixed[0] and (self.agent.facts.get("model") or {}).get("compiled"):  # no hook sees inside
                self.agent.facts["compute_dtype"] = dtype_name(mixed[1])
            if self.agent.settings.stop and len(self.calls) < MOST_PARTS and not self._any:
                self.calls.append((module, mapped(args, detached), mapped(kwargs, detached)))
                self.mixed = mixed
        phase = "forward" if training else "reference" if module.training or not model.trained else "eval"
        self.counts[(phase, batch.rows or 0, batch.length or 0)] += 1
        if self.agent.timeline.phase not in WHOLE:
            # An evaluation lasts until training continues: its data and its metrics are part of it.
            before = self.agent.timeline.enter(phase)
            self._outside = None if phase == "eval" else before

    def _follow(self, *, training: bool) -> None:
        """The profiler pauses in a long row of forward passes without gradients, until training continues."""
        self._without_gradient = 0 if training else self._without_gradient + 1
        if training:
            self.agent.profiler.resume()
        elif self._without_gradient > MOST_WITHOUT_GRADIENT:
            self.agent.profiler.pause()
        self.agent.profiler.check()

    @quietly
    def _after_forward(self) -> None:
        self.depth = max(0, self.depth - 1)
        if self.depth == 0 and self.agent.is_training_thread() and self._outside is not None:
            # What follows a training forward is its loss, until the backward pass or another phase begins.
            loss = self._training and self._outside == "other"
            self.agent.timeline.enter("loss" if loss else self._outside)
            self._outside = None
        self.agent.switches.after_forward(self.depth)

    def _note_micro(self, module: Any, batch: Batch) -> None:
        torch = self.agent.torch
        if torch.is_anomaly_enabled():
            self.agent.counts["anomaly"] += 1
        if getattr(module, "require_backward_grad_sync", False):
            self.agent.counts["synced"] += 1
        if self._called and id(module) not in self._called and self.micro:
            # Another part of the same pass. The tokens are those of the part that takes them.
            self._called.add(id(module))
            if self.micro[-1]["tokens"] is None and batch.ids is not None:
                self.micro[-1] = self._micro_of(batch)
        elif len(self.micro) < 4096:
            self._called = {id(module)}
            self.micro.append(self._micro_of(batch))

    def _micro_of(self, batch: Batch) -> dict[str, Any]:
        return {
            "rows": batch.rows,
            "length": batch.length,
            "tokens": None if batch.ids is None else batch.ids.numel(),
            "real": read_later(batch.real_tokens(self.agent.facts.get("pad_id"))),
        }

    @quietly
    def _note_model(self, roots: list[Any]) -> None:
        """What is trained, in one module or in several."""
        torch = self.agent.torch
        module = max(roots, key=lambda root: sum(p.numel() for p in root.parameters()))
        modules = list({id(m): m for root in roots for m in root.modules()}.values())
        parameters = list({id(p): p for root in roots for p in root.parameters()}.values())
        config = next((c for c in (getattr(m, "config", None) for m in modules) if c is not None), None)
        linear = {id(weight): weight.numel() for m in modules for weight in matmul_weights(m)}
        tables = [m.weight for m in modules if isinstance(m, torch.nn.Embedding)]
        table = {id(weight) for weight in tables}
        largest = max(tables, key=lambda weight: weight.numel(), default=None)
        wrapped = getattr(module, "_orig_mod", getattr(module, "module", module))
        self.agent.facts["model"] = {
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
            "compiled": any(
                hasattr(root, "_orig_mod") or vars(root).get("_compiled_call_impl") is not None for root in roots
            ),
            "attention": getattr(config, "_attn_implementation", None),
            "modules": dict(Counter(type(m).__name__ for m in modules).most_common(30)),
        }
        pad = getattr(config, "pad_token_id", None)
        self.agent.facts["pad_id"] = pad if isinstance(pad, int) else None
        if not self.agent.facts["model"]["compiled"]:
            self._watch_dtype(module)

    def _watch_dtype(self, module: Any) -> None:
        """The type the largest product really has, whatever the flags say."""
        linear = [m for m in module.modules() if is_linear(m)]
        if not linear:
            return
        largest = max(linear, key=lambda m: m.weight.numel())

        def note(found: Any, args: Any, out: Any) -> None:
            if hasattr(out, "dtype") and self.agent.torch.is_grad_enabled() and not self.agent.probing:
                self.agent.facts["compute_dtype"] = dtype_name(out.dtype)
                handle.remove()

        handle = largest.register_forward_hook(note)
        self.agent.patches.add(handle.remove)
