"""Whose loop a stack belongs to."""

import importlib.util
from pathlib import Path

LOOP = """
from flatout.probe.agent.stacks import framework_of_stack

class Trainer:
    def train(self):
        return framework_of_stack()
"""


def test_a_trainer_of_trl_is_named_although_the_loop_is_that_of_transformers(tmp_path: Path) -> None:
    path = tmp_path / "transformers" / "trainer.py"
    path.parent.mkdir()
    path.write_text(LOOP)
    spec = importlib.util.spec_from_file_location("made_trainer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    theirs = type("GRPOTrainer", (module.Trainer,), {"__module__": "trl.trainer.grpo_trainer"})
    assert (module.Trainer().train(), theirs().train()) == ("trainer", "trl")
