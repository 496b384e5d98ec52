"""The trained model and its forward passes: found by the parameters that the optimizer steps."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .facts import config_of, dtype_name, is_linear
from .hooks import quietly
from .tensors import Batch, read_later
from .timeline import WHOLE

if TYPE_CHECKING:
    from .agent import Agent


# More forward passes without gradients than this in a row are a loop that generates text.
MOST_WITHOUT_GRADIENT = 8


class Model:
    """One root module: the one that is trained, or another that only runs."""

    def __init__(self, module: Any, ids: set[int]) -> None:
        self.module = module
        parameters = list(module.parameters())
        self.trained = any(id(p) in ids for p in parameters)
        self.size = sum(p.numel() for p in parameters)


class Forwards:
    """Follows every forward pass of the models there are, and counts the micro-batches of a step."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.models: list[Model] = []
        self.depth = 0
        self.micro: list[dict[str, Any]] = []
        self.last: tuple[Any, Any, Any] | None = None
        self.mixed: tuple[bool, Any] = (False, None)  # autocast, as it was around the forward pass
        self.counts: Counter[tuple[str, int, int]] = Counter()
        self._outside: str | None = None
        self._without_gradient = 0

    def take(self) -> list[dict[str, Any]]:
        """The micro-batches of the step that ends."""
        taken, self.micro, self.depth = self.micro, [], 0
        self._follow(training=True)
        return taken

    def discover(self, optimizer: Any) -> None:
        """Find the modules whose parameters are stepped, and follow their forward passes from now on."""
        module_type = self.agent.torch.nn.Module
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
            self.agent.switches.model(self.models[0].module)
            self._note_model(self.models[0].module)

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
            self.agent.patches.add(lambda: setattr(module, "_compiled_call_impl", compiled))
            return
        is_compiling = self.agent.torch.compiler.is_compiling

        def before(found: Any, args: Any, kwargs: Any) -> None:
            if not is_compiling():
                self._before_forward(model, found, args, kwargs)

        def after(found: Any, args: Any, out: Any) -> None:
            if not is_compiling():
                self._after_forward()

        self.agent.patches.add(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        self.agent.patches.add(module.register_forward_hook(after, always_call=True).remove)

    @quietly
    def _before_forward(self, model: Model, module: Any, args: Any, kwargs: Any) -> None:
        self.depth += 1
        if self.depth > 1 or not self.agent.is_training_thread():
            return
        torch = self.agent.torch
        self._outside = None
        training = model.trained and torch.is_grad_enabled() and module.training
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
            if self.agent.settings.stop:
                self.last, self.mixed = (module, args, kwargs), mixed
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
            self.agent.timeline.enter(self._outside)
            self._outside = None
        self.agent.switches.after_forward(self.depth)

    def _note_micro(self, module: Any, batch: Batch) -> None:
        torch = self.agent.torch
        if torch.is_anomaly_enabled():
            self.agent.counts["anomaly"] += 1
        if getattr(module, "require_backward_grad_sync", False):
            self.agent.counts["synced"] += 1
        if len(self.micro) < 4096:
            self.micro.append(
                {
                    "rows": batch.rows,
                    "length": batch.length,
                    "tokens": None if batch.ids is None else batch.ids.numel(),
                    "real": read_later(batch.real_tokens(self.agent.facts.get("pad_id"))),
                }
            )

    @quietly
    def _note_model(self, module: Any) -> None:
        """What the trained model is; asked once."""
        torch = self.agent.torch
        parameters = list(module.parameters())
        config = next((c for c in (getattr(m, "config", None) for m in module.modules()) if c is not None), None)
        linear = {id(m.weight): m.weight.numel() for m in module.modules() if is_linear(m)}
        tables = [m.weight for m in module.modules() if isinstance(m, torch.nn.Embedding)]
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
            "compiled": hasattr(module, "_orig_mod") or vars(module).get("_compiled_call_impl") is not None,
            "attention": getattr(config, "_attn_implementation", None),
            "modules": dict(Counter(type(m).__name__ for m in module.modules()).most_common(30)),
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
