"""A checkpoint is whole or not there, and a broken one is never loaded."""

import json
import random
import shutil
import signal
import subprocess
import sys
from glob import glob
from pathlib import Path

import pytest
import torch
from tests.waiting import wait_until
from tests.warm import Started
from torch import nn

from flatout.engine import checkpoint, pieces
from flatout.engine.checkpoint import Checkpoints, restore
from flatout.errors import UsageError


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(16, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(folder: Path, *steps: int, keep: int = 2, identity: str = "run") -> Checkpoints:
    checkpoints = Checkpoints(folder, identity=identity, keep=keep)
    for step in steps:
        model, optimizer = build(step)
        checkpoints.save(step, model=model, optimizer=optimizer, state={"tokens": step * 10})
    return checkpoints


def test_what_is_saved_comes_back_to_the_bit(tmp_path: Path) -> None:
    save(tmp_path, 7)
    found, problems = Checkpoints(tmp_path, identity="run", keep=2).latest()
    assert found is not None
    assert (found.step, found.state, found.resumable, problems) == (7, {"tokens": 70}, True, [])
    model, optimizer = build(99)
    expected_model, expected_optimizer = build(7)
    restore(found, model=model, optimizer=optimizer)
    for one, other in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(one, other)
        for name, value in expected_optimizer.state[other].items():
            assert torch.equal(optimizer.state[one][name], value), name


def test_keeps_the_newest_and_never_fewer_than_two(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep=3)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000002", "step-00000003", "step-00000004"]
    assert (tmp_path / "latest").read_text().strip() == "step-00000004"
    save(tmp_path / "few", 1, 2, 3, keep=1)
    assert len(list((tmp_path / "few").glob("step-*"))) == 2


def test_a_broken_one_does_not_count_among_those_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    weights = tmp_path / "step-00000002" / "weights-rank00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    save(tmp_path, 3)
    assert {p.name for p in tmp_path.glob("step-*")} == {"step-00000001", "step-00000002", "step-00000003"}


def mutate(folder: Path, rng: random.Random) -> str:
    """One of the ways a checkpoint goes bad."""
    files = sorted(p for p in folder.iterdir() if p.is_file())
    victim = rng.choice(files)
    content = bytearray(victim.read_bytes())
    kind = rng.choice(["flip", "truncate", "delete", "empty", "swap", "append"])
    if kind == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        victim.write_bytes(content)
    elif kind == "truncate":
        victim.write_bytes(content[: rng.randrange(len(content))])
    elif kind == "append":
        victim.write_bytes(content + b"x")
    elif kind == "delete":
        victim.unlink()
    elif kind == "empty":
        victim.write_bytes(b"")
    else:
        one, other = (p for p in files if p.suffix == ".safetensors")
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)
    return f"{kind} {victim.name}"


def test_every_mutation_is_found_and_the_older_one_taken(tmp_path: Path) -> None:
    original = tmp_path / "original"
    save(original, 1, 2)
    rng = random.Random(0)
    for trial in range(300):
        folder = tmp_path / "trial"
        shutil.copytree(original, folder)
        what = mutate(folder / "step-00000002", rng)
        found, problems = Checkpoints(folder, identity="run", keep=2).latest()
        assert found is not None, f"{trial}: {what}"
        assert found.step == 1, f"{trial}: {what} was not noticed"
        assert len(problems) == 1
        assert problems[0].startswith("step-00000002: ")
        shutil.rmtree(folder)


def test_a_byte_that_changes_on_its_way_to_the_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hashes are of what was in memory, so a disk that lies is caught before anything is replaced by it."""
    save(tmp_path, 1)
    plain = pieces.save_file

    def lying(tensors: dict[str, torch.Tensor], path: Path) -> None:
        plain(tensors, path)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(pieces, "save_file", lying)
    with pytest.raises(OSError, match="read back differently"):
        save(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_threads_that_save_import_nothing() -> None:
    """Two threads that asked numpy for `ctypeslib` at the same time failed: RecursionError, about once in 500 runs."""
    code = "import sys, flatout.engine.pieces; assert 'numpy.ctypeslib' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class Driver:
    """Stands in for the CUDA driver's page-locking."""

    def __init__(self, error: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self.error = error

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.mark.parametrize("tensor", [torch.ones(3, 5, dtype=torch.bfloat16), torch.tensor(2.0), torch.ones(0, 4)])
def test_copies_are_page_locked_and_released(monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor) -> None:
    driver, staging = Driver(), pieces.Staging()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    buffer = staging._buffer("file", "name", tensor)
    assert (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype)
    assert list(driver.locked.values()) == [tensor.numel() * tensor.element_size()] * bool(tensor.numel())
    assert staging._buffer("file", "name", tensor) is buffer
    assert torch.equal(buffer.copy_(tensor), tensor)
    del staging
    assert not driver.locked


def test_memory_that_cannot_be_page_locked_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(error=2))
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        pieces._page_locked(torch.ones(8))
    monkeypatch.setattr(pieces.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 2**20}))
    with pytest.raises(RuntimeError, match="GiB are free"):
        pieces._page_locked(torch.ones(2**20))


