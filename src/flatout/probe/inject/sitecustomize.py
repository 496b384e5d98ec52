"""Python imports this before a script starts, because `flatout doctor` put its folder first on PYTHONPATH.

It starts the agent and steps aside: off the path again, and the environment's own sitecustomize, if any, runs.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _run(name: str, path: str) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]

try:
    if os.environ.get("FLATOUT_AGENT"):
        _run("_flatout_agent", os.path.join(os.path.dirname(_HERE), "agent", "__init__.py"))
except Exception as error:  # a script must run, watched or not
    sys.stderr.write(f"flatout: the agent could not start, so nothing is measured: {error}\n")

_theirs = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _theirs is not None and _theirs.origin:
    _run("sitecustomize", _theirs.origin)
