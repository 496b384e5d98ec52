"""A function of the user's own, named as MODULE:FUNCTION in a configuration: an objective, a task, a reward.

MODULE is a file MODULE.py in the current folder, or a module that Python finds (PYTHONPATH, an installed package). The
function is called with keywords of ours only, so that a configuration from elsewhere cannot call any function there is.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from flatout.errors import FlatoutError, UsageError, first_line

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def malformed(name: str) -> str | None:
    """What is wrong with a name, without importing anything; None if it may be right."""
    if _NAME.fullmatch(name):
        return None
    return f"{name!r:.100} is not MODULE:FUNCTION, such as rewards:short, for the function `short` of rewards.py"


def function(name: str, *, what: str, keywords: tuple[str, ...]) -> Callable[..., Any]:
    """The function, which must take these keywords. `what` is for messages, such as the setting that names it."""
    if problem := malformed(name):
        raise UsageError(f"{what}: {problem}")
    module_name, _, attribute = name.partition(":")
    try:
        module = _imported(module_name)
    except FlatoutError:
        raise
    except BaseException as error:  # a user's code may raise anything
        if isinstance(error, KeyboardInterrupt):
            raise
        words = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f"{what}: {module_name} cannot be imported: {words}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise UsageError(f"{what}: {getattr(module, '__file__', module_name)} has no function {attribute}")
    try:
        inspect.signature(found).bind(**dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:
        takes = ", ".join(keywords)
        raise UsageError(f"{what}: {name} must take the keywords {takes}: {first_line(error)}") from None
    chosen: Callable[..., Any] = found
    return chosen


def _imported(name: str) -> ModuleType:
    file = Path.cwd() / f"{name.replace('.', '/')}.py"
    if not file.is_file():
        return importlib.import_module(name)
    loaded = sys.modules.get(name)
    if loaded is not None and Path(getattr(loaded, "__file__", None) or "").absolute() == file:
        return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if loaded is None:  # a file that has the name of another module does not replace it
        sys.modules[name] = module
    return module
