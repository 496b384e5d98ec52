"""Generated questions in five reasoning domains, each in five levels; standard library only."""

from flatout.tasks.domains.generated import DOMAINS, LEVELS, Generated

__all__ = ["DOMAINS", "LEVELS", "Generated"]
