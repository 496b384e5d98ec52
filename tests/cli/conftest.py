from tests.command import flatout

__all__ = ["flatout"]
