"""The doctor on the loops people run: the framework named right, and tokens/s as counted by hand in the same process.

Three rows run in `make test`, all of them in `make test-frameworks`, which installs litgpt, uv and a notebook kernel in
an environment of its own and writes the table of docs/doctor.md. The count by hand (`scripts/counted.py`) and the
doctor's are of the same steps, so the comparison holds on a busy machine, too.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.doctor.doctoring import SCRIPTS as DOCTORS
from tests.doctor.doctoring import SRC, doctor, environment

SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MARGIN = 0.05


@dataclass(frozen=True, kw_only=True)
class Row:
    """A command, the framework that the doctor must name, and what the command needs."""

    command: tuple[str, ...]
    framework: str
    needs: tuple[str, ...] = ()


def python(*command: str, framework: str, needs: tuple[str, ...] = ()) -> Row:
    return Row(command=(sys.executable, *command), framework=framework, needs=needs)


LAUNCH = ("-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml")
ROWS = {
    "TRL SFT": python("trl_sft.py", framework="trl", needs=("trl",)),
    "TRL DPO": python("trl_dpo.py", framework="trl", needs=("trl",)),
    "TRL GRPO": python("trl_grpo.py", framework="trl", needs=("trl",)),
    "TRL RLOO": python("trl_rloo.py", framework="trl", needs=("trl",)),
    "TRL reward model": python("trl_reward.py", framework="trl", needs=("trl",)),
    "transformers Trainer": python("trainer.py", framework="trainer", needs=("transformers",)),
    "Trainer, bf16, accumulation": python("trainer_accumulates.py", framework="trainer", needs=("transformers",)),
    "Trainer by accelerate launch": python(*LAUNCH, "trainer.py", framework="trainer", needs=("accelerate",)),
    "Accelerate loop": python("accelerate_loop.py", framework="accelerate", needs=("accelerate",)),
    "Lightning": python("lightning_module.py", framework="lightning", needs=("lightning",)),
    "litgpt pretrain": python("litgpt_pretrain.py", framework="litgpt", needs=("litgpt",)),
    "nanoGPT style, GradScaler": python("nanogpt_scaler.py", framework="torch"),
    "actor and critic, two optimizers": python("two_optimizers.py", framework="torch"),
    "compiled model": python("compiled.py", framework="torch"),
    "DDP by torchrun": Row(command=(*TORCHRUN, "ddp.py"), framework="torch"),
    "FSDP2 by torchrun": Row(command=(*TORCHRUN, "fsdp2.py"), framework="torch"),
    "python -m": python("-m", "plain", framework="torch"),
    "shell script": Row(command=("sh", "started.sh"), framework="torch"),
    "uv run": Row(
        command=("uv", "run", "--no-project", "--python", sys.executable, "plain.py"), framework="torch", needs=("uv",)
    ),
    "notebook by papermill": python(
        *("-m", "papermill", "notebook.ipynb", "/dev/null"), framework="torch", needs=("papermill", "ipykernel")
    ),
}
EACH_TIME = ("TRL SFT", "Lightning", "python -m")


def available(package: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=package))


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    rows: list[str] = []
    yield rows
    if (to := os.environ.get("FLATOUT_FRAMEWORKS_TABLE")) and rows:
        with Path(to).open("a") as file:
            file.writelines(row + "\n" for row in rows)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in EACH_TIME else pytest.mark.frameworks) for n in ROWS]
)
def test_the_loop_is_found_and_its_tokens_are_counted(name: str, tmp_path: Path, table: list[str]) -> None:
    row = ROWS[name]
    for package in row.needs:
        if not available(package):
            pytest.skip(f"{package} is not installed: make test-frameworks")
    path = os.pathsep.join(map(str, (SRC, SCRIPTS, DOCTORS)))
    tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    more = {"PYTHONPATH": path, "PATH": tools, "COUNTED": str(tmp_path / "counted"), "PYTHON": sys.executable}
    found, run = tmp_path / "diagnosis.json", tmp_path / "run"
    asked = ("--steps", "14", "--window", "60", "--run", str(run), "--json", str(found))
    done = doctor(*asked, "--", *row.command, cwd=SCRIPTS, env=environment(**more))
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    read = json.loads(found.read_text())
    assert read["script"]["framework"] == row.framework
    speed, by_hand = read["limit"]["tokens_per_s"], counted(tmp_path / "counted", run / "steps.jsonl")
    shown = " ".join(Path(word).name if os.sep in word else word for word in row.command)
    version = read["script"]["version"]
    table.append(f"| {name} | {version} | `{shown}` | {row.framework} | {speed:,.0f} | {by_hand:,.0f} |")
    assert speed == pytest.approx(by_hand, rel=MARGIN)


def counted(by_hand: Path, steps: Path) -> float:
    """Tokens/s as counted in the script, over the steps that the doctor timed."""
    timed = [step for step in map(json.loads, steps.read_text().splitlines()) if step["extra"]["stage"] == "timed"]
    lines: list[dict[str, Any]] = [json.loads(line) for line in by_hand.read_text().splitlines()]
    half = timed[0]["seconds"] / 2

    def nearest(time: float) -> dict[str, Any]:
        line = min(lines, key=lambda one: abs(one["time"] - time))
        assert abs(line["time"] - time) < half, "the doctor and the script mean other steps"
        return line

    first, last = nearest(timed[0]["time"] - timed[0]["seconds"]), nearest(timed[-1]["time"])
    assert last["step"] - first["step"] == len(timed)
    return float((last["tokens"] - first["tokens"]) / (last["time"] - first["time"]))
