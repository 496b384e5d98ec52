"""`make test-busy`: a command three times in a row while every core is busy with something else.

    python tests/busy.py COMMAND ...

One endless loop for each core, at the command's own priority. They end with this process, whatever becomes of it.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time

TIMES = 3
PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Linux kills the loop when its parent ends, however that comes about."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    command = sys.argv[1:]
    spin = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(spin, preexec_fn=_end_with_parent) for _ in range(os.cpu_count() or 1)]
    results, code = [], 0
    try:
        for number in range(1, TIMES + 1):
            began = time.monotonic()
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            assert process.stdout is not None
            last = ""
            for line in process.stdout:
                sys.stdout.write(line)
                last = line.strip(" =\n") if re.search(r"\d (passed|failed|error)", line) else last
            code = process.wait() or code
            results.append(
                f"{number}: {last or 'no result'} (exit code {process.returncode}, {time.monotonic() - began:.0f} s)"
            )
            assert all(loop.poll() is None for loop in loops), "a busy loop ended: the machine was not busy"
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
        print("\n".join(results))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
