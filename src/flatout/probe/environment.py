"""The software and machine of a run, for `env.json` and reports; secrets are masked, unknown is None.

Versions come from package metadata and NVML, so nothing heavy is imported and no CUDA context is made.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pynvml

from flatout import __version__
from flatout.probe import launched
from flatout.probe.monitor import visible_gpus
from flatout.record import redacted

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "datasets", "nvidia-ml-py")
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
)
_VARIABLE_PREFIXES = ("NCCL_", "FLATOUT__")


def describe() -> dict[str, Any]:
    """A JSON-ready account of this process's environment."""
    account = {
        "python": platform.python_version(),
        "flatout": __version__,
        "packages": {name: _version(name) for name in _PACKAGES},
        "cuda": _cuda(),
        "cudnn": _version("nvidia-cudnn-cu13") or _version("nvidia-cudnn-cu12"),
        **_driver_and_gpus(),
        "git": _git(),
        "hostname": socket.gethostname(),
        "job": launched.job(),
        "platform": platform.platform(),
        "variables": _variables(),
    }
    return dict(redacted(account))


def _variables() -> dict[str, str]:
    # Named ones only: an environment is full of other people's secrets.
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES)
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cuda() -> str | None:
    """The CUDA release torch was built for; read from its file where torch is not loaded anyway."""
    if "torch" in sys.modules:
        found = sys.modules["torch"].version.cuda
        return None if found is None else str(found)
    try:
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
    except (metadata.PackageNotFoundError, OSError):
        return None
    match = re.search(r"""^cuda\b[^=]*=\s*['"]([\d.]+)['"]""", text, re.MULTILINE)
    return match[1] if match else None


def _driver_and_gpus() -> dict[str, Any]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {"driver": None, "gpus": None}
    try:
        return {
            "driver": _nvml(pynvml.nvmlSystemGetDriverVersion),
            "gpus": [
                {
                    "name": _nvml(pynvml.nvmlDeviceGetName, handle),
                    "sm_clock_mhz": _nvml(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
                    "max_sm_clock_mhz": _nvml(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
                    "power_limit_w": _watts(_nvml(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
                }
                for _, handle in visible_gpus()
            ],
        }
    finally:
        pynvml.nvmlShutdown()


def _nvml(query: Any, *arguments: Any) -> Any:
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _git() -> dict[str, Any] | None:
    """The commit of the current folder, and whether tracked files differ from it."""
    commit = _run_git("rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _run_git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _run_git(*arguments: str) -> str | None:
    # A repository may name a program as its fsmonitor: reading a commit id must not start it.
    command = ["git", "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
