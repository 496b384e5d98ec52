"""The agent in processes of its own: what is set there stays set, and what it brings into them is counted."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.warm import Started

import flatout.probe

FOLDER = Path(flatout.probe.__file__).parent
AGENT = FOLDER / "agent"
ASKED = "import torch; {}; from flatout.probe.agent.facts import flags_of; print(flags_of(torch)['matmul_precision'])"
LOADED = "import json, sys; print(json.dumps([sorted(sys.modules), sys.path]))"


@pytest.mark.parametrize(
    ("set_by", "answer"),
    [
        ("torch.set_float32_matmul_precision('high')", "high"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "high"),
        ("torch.backends.cuda.matmul.fp32_precision = 'ieee'", "highest"),
    ],
)
def test_the_precision_of_products_is_known_however_it_was_set(set_by: str, answer: str, tmp_path: Path) -> None:
    out, err = Started(cwd=tmp_path, script=ASKED.format(set_by)).communicate()
    assert (out.strip(), err) == (answer, "")


@pytest.mark.parametrize("path", sorted(AGENT.rglob("*.py")), ids=lambda path: path.name)
def test_every_module_of_the_agent_is_standard_library_only(path: Path) -> None:
    """On Python 3.9 too; only torch may be imported besides, inside a function, once the script has imported it."""
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    inside = {
        node for function in ast.walk(tree) if isinstance(function, ast.FunctionDef) for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert (node.level, str(node.module)) == (1, str(node.module).split(".")[0]), "out of the package"
            continue
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        allowed = sys.stdlib_module_names | ({"torch"} if node in inside else set())
        assert {str(name).split(".")[0] for name in names} <= allowed


def test_a_watched_process_gets_one_package_of_ours_and_nothing_on_its_path(tmp_path: Path) -> None:
    asked = {"out": str(tmp_path), "steps": 1, "seconds": 1.0, "stop": False}
    watched = {"PYTHONPATH": str(FOLDER / "inject"), "FLATOUT_AGENT": json.dumps(asked)}
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    (modules, path), (modules_before, path_before) = (
        json.loads(subprocess.run([sys.executable, "-c", LOADED], env=env, capture_output=True, check=True).stdout)
        for env in ({**plain, **watched}, plain)
    )
    assert path == path_before
    added = {name.split(".")[0] for name in set(modules) - set(modules_before)} - set(sys.stdlib_module_names)
    assert added - {"sitecustomize"} == {"_flatout_agent"}
    assert {f"_flatout_agent.{path.stem}" for path in AGENT.glob("[!_]*.py")} <= set(modules)
