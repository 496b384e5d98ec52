"""Fixes put in from outside and measured."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from doctoring import doctor

# Garbage collection and anomaly mode are both switches; everything is random but seeded, so losses must agree.
SCRIPT = """
import gc, torch
torch.manual_seed(0)
torch.autograd.set_detect_anomaly(ANOMALY)
ballast = [{"i": i} for i in range(300_000)]
middle = [torch.nn.Linear(32, 32) for _ in range(8)]
model = torch.nn.Sequential(torch.nn.Embedding(64, 32), *middle, torch.nn.Linear(32, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10_000):
    ids = torch.randint(0, 64, (4, 33))
    loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
"""


def proved(tmp_path: Path, *, anomaly: bool) -> dict[str, Any]:
    script, found = tmp_path / "train.py", tmp_path / "found.json"
    script.write_text(SCRIPT.replace("ANOMALY", str(anomaly)))
    done = doctor(
        *("--steps", "10", "--window", "4", "--prove", "--repeats", "1", "--run", str(tmp_path / "run")),
        *("--json", str(found), "--", sys.executable, str(script)),
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert b"time saved" in done.stdout
    read: dict[str, Any] = json.loads(found.read_text())
    return read


@pytest.mark.live
def test_a_switch_is_measured_and_changes_no_loss(tmp_path: Path) -> None:
    read = proved(tmp_path, anomaly=False)
    (proof,) = [proof for proof in read["proofs"] if proof["cause"] == "empty-cache"]
    assert len(proof["gains"]) == 1
    assert (proof["loss_difference"], proof["problem"]) == (0, None)
    (finding,) = [finding for finding in read["findings"] if finding["cause"] == "empty-cache"]
    assert (finding["status"], finding["gain"]) == ("measured", proof["gains"][0])


@pytest.mark.speed
def test_switches_alone_and_together_save_time(tmp_path: Path) -> None:
    """Compares speeds, so not in `make test`. A gain is asserted to be there, never how large it is."""
    read = proved(tmp_path, anomaly=True)
    proofs = {proof["cause"]: proof for proof in read["proofs"]}
    assert {"empty-cache", "anomaly-mode", "all together"} <= proofs.keys()
    assert proofs["empty-cache"]["gains"][0] > 0.2
    assert proofs["all together"]["gains"][0] > 0.2
    assert proofs["empty-cache"]["loss_difference"] == 0
    first = read["findings"][0]
    assert first["cause"] == "empty-cache"
    assert first["status"] == "measured"
