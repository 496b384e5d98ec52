"""One optimizer step, used by every recipe's loop; nothing in it waits for the device.

All micro-batches of a step are known before the first forward pass, so the loss is divided by exactly the target
tokens of the whole step, on all ranks. Whether the update is applied is decided on the device (anything non-finite
skips it), and the numbers of a step are read two steps later, when they have long arrived.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from flatout.data.stream import NOT_TRAINED, Batch
from flatout.engine.conflicts import gram
from flatout.engine.faults import OutOfMemory, is_out_of_memory
from flatout.engine.objective import ACTOR, CRITIC, LOSS, Combine, CrossEntropy, Head, HeadLoss, Objective, Route, Tally
from flatout.engine.prepare import EightBits, attend_for
from flatout.engine.ranks import Ranks
from flatout.engine.replay import Replay
from flatout.engine.resolve import Active
from flatout.engine.sharding import as_gradient, gathered, reduce_gradients
from flatout.errors import RunFailed
from flatout.model import Model
from flatout.optim import FusedAdamW, Schedule, is_sharded, local
from flatout.probe import Phases, StepTiming
from flatout.record import WARM_STEPS, Span

# How many steps the host may run ahead of the numbers it reads.
LAG = 2
SCALE_START, SCALE_GROWTH_INTERVAL = 65536.0, 2000

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """The numbers of a finished step."""

    step: int
    time: float  # unix seconds at its end
    seconds: float
    spans: tuple[Span, ...]
    tokens: int
    padded_tokens: int
    target_tokens: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    loss_scale: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)  # the objective's metrics besides the loss
    peaks_gib: Mapping[str, float] = field(default_factory=dict)  # allocated memory by phase; empty on a CPU


@dataclass(kw_only=True)
class _Pending:
    step: int
    lr: float
    numbers: Tensor
    time: float = 0.0
    seconds: float = 0.0
    ready: torch.cuda.Event | None = None


class Engine:
    """The only stateful class of the training path: model, optimizer and loss scale, stepped together."""

    def __init__(
        self,
        *,
        model: Model,
        optimizer: FusedAdamW | torch.optim.AdamW,
        schedule: Schedule,
        active: Active,
        ranks: Ranks,
        phases: Phases,
        head_loss: HeadLoss,
        clip: float | None,
        seed: int,
        batch_tokens: int,
        eight: EightBits | None = None,
        objective: Objective | None = None,
        combine: Combine | None = None,
        route: Route | None = None,
        role: str = "train",
    ) -> None:
        """`objective`: cross-entropy by default. `combine`: gradients of all tasks are added up by default.

        `route` chooses among the adapters of a bank. `role` is the model's in the phases of a step; a critic beside it
        has its own.
        """
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.active, self.ranks, self.phases = active, ranks, phases
        self.head_loss, self.clip, self.seed, self.eight = head_loss, clip, seed, eight
        self.objective: Objective = objective or CrossEntropy()
        self.combine, self.route = combine, route
        self.role = role
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        trunk: Any = getattr(getattr(model, "critic", None), "trunk", None)
        self.critic_trunk = trunk
        # Of each parameter; a value head on the model's own trunk is a part of the model.
        inside = set() if trunk is None else {id(p) for p in model.get_submodule("critic").parameters()}
        self._roles = [CRITIC if id(p) in inside else role for p in self.parameters]
        # fp16 needs a dynamic loss scale; 8-bit gradients one that makes them independent of the batch size.
        self.scale_moves = active.dtype == torch.float16
        self.scaled = self.scale_moves or eight is not None
        device = active.device
        start = SCALE_START if self.scale_moves else 2.0 ** round(math.log2(batch_tokens)) if eight is not None else 1.0
        self.scale = torch.tensor(start, device=device)
        self.scale_streak = torch.zeros((), dtype=torch.int32, device=device)
        self.replay = Replay(self.parameters) if active.graphs else None
        self.sharded = any(is_sharded(p) for p in model.parameters())
        # Until this event a save copies the weights, so an update waits for it.
        self.copied: torch.cuda.Event | None = None
        self._pending: deque[_Pending] = deque()
        self._timings: dict[int, StepTiming] = {}
        self._clock: float | None = None
        self._taken = 0
        # Whether a pass tells the model's time from its critic's: in a step, and in no recorded graph.
        self._apart = False

    @property
    def _metrics(self) -> list[str]:
        return [*self.objective.metrics, *(self.combine.metrics if self.combine else ())]

    def begin_step(self, step: int) -> None:
        """Starts a step. The caller marks its phases before calling `step`: evaluating, saving, waiting for data."""
        if self._clock is None:
            self._clock = time.perf_counter()
        self.phases.begin_step(step)

    def step(self, step: int, batches: list[Batch]) -> None:
        """Enqueues one optimizer step. If any rank runs out of memory, all raise `OutOfMemory` and nothing changes.

        The step can then be retried with the same sequences in smaller micro-batches.
        """
        torch.manual_seed(_step_seed(self.seed, step, self.ranks.rank))
        device = self.active.device
        # Targets and tokens, summed over ranks before the first forward, because every loss is divided by them.
        counts = [
            sum(b.num_target_tokens for b in batches),
            sum(b.tokens.numel() - b.num_padding for b in batches),
            sum(b.tokens.numel() for b in batches),
        ]
        totals = self.ranks.sum_(torch.tensor(counts, dtype=torch.float64).to(device, non_blocking=True))
        shortage, denominator = "", totals[0].float().clamp(min=1.0)
        tally = Tally(self.objective.metrics, device)
        if self.eight is not None:
            self.eight.ready()
        try:
            gradients = self._gradients(batches, tally, denominator=denominator)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            shortage = str(error).splitlines()[0]
            if self.sharded:  # the other ranks wait for this one's part of a block, so they cannot agree to retry
                raise RunFailed(
                    f"rank {self.ranks.rank} ran out of memory: {shortage}. Lower plan.micro_batch"
                ) from None
        # Only the message is kept: the exception's frames hold the tensors that must be freed.
        if self.ranks.any(bool(shortage)):
            recorded = self.ranks.any(bool(self.replay))
            self.forget()
            self.replay = None if recorded else self.replay
            raise OutOfMemory(shortage or "another rank ran out of memory", recorded=recorded)
        for role in dict.fromkeys(self._roles):
            self.phases.mark("reduce", role=role)
            for of_task in gradients.values():
                self.ranks.sum_gradients_(self._whole(of_task, role=role))
        metrics = tally.reduced(self.ranks, denominator=denominator)
        self.phases.mark("optimize" if self.critic_trunk is None else "clip", role=self._joint)
        lr = self.schedule(step)
        merged, measured = self._combined(gradients, step=step)
        norm = self._update(merged, tally.loss, lr)
        if self.eight is not None:
            # One scale on all ranks: a resumed run then continues exactly, whichever rank saved.
            self.ranks.max_(self.eight.scales.amax)
            self.eight.updated()
        numbers = torch.cat([torch.stack([tally.loss, norm, self.scale]).double(), totals, metrics.double(), measured])
        if numbers.is_cuda:
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers = host.copy_(numbers, non_blocking=True)
        self._pending.append(_Pending(step=step, lr=lr, numbers=numbers))

    def _gradients(self, batches: Sequence[Batch], tally: Tally, *, denominator: Tensor) -> dict[str, list[Tensor]]:
        """Forward and backward of every micro-batch; the gradients by task where they are combined, else all in one."""
        if self.combine is None:
            self._accumulate_all(batches, tally, denominator=denominator)
            if not batches:  # all other ranks have some
                for parameter in self.parameters:
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            return {"": [local(p.grad) for p in self.parameters if p.grad is not None]}
        if unknown := {batch.task for batch in batches} - set(self.combine.tasks):
            raise ValueError(f"batches of {unknown}, but only gradients of {list(self.combine.tasks)} are combined")
        gradients = {}
        for task in self.combine.tasks:
            own = [batch for batch in batches if batch.task == task]
            self._accumulate_all(own, tally, denominator=denominator)
            gradients[task] = self._taken_gradients()
        return gradients

    def _accumulate_all(self, batches: Sequence[Batch], tally: Tally, *, denominator: Tensor) -> None:
        """Forward and backward of several micro-batches. Sharded, all ranks run as many passes as the busiest one."""
        passes = len(batches)
        if self.sharded:
            passes = self.ranks.most(passes)
        for at in range(passes):
            if self.sharded:
                reduce_gradients(self.model, last=at == passes - 1)
            if at < len(batches):
                self._accumulate(batches[at], tally, denominator=denominator)
            else:
                self._pass(_blank(self.active.device), _nothing).backward()

    @property
    def _joint(self) -> str:
        """The role of what cannot be told apart: where a critic has a trunk of its own, neither's."""
        return self.role if self.critic_trunk is None else "train"

    def _whole(self, gradients: Sequence[Tensor], *, role: str) -> list[Tensor]:
        """Those of the gradients of a role that this rank does not hold only rows of."""
        mine = [r for p, r in zip(self.parameters, self._roles, strict=True) if p.grad is not None or self.combine]
        return [g for g, split, r in zip(gradients, self._split(), mine, strict=True) if not split and r == role]

    def _split(self) -> list[bool]:
        """For each gradient, in order, whether this rank holds only its rows."""
        return [is_sharded(p) for p in self.parameters if p.grad is not None or self.combine is not None]

    def _taken_gradients(self) -> list[Tensor]:
        """Takes the gradients before the next task; zero if this rank has no batch of the task."""
        found = [torch.zeros_like(local(p)) if p.grad is None else local(p.grad) for p in self.parameters]
        if not self.replay:
            for parameter in self.parameters:
                parameter.grad = None
            return found
        copies = list(torch._foreach_mul(found, 1.0))  # CUDA graphs accumulate into the originals
        torch._foreach_zero_(found)
        return copies

    def _combined(self, gradients: Mapping[str, list[Tensor]], *, step: int) -> tuple[list[Tensor], Tensor]:
        """Stores the combined gradients for the optimizer. Returns them, and what their combination measured."""
        none = self.scale.new_empty(0, dtype=torch.float64)
        if self.combine is None:
            return gradients[""], none
        merged, measured = self.combine(gradients, step=step, products=self._products)
        if self.replay:
            torch._foreach_copy_([p.grad for p in self.parameters if p.grad is not None], list(merged))
        else:
            for parameter, gradient in zip(self.parameters, merged, strict=True):
                parameter.grad = as_gradient(parameter, gradient)
        return [
            local(p.grad) for p in self.parameters if p.grad is not None
        ], none if measured is None else measured.double()

    def _products(self, gradients: Sequence[Sequence[Tensor]]) -> Tensor:
        """The dot products of every two tasks' gradients; those of sharded weights are summed over ranks."""
        split = self._split()
        if not any(split):
            return gram(gradients)
        apart = [
            [[g for g, s in zip(of, split, strict=True) if s is want] for of in gradients] for want in (True, False)
        ]
        total = self.ranks.sum_(gram(apart[0]))
        return total + gram(apart[1]) if apart[1][0] else total

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of the whole gradient; the squares of sharded weights are summed over ranks."""
        split = self._split()
        if not any(split):
            return torch.nn.utils.get_total_norm(gradients)
        squares = []
        for want in (True, False):
            chosen = [g for g, s in zip(gradients, split, strict=True) if s is want]
            norm = torch.nn.utils.get_total_norm(chosen) if chosen else self.scale.new_zeros(())
            squares.append(norm.double() ** 2)
        return (self.ranks.sum_(squares[0]) + squares[1]).sqrt().float()

    def gathered(self) -> AbstractContextManager[None]:
        """All weights whole on every rank, for passes without gradients whose number differs between ranks."""
        return gathered(self.model) if self.sharded else nullcontext()

    def _accumulate(self, host_batch: Batch, tally: Tally, *, denominator: Tensor) -> None:
        """Forward and backward of one micro-batch."""
        if self.replay is not None and self.replay.is_due(host_batch):
            self.phases.mark("forward", role=self._joint)
            self.replay.record(host_batch.to(self.active.device), self.sums)
        self.phases.mark("data")
        if self.replay is not None and (recorded := self.replay.of(host_batch)):
            recorded.take(host_batch)
            self.phases.mark("forward", role=self._joint)
            recorded.forward.replay()
            self.phases.mark("backward", role=self._joint)
            torch.div(self.scale, denominator, out=recorded.gradient)
            recorded.backward.replay()
            tally.loss += recorded.sums[LOSS] / denominator
            tally.add(recorded.sums)
            return
        batch = host_batch.to(self.active.device)
        self.phases.mark("forward", role=self.role)
        self._apart = self.role != "train"
        try:
            sums = self.sums(batch)
        finally:
            self._apart = False
        part = sums[LOSS] / denominator
        self.phases.mark("backward", role=self.role)
        (part * self.scale if self.scaled else part).backward()
        tally.loss += part.detach()
        tally.add(sums)

    def trial_pass(self, host_batch: Batch) -> None:
        """Runs a forward and a backward pass whose gradients are not used; call `forget` after the last one."""
        if self.eight is not None:
            self.eight.ready()
        loss = self.sums(host_batch.to(self.active.device))[LOSS] / max(1, host_batch.num_target_tokens)
        (loss * self.scale if self.scaled else loss).backward()

    def wait(self) -> None:
        """Waits for the device; never called in a step."""
        if self.active.device.type == "cuda":
            torch.cuda.synchronize()

    def forget(self) -> None:
        """Drops gradients that led to no update, and frees their memory."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.replay is not None:
            self.replay.forget()
        if self.eight is not None:
            self.eight.forget()
        if self.active.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def end_step(self) -> None:
        """Ends a step, after its evaluation, save and record, if any."""
        self.phases.end_step()
        self._taken += 1
        if self._taken == WARM_STEPS:
            # Once: synchronize, so that later measurements start with host and device at the same point, as they end.
            self.wait()
        pending, now = self._pending[-1], time.perf_counter()
        pending.seconds, self._clock = now - (self._clock or now), now
        pending.time = time.time()
        if self.active.device.type == "cuda":
            pending.ready = torch.cuda.Event()
            pending.ready.record()

    def sums(self, batch: Batch) -> Mapping[str, Tensor]:
        """The objective's results for a batch on the device: the loss, with its autograd graph, and its metrics."""
        found: Mapping[str, Tensor] = self._pass(batch, lambda head: self.objective(batch, head), timed=self._apart)
        return found

    @torch.no_grad()
    def measure(self, host_batch: Batch, what: Callable[[Batch, Head], T], *, model: Model | None = None) -> T:
        """What a function computes from the last hidden states of a batch, without gradients.

        `model` is another one with the same head, such as the reference of a policy.
        """
        batch = host_batch.to(self.active.device)
        return self._pass(batch, lambda head: what(batch, head), model=model)

    @torch.no_grad()
    def values(self, host_batch: Batch) -> Tensor:
        """What the critic expects at each token. One with a trunk of its own does not need the policy's pass."""
        if self.critic_trunk is None or self.sharded:
            return self.measure(host_batch, lambda batch, head: head.values())
        batch, critic = host_batch.to(self.active.device), self.model.get_submodule("critic")
        attend = attend_for(batch, active=self.active)
        nothing = torch.empty(0, device=self.active.device)
        found: Tensor = critic(nothing, tokens_N=batch.tokens, positions_N=batch.positions, attend=attend)
        return found

    def _pass(
        self, batch: Batch, compute: Callable[[Head], T], *, model: Model | None = None, timed: bool = False
    ) -> T:
        """`timed` tells the model's time from its critic's, in both directions."""
        attend, model = attend_for(batch, active=self.active), self.model if model is None else model
        critic: Any = getattr(model, "critic", None)
        routed = None if self.route is None else self.route(model, batch, attend)
        mix = () if routed is None else (routed.mix_NE,)

        def head(hidden_NC: Tensor, weight_VC: Tensor) -> T:
            values = critic and partial(critic, tokens_N=batch.tokens, positions_N=batch.positions, attend=attend)
            if timed and values:
                values = partial(self._timed_values, values)
            return compute(
                Head(
                    hidden_NC=hidden_NC,
                    weight_VC=weight_VC,
                    loss=self.head_loss,
                    critic=values,
                    routed=routed,
                    backward=self._time_backward if timed and values else None,
                )
            )

        found: T = model(batch.tokens, batch.positions, attend, head, *mix)
        return found

    def _timed_values(self, values: Callable[[Tensor], Tensor], hidden_NC: Tensor) -> Tensor:
        self.phases.mark("forward", role=CRITIC)
        found = values(hidden_NC)
        self.phases.mark("forward", role=self.role)
        return found

    def _time_backward(self, role: str, output: Tensor) -> None:
        """The backward pass of a role begins when the gradient of its output is known.

        Of two losses, autograd takes the one that was computed last first, down to its inputs. The hook runs on the
        stream of the forward pass.
        """
        if output.requires_grad:
            output.register_hook(lambda _: self.phases.mark("backward", role=self.role if role == ACTOR else role))

    @torch.no_grad()
    def evaluate(self, batches: list[Batch]) -> float:
        """Mean loss per target token over all ranks' batches. Waits for the device: call it rarely."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.active.device)
        with self.gathered():
            for batch in batches:
                self.phases.moves += 1
                sums[0] += self.sums(batch.to(self.active.device))[LOSS]
                sums[1] += batch.num_target_tokens
        total, count = self.ranks.sum_(sums).tolist()
        return float(total / count)

    def _update(self, gradients: list[Tensor], loss: Tensor, lr: float) -> Tensor:
        """Clips and applies AdamW, unless the loss or a gradient is not finite; decided on the device."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)
            self.copied = None
        scaled_norm = self._norm(gradients)
        norm = scaled_norm / self.scale
        not_finite = (~torch.isfinite(norm + loss)).float()
        # The optimizer divides by this in its own pass over the gradients, which unscales and clips them.
        divisor = self.scale if self.clip is None else self.scale * (norm / self.clip).clamp(min=1.0)
        if isinstance(self.optimizer, FusedAdamW):
            apart = {} if self.critic_trunk is None else {"begin": self._begin_update}
            self.optimizer.step(lr=lr, divisor=divisor, skip=not_finite, **apart)
        elif not not_finite.item():  # the plain path waits for the device
            self.phases.mark("optimize", role=self._joint)
            torch._foreach_div_(gradients, divisor)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.replay)
        if self.scale_moves:
            torch._amp_update_scale_(self.scale, self.scale_streak, not_finite, 2.0, 0.5, SCALE_GROWTH_INTERVAL)
        return norm

    def _begin_update(self, role: str) -> None:
        self.phases.mark("optimize", role=role if role == CRITIC else self.role)

    def finished(self, *, all: bool = False) -> list[StepFacts]:
        """Steps whose numbers are due: those more than two back, or all of them at the end of a run."""
        due: list[StepFacts] = []
        while self._pending and (all or len(self._pending) > LAG):
            pending = self._pending.popleft()
            if pending.ready is not None:
                # Two steps old, so it has arrived; this also limits how far the host runs ahead of the device.
                pending.ready.synchronize()
                if not self._pending and self._clock is not None:
                    # The host was ahead: the last step's time includes this wait.
                    now = time.perf_counter()
                    pending.seconds, self._clock = pending.seconds + now - self._clock, now
            self._timings |= {timing.step: timing for timing in self.phases.ready()}
            timing = self._timings.pop(pending.step, None)
            loss, norm, scale, targets, tokens, padded, *metrics = pending.numbers.tolist()
            due.append(
                StepFacts(
                    step=pending.step,
                    time=pending.time,
                    seconds=pending.seconds,
                    spans=() if timing is None else timing.spans,
                    peaks_gib={} if timing is None else timing.peaks_gib,
                    tokens=int(tokens),
                    padded_tokens=int(padded),
                    target_tokens=int(targets),
                    loss=loss,
                    grad_norm=norm,
                    lr=pending.lr,
                    skipped=not math.isfinite(norm + loss),
                    loss_scale=scale if self.scale_moves else None,
                    metrics=dict(zip(self._metrics, metrics, strict=True)),
                )
            )
        return due


def _blank(device: torch.device) -> Batch:
    """A batch without targets, for a rank that has none left while the others do."""
    tokens = torch.zeros(8, dtype=torch.int64, device=device)
    return Batch(
        tokens=tokens,
        targets=tokens + NOT_TRAINED,
        positions=torch.arange(8, device=device),
        cu_seqlens=None,
        num_sequences=1,
        sequence_length=8,
        num_target_tokens=0,
    )


def _nothing(head: Head) -> Tensor:
    """Zero, as a function of every weight, so that each has a gradient."""
    total = head.hidden_NC.sum() + head.weight_VC.sum()
    return 0.0 * (total if head.critic is None else total + head.values().sum())


def _step_seed(seed: int, step: int, rank: int) -> int:
    """A seed for each (seed, step, rank), far from its neighbours, so that a resumed step uses the same numbers."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) % 2**64
    return (mixed ^ (mixed >> 31)) % 2**63
