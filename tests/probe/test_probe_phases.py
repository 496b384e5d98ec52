"""Phases tile the step, wait for nothing, and cost no synchronisation."""

import time
from collections import Counter
from types import SimpleNamespace

import pytest

from flatout.probe import phases as module
from flatout.probe.phases import Phases
from flatout.record import Span


def seconds(spans: tuple[Span, ...]) -> dict[str, float]:
    return {span.phase if span.role == "train" else f"{span.role}/{span.phase}": span.seconds for span in spans}


def test_micro_batches_are_summed_and_idle_goes_to_the_first_phase(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    phases = Phases()
    for _ in range(2):
        phases.begin_step()
        phases.mark("data")
        for _ in range(2):
            phases.mark("forward")
            now += 2
            phases.mark("backward")
            now += 4
        phases.mark("forward", role="critic")
        now += 1
        phases.end_step(tokens=64)
        now += 6  # nobody marks this: the next step's data phase waits here
    first, second = phases.ready()
    assert (first.step, second.step, second.tokens) == (0, 1, 64)
    assert seconds(first.spans) == {"data": 0, "forward": 4, "backward": 8, "critic/forward": 1}
    assert seconds(second.spans) == {"data": 6, "forward": 4, "backward": 8, "critic/forward": 1}
    assert list(seconds(second.spans)) == ["data", "forward", "backward", "critic/forward"]
    assert (first.seconds, second.seconds) == (13, 19)
    assert phases.ready() == []


def test_steps_can_be_numbered_and_taken_up_again():
    phases = Phases()
    phases.begin_step(41)
    phases.mark("forward")
    phases.begin_step(99)  # a retry of the step that is still open
    phases.mark("forward")
    phases.end_step()
    phases.begin_step()
    phases.end_step()
    first, second = phases.flush()
    assert (first.step, len(first.spans)) == (41, 1)
    assert (second.step, second.spans) == (42, ())


def test_marks_outside_a_step_are_a_mistake():
    phases = Phases()
    with pytest.raises(RuntimeError, match="begin_step"):
        phases.mark("forward")
    with pytest.raises(RuntimeError, match="begin_step"):
        phases.end_step()


def test_switched_off_it_does_nothing():
    phases = Phases(device="cuda", enabled=False)
    phases.begin_step()
    phases.mark("forward")
    phases.end_step()
    assert phases.flush() == []


class SlowDevice:
    """A device that runs behind: it has passed a stamp only once told to."""

    def __init__(self) -> None:
        self.num_made = 0
        self.passed = 0
        self.free: list[int] = []
        self.held: set[int] = set()
        self.order: dict[int, int] = {}

    def stamp(self) -> int:
        stamp = self.free.pop() if self.free else len(self.held)
        assert stamp not in self.held
        self.held.add(stamp)
        self.num_made += 1
        self.order[stamp] = self.num_made
        return stamp

    def has_passed(self, stamp: int) -> bool:
        return self.order[stamp] <= self.passed

    def wait(self, stamp: int) -> None:
        self.passed = self.order[stamp]

    def seconds(self, start: int, end: int) -> float:
        assert {start, end} <= self.held, "a stamp was reused before it was read"
        return float(self.order[end] - self.order[start])

    def release(self, stamp: int) -> None:
        self.held.remove(stamp)
        self.free.append(stamp)


def test_late_steps_come_in_order_and_stamps_are_reused():
    device = SlowDevice()
    phases = Phases()
    phases._clock = device
    got = []
    for _ in range(50):
        phases.begin_step()
        phases.mark("data")
        phases.mark("forward")
        phases.mark("backward")
        phases.end_step()
        device.passed = device.num_made - 3  # always a step behind
        got += phases.ready()
    assert len(got) == 49
    got += phases.flush()
    assert [timing.step for timing in got] == list(range(50))
    assert all(seconds(timing.spans) == {"data": 1, "forward": 1, "backward": 1} for timing in got)
    assert device.num_made == 1 + 3 * 50
    assert len(device.free) + len(device.held) < 10


class Allocator:
    """Says how much memory each phase needed, as often as it is asked."""

    def __init__(self) -> None:
        self.peak_gib, self.asked = 0.0, 0

    def take_gib(self) -> float:
        taken, self.peak_gib, self.asked = self.peak_gib, 0.0, self.asked + 1
        return taken


def test_the_peak_of_a_phase_is_that_of_its_largest_part_and_only_some_steps_are_looked_at():
    memory = Allocator()
    phases = Phases()
    phases._memory = memory
    found = []
    for step in range(40):
        phases.begin_step(step)
        for _ in range(2):
            phases.mark("forward")
            memory.peak_gib = max(memory.peak_gib, 3.0)
            phases.mark("backward", role="critic")
            memory.peak_gib = max(memory.peak_gib, 7.0 + step)
        phases.end_step()
        memory.peak_gib = max(memory.peak_gib, 1.0)  # between two steps
        found += [timing.peaks_gib for timing in phases.ready()]
    assert found[0] == {"": 0.0, "forward": 3.0, "critic/backward": 7.0}
    looked = [step for step, peaks in enumerate(found) if peaks]
    assert looked == [*range(16), 17, 34]
    assert found[17] == {"": 23.0, "forward": 3.0, "critic/backward": 24.0}  # step 16 needed 23, in a phase unknown
    assert memory.asked == 5 * len(looked)


@pytest.mark.gpu
def test_cuda_phases_add_no_synchronisation_and_see_idle_time():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from torch.profiler import ProfilerActivity, profile

    weight = torch.randn(2048, 2048, device="cuda")

    def loop(phases: Phases, *, num_steps: int) -> None:
        for _ in range(num_steps):
            phases.begin_step()
            phases.mark("data")
            time.sleep(0.05)  # far longer than the device needs for a step
            phases.mark("forward")
            for _ in range(4):
                weight @ weight
            phases.mark("backward")
            for _ in range(12):
                weight @ weight
            phases.end_step()

    def calls(phases: Phases) -> Counter[str]:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            loop(phases, num_steps=5)
            phases.ready()
        return Counter(event.name for event in trace.events() if "Synchronize" in event.name)

    loop(Phases(device="cuda"), num_steps=3)
    torch.cuda.synchronize()
    # The profiler synchronises once on its own when it stops, so the loop without marks is the measure.
    assert calls(Phases(device="cuda", memory=True)) == calls(Phases(enabled=False))

    phases = Phases(device="cuda")
    loop(phases, num_steps=10)
    timings = phases.flush()[2:]
    total = Counter()
    for timing in timings:
        total.update(seconds(timing.spans))
    assert 2 < total["backward"] / total["forward"] < 4
    assert total["data"] > 0.5 * 0.05 * len(timings)  # the device idled while the host slept
    assert sum(total.values()) == pytest.approx(sum(timing.seconds for timing in timings), rel=0.1)
