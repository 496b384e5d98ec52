"""Errors a user can act on, each with the exit code the shell sees.

A message names the value, the rule and the way out. The command prints it without a traceback;
any other exception is a bug in flatout and keeps its traceback.
"""

PREEMPTED_EXIT = 75
INTERRUPTED_EXIT = 130


def first_line(error: BaseException) -> str:
    """The first line of another library's error, or its type if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class FlatoutError(Exception):
    """Base of every error whose message is meant for the user."""

    exit_code = 1


class UsageError(FlatoutError):
    """Bad usage, configuration or input data: the user must change the request."""

    exit_code = 2


class Unsupported(UsageError):
    """A model that flatout's decoder cannot run; transformers may."""


class EnvironmentLacks(FlatoutError):
    """The machine lacks something (a package, disk space, a GPU build); the message names it and how to get it."""

    exit_code = 3


class RunFailed(FlatoutError):
    """The run itself failed (non-finite loss, lost data): the cause and its evidence are in the message."""

    exit_code = 4
