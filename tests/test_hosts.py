"""Two network namespaces as two hosts: torchrun meets across them, trains, and survives a link cut for a while."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from tests.recipes.conftest import CONFIG
from tests.recipes.recipes_processes import trajectory, wait_for_step
from tests.waiting import wait_until

CUT_S = 5.0


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert not check or done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """The names of two hosts, each with its address, on one cable."""
    names = [f"flatout{os.getpid()}{side}" for side in "ab"]
    if shutil.which("ip") is None or ip("netns", "add", names[0], check=False).returncode != 0:
        pytest.skip("network namespaces cannot be made here: needs iproute2 and root")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        found = {}
        for number, name in enumerate(names, start=1):
            found[name] = f"10.77.0.{number}"
            ip("-n", name, "address", "add", f"{found[name]}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield found
    finally:
        for name in names:
            ip("netns", "delete", name, check=False)


@pytest.mark.long
def test_a_cut_link_is_survived(hosts: dict[str, str], tmp_path: Path) -> None:
    config, run = tmp_path / "tiny.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(CONFIG))
    first = next(iter(hosts))
    line = [sys.executable, "-m", "flatout", "launch", str(config), "train.steps=1000000", "--on", "torchrun"]
    line += ["--nodes", "2", "--ranks", "1", "--rendezvous", f"{hosts[first]}:29500", "--run", str(run)]
    nodes = []
    for name in hosts:  # both have the same host name, which stands for neither address
        with (tmp_path / name).open("w") as said:
            command = ["ip", "netns", "exec", name, *line]
            nodes.append(subprocess.Popen(command, cwd=tmp_path, stdout=said, stderr=said))
    try:
        wait_for_step(run, 5, nodes[0])
        ip("-n", first, "link", "set", "cable", "down")
        began = len(trajectory(run))
        time.sleep(CUT_S)
        cut = len(trajectory(run))
        ip("-n", first, "link", "set", "cable", "up")
        assert cut - began <= 2, "ranks that cannot reach each other take no step"
        wait_for_step(run, cut + 5, nodes[0])
        for node in nodes:
            node.send_signal(signal.SIGTERM)
        said = {name: (tmp_path / name).read_text()[-2000:] for name in hosts}
        assert [node.wait() for node in nodes] == [75, 75], said
        steps = [step for step, *_ in trajectory(run)]
        assert steps == list(range(len(steps)))
    finally:
        for node in nodes:
            with suppress(psutil.Error):
                for child in psutil.Process(node.pid).children(recursive=True):
                    child.kill()
            node.kill()
            node.wait()
    wait_until(lambda: not any(str(run) in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])))
