"""Takes the place of a worker process and passes its requests to an actor that Ray places on any machine.

`workers.Worker` starts it where FLATOUT_GRADERS is `ray`, as `flatout launch --on ray` sets it. To Ray, requests and
replies are bytes. The actor has a worker of its own, and both end with the process that asked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from flatout.files import own_environment, own_python
from flatout.tasks import workers


class Served:
    """The actor: a worker process on the machine where Ray placed it."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            own_python("flatout.tasks.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=own_environment() | variables,
        )

    def exchanged(self, request: bytes) -> bytes:
        """Sends a request, if there is one, and returns the next line of the worker; nothing if it has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(request)
        self.process.stdin.flush()
        return self.process.stdout.readline(workers.REPLY_BYTES + 1)


def main() -> None:
    import ray

    from flatout.tasks.on_ray import Served  # not of __main__, which Ray would send as code

    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nothing, standard)
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, configure_logging=False)
    kind: Any = ray.remote(Served)
    # A grader is idle most of the time, so it reserves no CPU.
    given = {name: os.environ[name] for name in sys.argv[1:] if name in os.environ}
    actor = kind.options(num_cpus=0, max_restarts=0, scheduling_strategy="SPREAD").remote(given)
    for request in requests:
        more = True
        while more:
            reply: bytes = ray.get(actor.exchanged.remote(request))
            if not reply:
                sys.exit("the worker process of a Ray actor has ended")
            # This announces that the reply takes longer than usual.
            request, more = b"", "needs_s" in json.loads(reply)
            replies.write(reply)
            replies.flush()


if __name__ == "__main__":
    main()
