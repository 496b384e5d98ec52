"""Reading runs and logs needs no torch."""

import subprocess
import sys

CODE = """
import sys
import flatout.insight.diagnose.runs, flatout.insight.doctor, flatout.insight.logs
print('torch' in sys.modules)
"""


def test_the_doctor_imports_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_agent_is_standard_library_only() -> None:
    import ast
    from pathlib import Path

    import flatout.probe

    tree = ast.parse((Path(flatout.probe.__file__).parent / "agent.py").read_text())
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name if isinstance(node, ast.Import) else node.module for node in top for alias in node.names}
    assert {str(name).split(".")[0] for name in names} <= set(sys.stdlib_module_names)