@pytest.mark.gpu
def test_reserved_copies_of_a_gpu_are_page_locked_and_equal() -> None:
    tensors = {str(n): torch.randn(n, 1000, device="cuda") for n in (0, 1, 3000)}
    groups = {"file": {name: pieces.Piece(tensor=t, shape=tuple(t.shape)) for name, t in tensors.items()}}
    staging = pieces.Staging()
    staging.reserve(groups)
    for _ in range(2):
        copies, copied = staging.take(groups)
        copied.synchronize()
        for name, tensor in tensors.items():
            assert torch.equal(copies["file"][name].tensor, tensor.cpu())
            assert not tensor.numel() or copies["file"][name].tensor.is_pinned()
        tensors["3000"].mul_(2)


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 5)
    found, problems = Checkpoints(tmp_path, identity="other", keep=2).latest()
    assert found is None
    assert "another run" in problems[0]


def test_a_copied_manifest_of_another_step_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000009")
    found, problems = Checkpoints(tmp_path, identity="run", keep=2).latest()
    assert found is not None
    assert found.step == 2
    assert "of step 2" in problems[0]


SAVER = """
import sys
from pathlib import Path
import torch
from torch import nn
from flatout.engine import checkpoint
from flatout.engine.checkpoint import Checkpoints
folder = Path(sys.argv[1])
model = nn.Linear(600, 600)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
model(torch.randn(2, 600)).sum().backward()
optimizer.step()
checkpoints = Checkpoints(folder, identity="run", keep=2)
newest, _ = checkpoints.latest()
step = newest.step if newest else 0
print("ready", flush=True)
while True:
    step += 1
    checkpoints.save(step, model=model, optimizer=optimizer, state={})
    print(step, flush=True)
"""


def killed(folder: Path, *, after: int, seeing: str) -> int:
    """Starts a saver and kills it once it has reported `after` saves and a file like `seeing` is there.

    It goes on saving meanwhile, so the kill comes at any moment after that. Returns the last step it reported.
    """
    process = Started(folder, cwd=folder, script=SAVER)
    wait_until(lambda: process.so_far().count("\n") > after, process=process)
    wait_until(lambda: glob(f"{folder}/{seeing}"), process=process)
    process.send_signal(signal.SIGKILL)
    out, _ = process.communicate()
    return int(out.split("\n")[-2])  # behind it, half a line


def test_killed_at_any_moment_a_whole_checkpoint_stands(tmp_path: Path) -> None:
    """Real processes, really killed: what was reported saved is never lost, and what is there loads."""
    moments = ("latest", "step-*.tmp-*", "*.tmp-*/weights-*", "*.tmp-*/optimizer-*")
    for after, seeing in enumerate(moments, start=1):
        reported = killed(tmp_path, after=after % 3 + 1, seeing=seeing)
        found, problems = Checkpoints(tmp_path, identity="run", keep=2).latest()
        assert problems == []
        assert found is not None
        assert found.step >= reported
    assert found.step >= 2 + 3 + 1 + 2, "every saver goes on from what the one before left"
    model, optimizer = build()
    step = 1 + max(int(p.name[5:]) for p in tmp_path.glob("step-????????"))
    Checkpoints(tmp_path, identity="run", keep=2).save(step, model=model, optimizer=optimizer, state={})
    assert not list(tmp_path.glob("*.tmp-*")), "the next save sweeps up"


LIMITED = """
import resource, sys
from pathlib import Path
import torch
from torch import nn
from flatout.engine import checkpoint
from flatout.engine.checkpoint import Checkpoints
model = nn.Linear(600, 600)
checkpoints = Checkpoints(Path(sys.argv[1]), identity="run", keep=2)
checkpoints.save(1, model=model, optimizer=None, state={})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    checkpoints.save(2, model=model, optimizer=None, state={})
except OSError as error:
    print("OSError")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpoints.save(3, model=model, optimizer=None, state={})
"""


def test_no_room_leaves_the_last_one_whole_and_nothing_behind(tmp_path: Path) -> None:
    out, err = Started(tmp_path, cwd=tmp_path, script=LIMITED).communicate()
    assert (out, err) == ("OSError\n", "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000003"]


