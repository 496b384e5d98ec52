"""Whose loop a stack belongs to, and what the threads of a script do."""

import importlib.util
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.waiting import wait_until

from flatout.probe.agent.facts import process_cpu_s
from flatout.probe.agent.stacks import Others, kind_and_site

LOOP = """
from flatout.probe.agent.stacks import framework_of_stack

class Trainer:
    def train(self):
        return framework_of_stack()
"""


def module_of(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("made", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_trainer_of_trl_is_named_although_the_loop_is_that_of_transformers(tmp_path: Path) -> None:
    path = tmp_path / "transformers" / "trainer.py"
    path.parent.mkdir()
    path.write_text(LOOP)
    module = module_of(path)
    theirs = type("GRPOTrainer", (module.Trainer,), {"__module__": "trl.trainer.grpo_trainer"})
    assert (module.Trainer().train(), theirs().train()) == ("trainer", "trl")


def test_text_in_quotes_is_no_logging(tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text(
        "import sys\ndef look(): return sys._getframe(1)\n"
        "def grade(text): return look() if text else 'print(1)'\n"
        "def show(text): return look() if 'x' else print(text)\n"
    )
    user = module_of(script)
    assert kind_and_site(user.grade("x")) == ("reward", f"{script}:3 in grade")
    assert kind_and_site(user.show("x"))[0] == "log"


def test_a_thread_that_is_busy_is_told_apart_from_one_that_waits(tmp_path: Path) -> None:
    script, ending = tmp_path / "user.py", threading.Event()
    script.write_text("def spin(ending):\n    while not ending.is_set():\n        sum(range(1000))\n")
    user = module_of(script)
    threads = [
        threading.Thread(target=user.spin, args=(ending,), name="busy"),
        threading.Thread(target=ending.wait, name="waiting"),
    ]
    others = Others(SimpleNamespace(thread=threading.get_ident()))  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: others.look() or others.busiest())
    finally:
        ending.set()
    found = others.busiest()
    assert [one["name"] for one in found] == ["busy"]
    assert found[0]["site"].startswith(f"{script}:")
    assert found[0]["share"] > 0


def test_children_that_have_ended_count_as_the_jobs_own() -> None:
    before = process_cpu_s() - time.process_time()
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    assert process_cpu_s() - time.process_time() > before + 1e-3
