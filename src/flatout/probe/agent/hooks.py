"""How the agent gets into a script: modules as they are imported, attributes replaced; its own errors stay out."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

ERRORS: list[str] = []


def quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps the agent's own errors for the report; they never reach the script."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if len(ERRORS) < 20:
                where = traceback.extract_tb(error.__traceback__)[-1]
                ERRORS.append(f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})")
            return None

    return wrapped


class ImportHook:
    """Calls back once a module has been executed, in front of every other finder; the module itself is untouched.

    A look-up is not an import: libraries ask `importlib.util.find_spec` whether a module is installed, and import it
    later or never. So a callback waits until the module was executed.
    """

    def __init__(self) -> None:
        self.wanted: dict[str, Callable[[Any], None]] = {}
        self._finding = threading.local()

    def when(self, name: str, callback: Callable[[Any], None]) -> None:
        module = sys.modules.get(name)
        if module is not None:
            callback(module)
        else:
            self.wanted[name] = callback

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        # Another hook that asks all finders in turn would ask this one again.
        if name not in self.wanted or getattr(self._finding, "name", None) == name:
            return None
        self._finding.name = name
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec: importlib.machinery.ModuleSpec | None = (
                    None if finder is self or find is None else find(name, path, target)
                )
                if spec is not None:
                    self._listen(name, spec)
                    return spec
            return None
        finally:
            self._finding.name = None

    def _listen(self, name: str, spec: importlib.machinery.ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: Any) -> None:
            execute(module)
            callback = self.wanted.pop(name, None)
            if callback is not None:
                quietly(callback)(module)

        with contextlib.suppress(AttributeError):  # a loader without a __dict__ is left alone
            loader.exec_module = exec_module


class Patches:
    """Attributes replaced for the time of watching, put back in reverse."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        own = name in vars(owner)
        original = getattr(owner, name)
        setattr(owner, name, make(original))
        self._undo.append(lambda: setattr(owner, name, original) if own else delattr(owner, name))

    def add(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            quietly(self._undo.pop())()
