"""A sandbox for programs that a model has written. It is enforced by the kernel, or there is none."""

from flatout.tasks.sandbox.client import Call, Sandbox, Stopped, check, prepare, same_output, shared

__all__ = ["Call", "Sandbox", "Stopped", "check", "prepare", "same_output", "shared"]
