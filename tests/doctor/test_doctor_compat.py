"""An old torch in an environment of its own, without flatout there: `make test-compat`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from doctoring import SCRIPTS, SRC, environment

PYTHON = os.environ.get("FLATOUT_COMPAT_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="FLATOUT_COMPAT_PYTHON names no other Python: make test-compat")
SCRIPT_PLANTS = {
    "plain_slow_dataset.py": "data-starvation",
    "plain_float64.py": "wrong-dtype",
    "plain_anomaly.py": "anomaly-mode",
    "plain_collects_garbage.py": "empty-cache",
    "plain_recompiles.py": "recompiles",
    "nanogpt_recomputes.py": "needless-recompute",
    "nanogpt_micro_batch_of_one.py": "small-batch",
    "ddp_syncs_every_micro_batch.py": "missing-no-sync",
}
# flatout reaches the doctor without PYTHONPATH, so that the script's Python cannot find it.
DOCTOR = f"import sys; sys.path.insert(0, {str(SRC)!r}); from flatout.cli import main; main()"


def run(tmp_path: Path, *command: str) -> dict:
    found = tmp_path / "found.json"
    asked = ["--steps", "11", "--window", "5", "--run", str(tmp_path / "run"), "--json", str(found)]
    env = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", DOCTOR, "doctor", *asked, "--", *command],
        cwd=SCRIPTS,
        env=env,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return json.loads(found.read_text())


def test_the_other_environment_has_an_old_torch_and_no_flatout(tmp_path: Path) -> None:
    assert PYTHON is not None
    code = "import torch, importlib.util as u; print(torch.__version__, u.find_spec('flatout'))"
    env = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    said = subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, check=True, env=env, cwd=tmp_path
    ).stdout
    assert said.startswith("2.4.1")
    assert said.split()[1] == "None"


@pytest.mark.parametrize("script", SCRIPT_PLANTS)
def test_the_planted_cause_comes_first_there_too(script: str, tmp_path: Path) -> None:
    assert PYTHON is not None
    launcher = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, script] if script.startswith("ddp") else [PYTHON, script]
    found = run(tmp_path, *command)
    assert found["findings"][0]["cause"] == SCRIPT_PLANTS[script], found["findings"]


def test_a_healthy_script_is_left_alone_there_too(tmp_path: Path) -> None:
    assert PYTHON is not None
    found = run(tmp_path, PYTHON, "healthy_plain.py")
    assert [f for f in found["findings"] if (f["gain"] or 0) > 0.05] == []
