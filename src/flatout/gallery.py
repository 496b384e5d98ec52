"""The configurations that ship with the package: `flatout examples`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flatout.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Example:
    name: str
    path: Path

    @property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def title(self) -> str:
        """The comment in the first line."""
        return self.text.split("\n", 1)[0].lstrip("# ")


def folder() -> Path:
    """Beside this file in a wheel; in a checkout, at its root."""
    shipped = Path(__file__).parent / "examples"
    return shipped if shipped.is_dir() else Path(__file__).parents[2] / "examples"


def examples() -> list[Example]:
    found = [Example(name=path.stem, path=path) for path in folder().glob("*.yaml")]
    return sorted(found, key=lambda example: example.name)


def find(name: str) -> Example:
    known = {example.name: example for example in examples()}
    if (stem := name.removesuffix(".yaml")) not in known:
        raise UsageError(f"there is no example {name!r}: choose one of {', '.join(known)}")
    return known[stem]
