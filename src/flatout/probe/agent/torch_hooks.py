"""What is wrapped in torch and in the libraries around it: backward, data loaders, saving, generation, and so on."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .facts import plain
from .hooks import quietly
from .stacks import user_site
from .updates import leaves_of, named_leaves

if TYPE_CHECKING:
    from .agent import Agent

RECOMPUTE_OPTIONS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


def _nothing() -> None:
    return None


class TorchHooks:
    """Times and counts what the training thread calls."""

    def __init__(self, agent: Agent) -> None:
        self.agent, self.patches, self.imports = agent, agent.patches, agent.imports
        self.recompile_reasons: Counter[str] = Counter()
        self.generations: list[dict[str, Any]] = []
        self.loaders: weakref.WeakSet[Any] = weakref.WeakSet()  # whose iterators have started
        self.loader: Callable[[], Any] = _nothing  # of the training batches
        self.num_batches, self.waited_s = 0, 0.0  # in the timed steps
        self.fresh: Any = _nothing  # the iterator of workers that has given no batch yet

    def install(self, torch: Any) -> None:
        self.patches.replace(torch.autograd, "backward", self._backward)
        self.plain_grad = torch.autograd.grad
        self.patches.replace(torch.autograd, "grad", self._grad)
        self.patches.replace(torch.optim.Optimizer, "__init__", functools.partial(self._phase, "make"))
        self.patches.replace(torch, "save", functools.partial(self._phase, "save"))
        self.patches.replace(torch.cuda, "empty_cache", functools.partial(self._phase, "empty-cache"))
        self.patches.replace(gc, "collect", functools.partial(self._phase, "empty-cache"))
        self.patches.replace(torch.nn.utils, "clip_grad_norm_", self._counted("clip"))
        # `when` and not an import: a build of torch without one of these parts must still be watched.
        self.imports.when("torch.utils.data.dataloader", self._on_dataloader)
        self.imports.when("torch.utils.checkpoint", self._on_checkpoint)
        self.imports.when("torch.amp.grad_scaler", self._on_scaler)
        self.imports.when("torch.amp.autocast_mode", self._on_autocast)
        self.imports.when("torch._dynamo.guards", self._on_dynamo)
        self.imports.when("safetensors.torch", self._on_safetensors)
        self.imports.when("transformers.generation.utils", self._on_generation)

    def leave_grad(self) -> None:
        """An optimizer steps, so a gradient that is asked for is none of an update."""
        self.agent.torch.autograd.grad = self.plain_grad

    def _on_dataloader(self, module: Any) -> None:
        agent = self.agent

        def iterate(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def __iter__(loader: Any) -> Any:
                self._note_loader(loader)
                began = time.perf_counter()
                with agent.phase("data"):
                    iterator = original(loader)
                self._note_start(loader, iterator, time.perf_counter() - began)
                return iterator

            return __iter__

        def next_of(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def __next__(iterator: Any) -> Any:
                began = time.perf_counter()
                with agent.phase("data"):
                    batch = original(iterator)
                if agent.stage == "timed" and agent.is_training_thread() and agent.timeline.phase != "eval":
                    self.num_batches += 1
                    self.waited_s += time.perf_counter() - began
                if self.fresh() is iterator:  # its workers have started
                    self.fresh = _nothing
                    agent.counts["loader_start_s"] += time.perf_counter() - began
                return batch

            return __next__

        self.patches.replace(module.DataLoader, "__iter__", iterate)

        def index_of(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def _next_index(iterator: Any) -> Any:
                if self.fresh() is not iterator or iterator._num_workers:
                    return original(iterator)
                self.fresh, began = _nothing, time.perf_counter()  # the sampler starts, and may shuffle
                try:
                    return original(iterator)
                finally:
                    agent.counts["loader_start_s"] += time.perf_counter() - began

            return _next_index

        self.patches.replace(module._BaseDataLoaderIter, "__next__", next_of)
        self.patches.replace(module._BaseDataLoaderIter, "_next_index", index_of)

    def _on_checkpoint(self, module: Any) -> None:
        agent = self.agent

        def checkpoint_of(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                agent.counts["recompute"] += 1
                if agent.settings.switch.get("no-recompute") or agent.facts.get("replay_without_recompute"):
                    kwargs = {k: v for k, v in kwargs.items() if k not in RECOMPUTE_OPTIONS}
                    return function(*args, **kwargs)
                if agent.timeline.phase != "forward":
                    return original(function, *args, **kwargs)
                began = time.perf_counter()
                try:
                    return original(function, *args, **kwargs)
                finally:
                    agent.counts["recompute_s"] += time.perf_counter() - began

            return checkpoint

        self.patches.replace(module, "checkpoint", checkpoint_of)

    def _on_scaler(self, module: Any) -> None:
        def scale_of(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def scale(scaler: Any, outputs: Any) -> Any:
                self.agent.counts["scaled"] += bool(scaler.is_enabled())
                scaled = original(scaler, outputs)
                self.agent.losses.unscaled = (scaled, outputs)
                return scaled

            return scale

        self.patches.replace(module.GradScaler, "scale", scale_of)

    def _on_autocast(self, module: Any) -> None:
        def enter_of(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def __enter__(context: Any) -> Any:
                # Models switch it off in parts.
                self.agent.counts["autocast"] += bool(getattr(context, "_enabled", True))
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
        agent = self.agent

        def generate_of(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
                agent.switches.generation(kwargs)
                began = time.perf_counter()
                with agent.phase("generate"), agent.profiler.paused():
                    out = original(model, *args, **kwargs)
                if agent.is_training_thread():
                    self._note_generation(model, args, kwargs, out, time.perf_counter() - began)
                return out

            return generate

        self.patches.replace(module.GenerationMixin, "generate", generate_of)

    def _phase(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.agent.counts[name] += self.agent.is_training_thread()
            with self.agent.phase(name):
                return original(*args, **kwargs)

        return wrapped

    def _counted(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                self.agent.counts[name] += 1
                return original(*args, **kwargs)

            return wrapped

        return make

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            return self._passed_back(lambda: original(tensors, *args, **kwargs), tensors, lambda: leaves_of(tensors))

        return backward

    def _grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Where no optimizer steps, this is the backward pass of an update. With a graph of its own it is none."""

        @functools.wraps(original)
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            def call() -> Any:
                return original(outputs, inputs, *args, **kwargs)

            if self.agent.own_updates.over or kwargs.get("create_graph") or self.agent.probing:
                return call()
            return self._passed_back(call, outputs, lambda: named_leaves(inputs))

        return grad

    def _passed_back(self, call: Callable[[], Any], tensors: Any, leaves: Callable[[], list[Any]]) -> Any:
        """A backward pass from these tensors to these parameters."""
        agent = self.agent
        agent.own_updates.before_backward(leaves)
        agent.losses.note(tensors)
        agent.end_evaluation()
        if agent.is_training_thread():
            agent.backwards += 1
            quietly(agent.forwards.passed_back)()
            if agent.timeline.phase == "loss":
                agent.timeline.enter("other")
        try:
            with agent.phase("backward"):
                result = call()
        except BaseException:
            agent.own_updates.depth = 0
            raise
        agent.own_updates.after_backward()
        return result

    @quietly
    def _note_loader(self, loader: Any) -> None:
        if not self.agent.is_training_thread():
            return
        names = ("batch_size", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "drop_last")
        facts = {name: plain(getattr(loader, name, None)) for name in names}
        facts["dataset"] = type(getattr(loader, "dataset", None)).__name__
        facts["batches"] = quietly(lambda: len(loader))()
        facts["evaluating"] = self.agent.timeline.phase == "eval"
        if facts not in self.agent.facts["loaders"] and len(self.agent.facts["loaders"]) < 8:
            self.agent.facts["loaders"].append(facts)

    @quietly
    def _note_start(self, loader: Any, iterator: Any, seconds: float) -> None:
        """An iterator that starts takes time, and with workers its first batch does too."""
        if not self.agent.is_training_thread() or self.agent.timeline.phase == "eval":
            return
        self.loader = weakref.ref(loader)
        self.agent.counts["loader-starts"] += 1
        self.agent.counts["loader_start_s"] += seconds
        if loader not in self.loaders:
            self.loaders.add(loader)
            self.agent.counts["new-loader"] += 1
        self.fresh = weakref.ref(iterator)

    @quietly
    def _note_generation(self, model: Any, args: Any, kwargs: Any, out: Any, seconds: float) -> None:
        prompt = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        sequences = getattr(out, "sequences", out)
        config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
        cache = kwargs.get("use_cache", getattr(config, "use_cache", None))
        if prompt is not None and len(self.generations) < 1000:
            self.generations.append(
                {
                    "step": self.agent.num_steps,
                    "rows": int(sequences.shape[0]),
                    "prompt": int(prompt.shape[1]),
                    "new": int(sequences.shape[1]) - int(prompt.shape[1]),
                    "cache": None if cache is None else bool(cache),
                    "seconds": seconds,
                    "site": user_site(),
                }
            )
