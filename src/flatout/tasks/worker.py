"""The process behind `workers.Worker`: reads requests, forks a child for each, and kills it at its time limit.

A request may have several lists of arguments. One child works on them in turn, each within the time limit. If it is
killed, another child goes on with the next. Computer algebra and programs get a child for each.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from flatout.errors import FlatoutError, first_line
from flatout.tasks import grade, workers
from flatout.tasks.base import Measured, Task, Texts
from flatout.tasks.specs import open_task

MEMORY_BYTES = 4 << 30

_tasks: dict[str, Task] = {}


def _task(spec: str) -> Task:
    if spec not in _tasks:
        task = open_task(spec)
        if isinstance(task, Texts):
            raise ValueError(f"{spec} has no questions")
        task.prompt(0)  # work that a task does once is done before the forks
        _tasks[spec] = task
    return _tasks[spec]


def _reward(spec: str, i: int, completion: str) -> dict[str, Any]:
    task, began = _task(spec), time.monotonic()
    reward, answered = task.reward(i, completion), task.answer(completion) is not None
    measures = task.measures(i, completion) if isinstance(task, Measured) else {}
    return {"reward": reward, "answered": answered, "seconds": time.monotonic() - began, "measures": measures}


def _probe(spec: str) -> dict[str, Any]:
    """A request that any working grader can answer."""
    if getattr(_task(spec), "maths", False) and grade.has_maths():
        grade.verify("2x", "x+x")
    if (probe := getattr(_task(spec), "probe", None)) is not None:
        probe()
    judged = getattr(_task(spec), "judge", None) is not None  # it has just been asked
    return _reward(spec, 0, "" if judged else "<answer>1</answer>")


def _prepare_reward(spec: str, *_: Any) -> float | None:
    task = _task(spec)
    if getattr(task, "maths", False):
        grade.warm_maths()
    getattr(task, "prepare", lambda: None)()
    return getattr(task, "timeout_s", None)


def _apart(spec: str, *_: Any) -> bool:
    """Whether each completion needs a child of its own, because more than our own comparisons touch it."""
    task = _task(spec)
    return (getattr(task, "maths", False) and grade.has_maths()) or getattr(task, "timeout_s", None) is not None


def _prepare_maths(*_: Any) -> None:
    grade.warm_maths()


# Each operation, with the work to do once before the fork, which gives the time limit if the usual one is too short.
OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., float | None]]] = {
    "reward": (_reward, _prepare_reward),
    "probe": (_probe, _prepare_reward),
    "maths": (grade.verify, _prepare_maths),
}


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    for line in requests:
        try:
            request = json.loads(line)
            work, prepare = OPERATIONS[request["op"]]
            timeout_s, needs_s = request["timeout_s"], prepare(*request["several"][0])
            if needs_s is not None and needs_s > timeout_s:
                timeout_s = min(needs_s, workers.LONGEST_S)
                replies.write(json.dumps({"needs_s": timeout_s}).encode() + b"\n")
                replies.flush()
            together = 1 if work is not _reward or _apart(*request["several"][0]) else len(request["several"])
            found = _forked(work, request["several"], timeout_s=timeout_s, together=together)
            reply: dict[str, Any] = {"replies": found}
        except Exception as error:  # a fault of the task or its library, not of the completion: nothing can be graded
            reply = {"error": f"{type(error).__name__}: {error}"[: workers.WORDS_BYTES]}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _forked(work: Callable[..., Any], several: list[list[Any]], *, timeout_s: float, together: int) -> list[Any]:
    """The results of forked children, which have ended when this returns. Each works on up to `together`."""
    found: list[Any] = []
    while len(found) < len(several):
        found += _of_child(work, several[len(found) : len(found) + together], timeout_s=timeout_s)
    return found


def _of_child(work: Callable[..., Any], several: list[list[Any]], *, timeout_s: float) -> list[Any]:
    """What one child replies, up to and including the first arguments that end it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(work, several, writing, timeout_s=timeout_s)
    os.close(writing)
    found, unread, end = list[Any](), b"", time.monotonic() + timeout_s
    try:
        while len(found) < len(several) and select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]:
            part = os.read(reading, 1 << 16)
            if not part or len(unread) > workers.REPLY_BYTES // 2:
                break
            *lines, unread = (unread + part).split(b"\n")
            if lines:
                found += map(json.loads, lines)
                end = time.monotonic() + timeout_s
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return found if len(found) == len(several) else [*found, {"killed": True}]


def _child(work: Callable[..., Any], several: list[list[Any]], writing: int, *, timeout_s: float) -> None:
    words = os.dup(2)
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 2)
        workers.KILLABLE = True
        seconds = (int(timeout_s) + 1) * len(several)
        for limit, wanted in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CPU, seconds)):
            most = resource.getrlimit(limit)[1]  # an existing limit cannot be raised
            allowed = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
            resource.setrlimit(limit, (allowed, allowed))
        for arguments in several:
            try:
                reply = {"result": work(*arguments)}
            except FlatoutError as error:  # of the grader, not of the completion
                reply = {"error": str(error)[: workers.WORDS_BYTES]}
            os.write(writing, json.dumps(reply).encode() + b"\n")
    except BaseException as error:
        # One line for the error message if nothing can be graded at all.
        os.write(words, f"{type(error).__name__}: {first_line(error)[:200]}\n".encode(errors="replace"))
    finally:
        os._exit(0)


def main() -> None:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Output of libraries must not mix with replies. Stderr stays, for the error of a worker that dies.
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nothing, standard)
    sys.setrecursionlimit(2000)
    workers.SERVING = True
    serve(requests, replies)


if __name__ == "__main__":
    main()
