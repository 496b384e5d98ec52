"""What changes the parameters: optimizers, however often the script makes them anew, or code of the script's own.

An optimizer is recognised by its parameters, or by its kind and its place in the script, and not by its identity: a
script may make one in every step. Where none steps, a step is what happens: backward passes, then parameters that they
reach change. The tensors are watched by their version counters and addresses, so nothing waits for a device.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .hooks import quietly
from .stacks import user_site

if TYPE_CHECKING:
    from .agent import Agent

MOST_ALIKE = 8  # optimizers of one kind, stepped once, each after a backward pass: more are one that is made anew
MOST_LEAVES = 64  # parameters that are watched
MOST_NODES = 20_000  # of a graph that is searched for parameters
MOST_SEARCHES = 8  # graphs searched for further parameters, once own code is known to update them
VALUES_READ, NUM_VALUES = 4, 8  # parameters whose first values are compared on a CPU, and how many values of each


def weak(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def parameters_of(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Updater:
    """An optimizer and its successors, or a part of the script that updates parameters itself."""

    def __init__(self, number: int, kind: tuple[Any, ...]) -> None:
        self.number, self.kind = number, kind
        self.optimizer: Callable[[], Any] = lambda: None
        self.first: Callable[[], Any] = lambda: None  # of its parameters
        self.steps = self.since = 0  # how often it stepped, and after how many backward passes first


class Updaters:
    """Every updater that was seen, in the order of their first steps."""

    def __init__(self) -> None:
        self.all: list[Updater] = []
        self._by_id: dict[int, tuple[Callable[[], Any], Updater]] = {}

    def by_optimizer(self, optimizer: Any, *, backwards: int) -> tuple[Updater, str]:
        """The updater, and what is new: nothing, `first`, `optimizer` for a successor, or `model` for a new model's."""
        known, updater = self._by_id.get(id(optimizer), (None, None))
        if known is not None and updater is not None and known() is optimizer:
            return updater, ""
        parameters = parameters_of(optimizer)
        found, new = self._before((type(optimizer).__name__, user_site(2)), parameters)
        found.optimizer = weak(optimizer)
        found.first = weak(parameters[0]) if parameters else lambda: None
        found.since = found.since or backwards
        self._by_id[id(optimizer)] = found.optimizer, found
        return found, new

    def _before(self, kind: tuple[Any, ...], parameters: list[Any]) -> tuple[Updater, str]:
        for updater in self.all:
            gone = updater.optimizer() is None
            if parameters and updater.first() is parameters[0] and (gone or updater.kind == kind):
                return updater, "optimizer"
        alike = [updater for updater in self.all if updater.kind == kind]
        once = {updater.since for updater in alike if updater.steps == 1}
        if len(once) >= MOST_ALIKE or any(updater.optimizer() is None for updater in alike):
            return alike[-1], "model"
        return self._add(kind), "first"

    def by_code(self, kind: tuple[Any, ...]) -> tuple[Updater, str]:
        """The updater of own code that changes these parameters, or some of them."""
        found = next((updater for updater in self.all if not set(kind).isdisjoint(updater.kind)), None)
        return (found, "") if found is not None else (self._add(kind), "first")

    def _add(self, kind: tuple[Any, ...]) -> Updater:
        self.all.append(Updater(len(self.all), kind))
        return self.all[-1]


