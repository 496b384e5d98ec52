import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import flatout
from flatout.probe.environment import describe


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_it_is_json_and_knows_the_versions():
    account = describe()
    assert json.loads(json.dumps(account)) == account
    assert account["flatout"] == flatout.__version__
    assert account["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert account["packages"]["nvidia-ml-py"] == metadata.version("nvidia-ml-py")
    assert account["hostname"]


def test_torch_is_described_without_being_imported():
    pytest.importorskip("torch")
    script = """
import json, sys
from flatout.probe.environment import describe
account = describe()
assert "torch" not in sys.modules
import torch
print(json.dumps([account["packages"]["torch"], torch.__version__, account["cuda"], torch.version.cuda,
                  describe()["cuda"]]))
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    stated, version, cuda, real_cuda, cuda_when_loaded = json.loads(done.stdout)
    assert stated.split("+")[0] == version.split("+")[0]  # wheels differ in whether they name their build
    assert cuda == real_cuda == cuda_when_loaded


def test_only_named_variables_are_kept_and_masked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_AUTH_TOKEN", "sentinel-one")
    monkeypatch.setenv("FLATOUT__DATA__PATH", "https://me:sentinel-two@host/x")
    monkeypatch.setenv("WANDB_API_KEY", "sentinel-three")
    monkeypatch.setenv("SOMETHING_ELSE", "sentinel-four")
    account = describe()
    assert "sentinel" not in json.dumps(account)
    variables = {k: v for k, v in account["variables"].items() if k.startswith(("NCCL_", "FLATOUT__", "CUDA_VIS"))}
    assert variables == {
        "CUDA_VISIBLE_DEVICES": "1",
        "NCCL_AUTH_TOKEN": "***",
        "NCCL_DEBUG": "INFO",
        "FLATOUT__DATA__PATH": "https://***@host/x",
    }


def test_git_commit_and_dirt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert describe()["git"] is None
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "one")
    assert describe()["git"] == {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "a").write_text("2")
    assert describe()["git"]["dirty"] is True


def test_git_starts_no_program_named_by_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "one")
    hook = tmp_path / "hook.sh"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    os.chmod(hook, 0o755)
    git(tmp_path, "config", "core.fsmonitor", str(hook))
    assert describe()["git"]["commit"]
    assert not (tmp_path / "ran").exists()


def test_no_git_program_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe()["git"] is None
