"""Switches: fixes that the agent applies in the script's process, to measure them (`flatout doctor --prove`)."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .agent import Agent


class Switches:
    """Global changes that `--prove` makes in the script's process, before it runs."""

    def __init__(self, agent: Agent) -> None:
        self.agent, self.asked = agent, agent.settings.switch
        self._autocast: Any = None

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

    def model(self, module: Any) -> None:
        """Once, when the model is known."""
        for part in module.modules() if self.asked.get("sdpa") else ():
            if hasattr(part, "set_attn_implementation"):
                part.set_attn_implementation("sdpa")
                return

    def before_forward(self, module: Any, micro: int) -> None:
        """At the start of a training forward."""
        torch, asked = self.agent.torch, self.asked
        if asked.get("anomaly-off") and torch.is_anomaly_enabled():
            torch.set_anomaly_enabled(False)
        if asked.get("no-sync") and hasattr(module, "require_backward_grad_sync"):
            module.require_backward_grad_sync = micro >= int(asked["no-sync"])
        if asked.get("autocast"):
            self._autocast = torch.autocast(self.agent.facts["device"], dtype=torch.bfloat16)
            self._autocast.__enter__()

    def after_forward(self, depth: int) -> None:
        if depth == 0 and self._autocast is not None:
            self._autocast.__exit__(None, None, None)
            self._autocast = None

    def generation(self, kwargs: dict[str, Any]) -> None:
        if self.asked.get("kv-cache"):
            kwargs["use_cache"] = True


def changed_value(now: Any, wanted: Any) -> Any:
    """The wanted value, or the present one multiplied."""
    if not isinstance(wanted, dict):
        return wanted
    return now * wanted["times"] if isinstance(now, (int, float)) and not isinstance(now, bool) else now
