"""The shape of the training loop in words, and what a loop makes anew in every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from flatout.insight.diagnose.host import WORTH, finding_of
from flatout.insight.diagnose.observed import Observed, short
from flatout.record import Finding

# Optimizers whose updates depend only on the present gradient, where they have no momentum.
_STATELESS = ("SGD",)


def in_words(seen: Observed) -> str | None:
    """What a step is, where it is not one step of one optimizer; None where it is."""
    loop: Mapping[str, Any] = seen.facts.get("loop") or {}
    if not loop:
        return None
    parts = []
    at = f" ({short(loop['updated_at'])})" if loop["updated_at"] else ""
    if loop["in_backward"]:
        parts.append(f"optimizers step inside the backward pass{at}, and a step is one such pass")
    elif loop["own_code"]:
        how = "replaces its parameters by new ones" if loop["replaces"] else "updates its parameters in its own code"
        parts.append(f"the script {how}{at}, not by torch.optim; a step ends with that update")
    elif loop["num_updaters"] > 1:
        kinds = Counter(loop["updaters"])
        names = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in kinds.items())
        parts.append(f"{loop['num_updaters']} optimizers ({names}); a step is one round of those that alternate")
    if loop["own_code"] and loop["num_updaters"] > 1:
        parts.append(f"{loop['num_updaters']} groups of parameters are updated in turn")
    parts += [f"a new {what} was made {times:.0f} times" for what, times in loop["remade"].items()]
    if seen.accumulation > 1.5:
        parts.append(f"{seen.accumulation:.0f} forward passes of training in a step")
    return f"the loop: {'; '.join(parts)}" if parts else None


def recreated_optimizer(seen: Observed) -> Finding | None:
    if not seen.is_in_most_steps("new-optimizer") or seen.is_in_most_steps("new-model"):
        return None
    kind = str(seen.optimizer.get("class"))
    lost = "" if kind in _STATELESS else f", so {kind} forgets its moments and every update is like its first one"
    share = seen.activities.get("make", 0.0)
    return finding_of(
        "recreated-optimizer",
        f"The script makes a new {kind} in {_of(seen, 'new-optimizer')} steps{lost}.",
        share,
        share if share >= WORTH else None,
        [
            f"{seen.steps_counting('new-optimizer')} new optimizers in {len(seen.steps)} steps, over the same "
            f"{seen.optimizer.get('tensors')} tensors",
            f"{share:.1%} of step time in their constructors; allocating their state comes on top",
        ],
        "make the optimizer once, before the loop; a scheduler of torch.optim.lr_scheduler changes its learning rate",
    )


def recreated_model(seen: Observed) -> Finding | None:
    if not seen.is_in_most_steps("new-model"):
        return None
    share = seen.activities.get("make", 0.0)
    return finding_of(
        "recreated-model",
        f"The script makes a new model and its optimizer in {_of(seen, 'new-model')} steps, so nothing is learned from "
        "step to step.",
        share,
        share if share >= WORTH else None,
        [
            f"{seen.steps_counting('new-model')} optimizers over new parameters in {len(seen.steps)} steps",
            f"{share:.1%} of step time in constructors of torch.optim, and of torch.nn in stack samples",
        ],
        "make the model and its optimizer once, before the loop; for other starting weights, load_state_dict() into it",
    )


def recreated_loader(seen: Observed) -> Finding | None:
    """A loader, or an iterator over it, that starts in every step: workers start, and the order is shuffled again."""
    share = seen.loader_start_share
    if share < WORTH:
        return None
    made = seen.is_in_most_steps("new-loader")
    loader: Mapping[str, Any] = next((found for found in seen.facts["loaders"] if not found["evaluating"]), {})
    workers = loader.get("num_workers") or 0
    batches = loader.get("batches")
    sites = seen.sites("data", "data", most=1)
    short_epochs = not made and batches is not None and batches <= 2
    fix = (
        "DataLoader(..., persistent_workers=True), or a dataset that repeats, so that an epoch has more than "
        f"{batches} batches"
        if short_epochs
        else "make the loader and its iterator once, before the loop: for batch in loader, or batches = iter(loader)"
    )
    return finding_of(
        "recreated-loader",
        f"{'A new DataLoader' if made else 'A new iterator over the DataLoader'} starts in "
        f"{_of(seen, 'loader-starts')} steps{f' at {sites[0]}' if sites else ''}.",
        share,
        share,
        [
            f"{share:.0%} of step time in starting it"
            + (f", with its {workers} workers and their first batch" if workers else " (measured in its __iter__)"),
        ],
        fix,
    )


def _of(seen: Observed, name: str) -> str:
    steps = seen.steps_counting(name)
    return "all" if steps == len(seen.steps) else f"{steps} of {len(seen.steps)}"


ALL = (recreated_optimizer, recreated_model, recreated_loader)
