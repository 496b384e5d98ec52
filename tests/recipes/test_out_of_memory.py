"""Too large a micro-batch is halved in the run: the step is taken again, exactly once, on all ranks."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.warm import two_ranks

from flatout.config import load
from flatout.data.stream import Batch
from flatout.engine.faults import is_out_of_memory, smaller
from flatout.engine.replay import Replay
from flatout.engine.step import Engine
from flatout.errors import RunFailed
from flatout.recipes import pretrain
from flatout.record import Run


def run(config: Path, folder: Path, *overrides: str) -> None:
    settings = load(config, overrides=overrides).settings
    pretrain.run(settings, folder=folder)


def weights_hash(folder: Path) -> str:
    newest = max((folder / "checkpoints").glob("step-*"))
    return hashlib.sha256((newest / "weights-rank00000.safetensors").read_bytes()).hexdigest()


def fits_only(monkeypatch: pytest.MonkeyPatch, sequences: int, *, in_backward: bool) -> None:
    """A device that has room for so many sequences at a time."""
    plain = Engine.sums

    def sums(self: Engine, batch: Batch) -> Mapping[str, torch.Tensor]:
        found = plain(self, batch)
        if batch.num_sequences > sequences:
            if not in_backward:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            found["loss"].register_hook(_raise)
        return found

    monkeypatch.setattr(Engine, "sums", sums)


def _raise(_gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_run_recovers_and_equals_one_started_smaller(
    in_backward: bool, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["eval.every=null", "data.packing=documents", "eval.tokens=64"]
    run(config, tmp_path / "small", "plan.micro_batch=2", *settings)
    fits_only(monkeypatch, 2, in_backward=in_backward)
    run(config, tmp_path / "large", "plan.micro_batch=8", *settings)
    shrunk = [(e.data["micro_batch"], e.data["now"]) for e in Run.open(tmp_path / "large").events() if e.kind == "oom"]
    assert shrunk == [(8, 4), (4, 2)]
    assert weights_hash(tmp_path / "large") == weights_hash(tmp_path / "small")
    losses = [[r.loss for r in Run.open(tmp_path / name).steps()] for name in ("small", "large")]
    assert losses[0] == losses[1]


def test_recordings_are_dropped_before_the_micro_batch_is(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that ran out of memory beside recordings is taken again as it is, launch by launch."""
    settings = ["eval.every=null", "eval.tokens=64", "plan.micro_batch=4"]
    run(config, tmp_path / "plain", *settings)
    plain, refused = Engine.sums, []

    def sums(self: Engine, batch: Batch) -> Mapping[str, torch.Tensor]:
        if torch.is_grad_enabled() and self.replay is None and not refused:
            self.replay = _Held()  # as after a few steps on a GPU
        if self.replay:
            refused.append(batch.num_sequences)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return plain(self, batch)

    monkeypatch.setattr(Engine, "sums", sums)
    run(config, tmp_path / "short", *settings)
    assert refused == [4]
    events = list(Run.open(tmp_path / "short").events())
    assert [e for e in events if e.kind == "oom"] == []
    (told,) = [e.data["text"] for e in events if e.kind == "notice" and "memory" in e.data["text"]]
    assert "step 0 ran out of memory (CUDA out of memory" in told
    assert "without CUDA graphs" in told
    assert weights_hash(tmp_path / "short") == weights_hash(tmp_path / "plain")


class _Held(Replay):
    """Holds a recording."""

    def __init__(self) -> None:
        super().__init__([])
        self._begun = True


def test_at_one_sequence_the_message_names_what_takes_most(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits_only(monkeypatch, 0, in_backward=False)
    with pytest.raises(RunFailed, match=r"micro-batch 1.*Largest parts as predicted: \w+"):
        run(config, tmp_path / "run", "eval.every=null")


RANKS = """
import sys
import torch
from flatout.cli import main
from flatout.engine.step import Engine
plain = Engine.sums
def sums(self, batch):
    if batch.num_sequences > 1 and self.ranks.rank == 1 and torch.is_grad_enabled():
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return plain(self, batch)
Engine.sums = sums
main()
"""


def test_one_rank_of_two_runs_out_and_both_agree(config: Path, tmp_path: Path) -> None:
    arguments = ["train", config, "train.steps=4", "eval.every=null", "data.packing=documents"]
    two_ranks(*arguments, "plan.micro_batch=1", "--run", tmp_path / "small", cwd=tmp_path)
    two_ranks(*arguments, "plan.micro_batch=4", "--run", tmp_path / "large", cwd=tmp_path, script=RANKS)
    kinds = [e.kind for e in Run.open(tmp_path / "large").events()]
    assert kinds.count("oom") == 2
    assert weights_hash(tmp_path / "large") == weights_hash(tmp_path / "small")


def test_a_real_host_allocator_failure_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_the_next_smaller_size_divides() -> None:
    assert [smaller(n) for n in (8, 6, 9, 7, 2)] == [4, 3, 3, 1, 1]
