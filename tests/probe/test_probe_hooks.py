"""The agent is called when a module was executed, however a script comes to import it."""

import importlib
import importlib.abc
import importlib.util
import runpy
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flatout.probe.agent.hooks import ERRORS, ImportHook

VARIANTS = {
    "import": "import watched",
    "from": "from watched import inside",
    "submodule": "import watched.part",
    "from submodule": "from watched.part import deeper",
    "import_module": "import importlib; importlib.import_module('watched')",
    "__import__": "__import__('watched')",
    "looked up before": "import importlib.util as u; assert u.find_spec('watched'); import watched",
    "looked up twice": "import importlib.util as u; u.find_spec('watched'); u.find_spec('watched'); import watched",
    "submodule looked up before": "import importlib.util as u; u.find_spec('watched.part'); import watched",
    "inside a function": "def late():\n    import watched\n    return watched.inside\nassert late() == late() == 1",
    "reloaded": "import importlib, watched; importlib.reload(watched)",
    "in a thread": "import threading; t = threading.Thread(target=__import__, args=('watched',)); t.start(); t.join()",
    "by its spec": "import importlib.util as u, sys; s = u.find_spec('watched'); m = u.module_from_spec(s); "
    "sys.modules['watched'] = m; s.loader.exec_module(m)",
    "after it failed": "import builtins\nbuiltins.broken = True\ntry:\n    import watched\nexcept RuntimeError:\n    "
    "del builtins.broken\nimport watched",
}


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ImportHook, list[str]]]:
    (tmp_path / "watched").mkdir()
    broken = "import builtins\nif hasattr(builtins, 'broken'):\n    raise RuntimeError\ninside = 1\n"
    (tmp_path / "watched" / "__init__.py").write_text(broken)
    (tmp_path / "watched" / "part.py").write_text("deeper = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    found: list[str] = []
    made = ImportHook()
    made.when("watched", lambda module: found.append(f"{module.__name__} {module.inside}"))
    monkeypatch.setattr(sys, "meta_path", [made, *sys.meta_path])
    yield made, found
    for name in [name for name in sys.modules if name.split(".")[0] == "watched"]:
        del sys.modules[name]


@pytest.mark.parametrize("code", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_way_to_import_is_seen_once(code: str, hook: tuple[ImportHook, list[str]], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(code)
    runpy.run_path(str(tmp_path / "script.py"))
    assert hook[1] == ["watched 1"]
    assert ERRORS == []


def test_a_look_up_alone_is_no_import(hook: tuple[ImportHook, list[str]]) -> None:
    assert importlib.util.find_spec("watched") is not None
    assert hook[1] == []


def test_another_hook_that_asks_all_finders_does_not_go_round_in_circles(
    hook: tuple[ImportHook, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(importlib.abc.MetaPathFinder):
        asking = threading.local()

        def find_spec(self, name: str, path: object = None, target: object = None) -> object:
            if getattr(self.asking, "now", False) or name != "watched":
                return None
            self.asking.now = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.asking.now = False

    for finders in ([Other(), *sys.meta_path], [sys.meta_path[0], Other(), *sys.meta_path[1:]]):
        monkeypatch.setattr(sys, "meta_path", finders)
        sys.modules.pop("watched", None)
        hook[0].when("watched", lambda module: hook[1].append(f"{module.__name__} {module.inside}"))
        importlib.import_module("watched")
    assert hook[1] == ["watched 1", "watched 1"]