class Leaf:
    """A parameter that a backward pass reaches, and its state right after that pass."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = weak(tensor)
        self.shape = tuple(tensor.shape)
        self.note(tensor, values=False)

    def note(self, tensor: Any, *, values: bool) -> None:
        self.version, self.address = tensor._version, tensor.data_ptr()
        grad = tensor.grad
        self.grad = None if grad is None else (id(grad), grad._version)
        self.values = values_of(tensor) if values else None

    def has_changed(self) -> bool:
        """Whether the parameter was updated since its last backward pass.

        What is written to `.data` moves neither the version nor the address. It shows in the values, and where reading
        them would wait for a device, in the gradient, which is cleared after an update.
        """
        tensor = self.tensor()
        if tensor is None:
            return False
        if tensor._version != self.version or tensor.data_ptr() != self.address:
            return True
        if self.values is not None and values_of(tensor) != self.values:
            return True
        grad = tensor.grad
        if self.grad is None or (grad is not None and (id(grad), grad._version) == self.grad):
            return False
        return grad is None or bool(tensor.is_cuda)


def values_of(tensor: Any) -> list[float] | None:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    values: list[float] = tensor.detach().view(-1)[:NUM_VALUES].tolist()
    return values


def leaves_of(tensors: Any) -> list[Any]:
    """The parameters in the graph of these tensors."""
    roots = [tensors] if hasattr(tensors, "grad_fn") else list(tensors)
    nodes = [root.grad_fn for root in roots if getattr(root, "grad_fn", None) is not None]
    seen, found = set(nodes), []
    while nodes and len(seen) < MOST_NODES:
        node = nodes.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


def named_leaves(inputs: Any) -> list[Any]:
    """The parameters among the inputs of `torch.autograd.grad`; those that were computed are none."""
    named = [inputs] if hasattr(inputs, "is_leaf") else list(inputs)
    return [tensor for tensor in named if getattr(tensor, "is_leaf", False)]


class OwnUpdates:
    """Recognises the steps of a loop without torch.optim. An optimizer that steps ends this for good."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.leaves: list[Leaf] = []
        self.active = False  # own code is known to update the parameters
        self.over = False
        self.pending = False  # a backward pass has ended, and nothing was updated since
        self.replaces = False  # the script makes new parameters instead of changing them
        self.depth = 0  # of the backward passes that are under way: one can run another
        self.inside = False  # an optimizer has stepped inside it, as its hooks can
        self._searches = 0

    def stop(self) -> None:
        self.over, self.active, self.pending, self.leaves = True, False, False, []
        self.agent.hooks.leave_grad()

    def is_watching(self) -> bool:
        agent = self.agent
        if self.over or agent.ended or agent.probing:
            return False
        return agent.primary is None or agent.is_training_thread()

    def before_backward(self, search: Callable[[], Iterable[Any]]) -> None:
        """`search` gives the parameters that the pass will reach."""
        if self.is_watching():
            self.check()
            self.depth += 1
            self.inside &= self.depth > 1
            quietly(self._search)(search)
            self.pending = False

    def _search(self, search: Callable[[], Iterable[Any]]) -> None:
        if self.active and not self.replaces and self._searches >= MOST_SEARCHES:
            return
        self._searches += 1
        found = list(search())
        watched = {id(tensor) for leaf in self.leaves if (tensor := leaf.tensor()) is not None}
        new = [tensor for tensor in found if id(tensor) not in watched]
        replaced = self.pending and bool(new) and len(new) == len(found) and self._are_successors(new)
        self.replaces |= replaced
        self.leaves = [leaf for leaf in self.leaves if leaf.tensor() is not None]
        every = max(1, len(new) // max(1, MOST_LEAVES - len(self.leaves)))
        self.leaves += [Leaf(tensor) for tensor in new[::every]][: MOST_LEAVES - len(self.leaves)]
        if replaced:
            self._updated(("replaced",))

    def _are_successors(self, new: list[Any]) -> bool:
        """Whether the parameters watched so far are gone, and these have their shapes."""
        gone = bool(self.leaves) and all(leaf.tensor() is None for leaf in self.leaves)
        return gone and {leaf.shape for leaf in self.leaves} <= {tuple(tensor.shape) for tensor in new}

    def after_backward(self) -> None:
        self.depth = max(0, self.depth - 1)
        if not self.depth and self.is_watching():
            self.pending = True
            quietly(self._note)()
            if self.inside:
                self._updated(("backward",))

    def _note(self) -> None:
        for number, leaf in enumerate(self.leaves):
            tensor = leaf.tensor()
            if tensor is not None:
                leaf.note(tensor, values=number < VALUES_READ)

    def check(self) -> None:
        """Ends the step where parameters have changed since the last backward pass."""
        if self.pending and self.is_watching():
            changed = quietly(lambda: tuple(n for n, leaf in enumerate(self.leaves) if leaf.has_changed()))()
            if changed:
                self._updated(changed)

    def _updated(self, changed: tuple[Any, ...]) -> None:
        self.pending = False
        if not self.active:
            self.active = True
            quietly(self._watch_no_grad)()
        self.agent.after_own_update(changed)

    def _watch_no_grad(self) -> None:
        """Own updates mostly happen in such a block: then the step ends with it, and its time is that of the update."""
        kind, timeline = self.agent.torch.autograd.grad_mode.no_grad, self.agent.timeline

        def enter_with(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def __enter__(context: Any) -> Any:
                entered = original(context)
                if self.active and self.pending and timeline.phase == "other" and self.agent.is_training_thread():
                    timeline.enter("optimizer")
                return entered

            return __enter__

        def exit_with(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def __exit__(context: Any, *error: Any) -> Any:
                left = original(context, *error)
                if self.active and self.agent.is_training_thread():
                    if timeline.phase == "optimizer":
                        timeline.enter("other")
                    if error[:1] in ((), (None,)):
                        self.check()
                return left

            return __exit__

        self.agent.patches.replace(kind, "__enter__", enter_with)
        self.agent.patches.replace(kind, "__exit__", exit_with)