def test_the_manifest_is_plain_json_with_hashes(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())
    assert set(manifest["files"]) == {"weights-rank00000.safetensors", "optimizer-rank00000.safetensors"}
    assert manifest["files"]["weights-rank00000.safetensors"]["tensors"]["weight"]["shape"] == [8, 16]


def rewrite(folder: Path, **changes: object) -> None:
    """The manifest with other content, and the checksum that belongs to that."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text()) | changes
    del body["checksum"]
    path.write_text(json.dumps(body | {"checksum": checkpoint._digest(body)}))


FACTS = {"bytes": 1, "tensors": {}}


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"../other": FACTS}},
        {"files": {}},
        {"files": {"optimizer-rank00000.safetensors": FACTS}},
        {"state": [1]},
        {"step": 2.0},
        {"step": True},
        {"world": "one"},
        {"tokenizer": 7},
        {"unheard": 1},
    ],
)
def test_a_manifest_that_no_version_writes_is_refused_by_its_name(tmp_path: Path, changes: dict[str, object]) -> None:
    save(tmp_path, 1, 2)
    rewrite(tmp_path / "step-00000002", **changes)
    found, problems = Checkpoints(tmp_path, identity="run", keep=2).latest()
    assert found is not None
    assert found.step == 1
    assert problems[0].startswith("step-00000002: manifest.json ")


def test_an_older_manifest_is_read(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step-00000001" / "manifest.json"
    body = json.loads(path.read_text())
    for name in ("run", "valid", "tokenizer", "checksum"):
        body.pop(name, None)
    path.write_text(json.dumps(body | {"checksum": checkpoint._digest(body)}))
    found, problems = Checkpoints(tmp_path, identity="run", keep=2, run="id", valid="data").latest()
    assert found is not None
    assert problems == []


@pytest.mark.parametrize("part", ["weights-rank00000.safetensors", "step"])
def test_a_link_that_leaves_the_folder_is_not_followed(tmp_path: Path, part: str) -> None:
    folder = tmp_path / "run"
    save(folder, 1, 2)
    newest = folder / "step-00000002"
    victim = newest if part == "step" else newest / part
    outside = victim.rename(tmp_path / "outside")
    victim.symlink_to(outside)
    found, problems = Checkpoints(folder, identity="run", keep=2).latest()
    assert found is not None
    assert found.step == 1
    assert "symbolic link" in problems[0]


def test_weights_and_optimizer_exchanged_are_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    facts = json.loads((folder / "manifest.json").read_text())["files"]
    contents = [(folder / name).read_bytes() for name in names]
    for name, content in zip(reversed(names), contents, strict=True):
        (folder / name).write_bytes(content)
    # Also where the manifest was exchanged with them.
    rewrite(folder, files=dict(zip(names, (facts[name] for name in reversed(names)), strict=True)))
    found, _ = Checkpoints(tmp_path, identity="run", keep=2).latest()
    assert found is not None
    model, optimizer = build()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(UsageError, match=r"weights-rank00000.safetensors does not fit the model.*it has no weight"):
        restore(found, model=model, optimizer=optimizer)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Linear(16, 9), r"weight has shape \[8, 16\], not \[9, 16\]"),
        (nn.Linear(16, 8, dtype=torch.float64), r"weight is torch.float32, not torch.float64"),
        (nn.Sequential(nn.Linear(16, 8)), r"it has no 0.weight"),
    ],
)
def test_what_does_not_fit_the_model_is_named_and_changes_nothing(
    tmp_path: Path, other: nn.Module, message: str
) -> None:
    save(tmp_path, 1)
    found, _ = Checkpoints(tmp_path, identity="run", keep=2).latest()
    assert found is not None
    with pytest.raises(UsageError, match=message):
        restore(found, model=other, optimizer=torch.optim.AdamW(other.parameters()))


def test_a_file_that_vanishes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def nameless(*_args: object, **_how: object) -> None:
        raise FileNotFoundError("No such file or directory")

    monkeypatch.setattr(pieces, "safe_open", nameless)
    _, problems = Checkpoints(tmp_path, identity="run", keep=2).latest()
    assert problems == ["step-00000001: weights-rank00000.safetensors is missing"]


def test_a_save_that_fails_says_what_the_system_says(tmp_path: Path) -> None:
    script = LIMITED.replace('print("OSError")', "print(error.strerror)")
    out, err = Started(tmp_path, cwd=tmp_path, script=script).communicate()
    assert (out, err) == ("File too large\n", "")
