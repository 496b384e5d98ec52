"""The sandbox keeps programs in, ends all they start, and pays only right answers. Without the kernel it refuses."""

import ast
import ctypes
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.tasks import attacks
from tests.waiting import HANG_S

import flatout
from flatout.errors import EnvironmentLacks, RunFailed
from flatout.tasks import sandbox
from flatout.tasks.code import Problem
from flatout.tasks.sandbox import Call, Sandbox, Stopped, agent, client, same_output

pytestmark = pytest.mark.usefixtures("sandboxed")

SECRET = "the-secret-of-this-machine"
ANSWER = 918_273_645
HONEST = f"def f(x): return {ANSWER} + x"
CALLS = Problem(name="f", calls=[Call(args=(n,), value=ANSWER + n) for n in (2, 3)])
TESTS = Problem(
    name="f",
    tests=f"def check(g):\n    for n in (2, 3):\n        assert g(n) == {ANSWER} + n\n    assert not g(0) != {ANSWER}\n"
    "check(f)\n",
)
OUTPUTS = Problem(name="", outputs=[(f"{n}\n", f"{ANSWER + n}\n") for n in (2, 3)])


def later() -> float:
    return time.monotonic() + HANG_S


def value(box: Sandbox, program: str, name: str, *args: object, end: float) -> object:
    """What a function returns, as data."""
    with box._run(end, mode="calls", program=program) as run:
        run.send(agent.call(name, args, {}))
        return agent.decode(run.receive()["value"])


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    os.environ["SECRET"] = SECRET
    try:
        sandbox.check()
        client.prepare()
        yield client.shared()
    finally:
        del os.environ["SECRET"]
        client.shared().close()
        client._shared = None


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside")
    os.chmod(folder, 0o777)
    (folder / "secret").write_text(SECRET)
    return folder


def settled(box: Sandbox) -> bool:
    """Whether only the zygote is left, in the end: it does not wait for a time, but for the processes."""
    end = later()
    while time.monotonic() < end:
        if len(psutil.Process(box.process.pid).children(recursive=True)) == 1:
            return True
        time.sleep(0.002)
    return False


def test_the_page_counts_the_attacks() -> None:
    count = sum(map(len, (attacks.ESCAPES, attacks.SYSTEM_CALLS, attacks.FORGERIES, attacks.BOMBS)))
    assert f"{count} attacks" in (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text()


def test_nothing_else_in_the_package_runs_text() -> None:
    root = Path(flatout.__file__).parent
    running = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("exec", "eval", "compile")
    }
    assert running == {"tasks/sandbox/agent.py"}


# -- getting out --------------------------------------------------------------------------------------------


def dressed(body: str, outside: Path) -> str:
    paths = [path for path in sys.path if path]
    return attacks.escape(body.format(secret=outside / "secret", folder=outside, paths=paths))


@pytest.mark.parametrize("name", attacks.ESCAPES)
def test_a_program_cannot_get_out(name: str, box: Sandbox, outside: Path) -> None:
    said = box.output(dressed(attacks.ESCAPES[name], outside), "", end=later())
    assert said.endswith("tried\n"), said  # it came that far
    assert "WORKED" not in said
    assert SECRET not in said
    assert (outside / "secret").read_text() == SECRET
    assert os.listdir(outside) == ["secret"]


def test_the_same_attacks_work_outside(outside: Path) -> None:
    """The programs are not refused for their own mistakes."""
    names = ["read a file", "read a file by ctypes", "list a folder", "a TCP socket", "a pair of sockets", "a shell"]
    names += [
        "a memory file",
        "other processes",
        "the environment",
        "see a file",
        "a parent process",
        "leave the session",
    ]
    for name in names:
        said = subprocess.run(
            [sys.executable, "-c", dressed(attacks.ESCAPES[name], outside)],
            capture_output=True,
            text=True,
            env={"SECRET": SECRET},
            start_new_session=name != "leave the session",
        )
        assert "WORKED" in said.stdout, (name, said)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")
def test_system_calls_are_refused_by_the_filter(box: Sandbox) -> None:
    program = (
        "import ctypes, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def f(number):\n    ctypes.set_errno(0)\n"
        "    return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 6), ctypes.get_errno()\n"
    )
    calls = {name: Call(args=(number,), value=(-1, 1)) for name, number in attacks.SYSTEM_CALLS.items()}
    opened = [name for name, call in calls.items() if not box.returns(program, "f", [call], end=later())]
    assert opened == []
    assert value(box, program, "f", 39, end=later()) == (1, 0)  # getpid is allowed
    assert value(box, program, "f", 435, end=later()) == (-1, 38)  # clone3 does not exist, so clone is used


def test_the_program_is_process_1_and_nobody(box: Sandbox) -> None:
    program = "import os\ndef f(): return os.getpid(), os.getuid(), dict(os.environ), os.getcwd()"
    assert value(box, program, "f", end=later()) == (1, agent.NOBODY, {}, "/")


def test_runs_share_nothing(box: Sandbox) -> None:
    program = "import math\nold = math.pi\nmath.pi = 3\ndef f(): return old"
    assert value(box, program, "f", end=later()) == value(box, program, "f", end=later()) != 3


# -- being paid for nothing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [CALLS, TESTS, OUTPUTS], ids=["calls", "tests", "outputs"])
def test_a_right_answer_is_paid_however_it_is_dressed(problem: Problem, box: Sandbox) -> None:
    printed = "\nif __name__ == '__main__': print(f(int(input())))"
    assert problem.reward(f"```python\n{HONEST}{printed}\n```", wall_s=HANG_S) == 1.0
    assert problem.reward(f"```python\n{HONEST.replace('+', '-')}{printed}\n```", wall_s=HANG_S) == 0.0


@pytest.mark.parametrize("name", attacks.FORGERIES)
def test_a_verdict_cannot_be_forged(name: str, box: Sandbox) -> None:
    program = attacks.FORGERIES[name]
    for problem in (CALLS, TESTS):
        assert problem.reward(program, wall_s=HANG_S) == 0.0
    assert OUTPUTS.reward(f"{program}\nprint(f(int(input())))", wall_s=HANG_S) == 0.0


def test_an_honest_subclass_is_data(box: Sandbox) -> None:
    program = (
        "from collections import Counter, namedtuple\nfrom enum import IntEnum\n"
        "class E(IntEnum):\n    A = 7\nP = namedtuple('P', 'x y')\n"
        "def f(): return [Counter('aab'), P(1, E.A), {1: {2}}, frozenset([3]), 4j, b'5', None, True, 1.5, int]"
    )
    want = [{"a": 2, "b": 1}, (1, 7), {1: {2}}, frozenset([3]), 4j, b"5", None, True, 1.5, int]
    got = value(box, program, "f", end=later())
    assert got == want
    assert [type(one) for one in got] == [type(one) for one in want]


def test_tests_see_errors_methods_and_truth(box: Sandbox) -> None:
    program = (
        "import re\nclass S:\n    def find(self, text): return re.search('a', text)\n"
        "    def fail(self): raise KeyError('k')"
    )
    tests = (
        "s = S()\nassert s.find('bab')\nassert not s.find('b')\n"
        "try:\n    s.fail()\nexcept KeyError:\n    pass\nelse:\n    raise AssertionError"
    )
    assert box.passes(program, "S", tests, end=later())
    assert not box.passes(program, "S", tests + "\nassert s.find('b')", end=later())


@pytest.mark.parametrize(
    ("got", "want", "same"),
    [
        ("1 2\n3\n", "1 2 \n3", True),
        ("0.1234567\n", "0.12345671", True),
        ("0.1234\n", "0.1235", False),
        ("3.0", "3", True),
        ("12345678901234567890", "12345678901234567891", False),
        ("1000000", "1000001", False),
        ("yes", "no", False),
        ("nan", "1", False),
        ("inf", "1e400", False),
        ("1\n2", "1 2", False),
        ("", "1", False),
    ],
)
def test_outputs_are_compared_by_line_and_number(got: str, want: str, same: bool) -> None:
    assert same_output(got, want) is same


def test_a_crash_is_no_empty_output(box: Sandbox) -> None:
    assert not same_output(box.output("1 / 0", "", end=later()), "")


# -- using up the machine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", attacks.BOMBS)
def test_a_bomb_ends_and_nothing_stays(name: str, box: Sandbox) -> None:
    """The limit is short, and it does not matter whether the bomb or the limit comes first."""
    try:
        said = box.output(attacks.BOMBS[name], "", end=time.monotonic() + 0.5)
    except Stopped as error:
        said = str(error)
    assert "WORKED" not in said
    assert settled(box)
    assert value(box, "def f(): return 1", "f", end=later()) == 1


def test_threads_are_allowed_up_to_a_number(box: Sandbox) -> None:
    """Their stacks are the smallest that every machine allows, so that it is not the memory that limits them."""
    program = (
        "import _thread\n_thread.stack_size(1 << 18)\nlock = _thread.allocate_lock()\nlock.acquire()\n"
        "def f():\n    for n in range(1000):\n"
        "        try: _thread.start_new_thread(lock.acquire, ())\n        except RuntimeError: return n\n"
    )
    started = value(box, program, "f", end=later())
    assert isinstance(started, int)
    assert 8 <= started <= agent.THREADS


def test_a_client_that_dies_ends_its_run(box: Sandbox) -> None:
    child = os.fork()
    if child == 0:
        try:
            with box._run(later(), mode="output", program="while True: pass", stdin=""):
                os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert settled(box)


def test_the_end_of_a_sandbox_ends_its_runs() -> None:
    box = Sandbox()
    with box._run(later(), mode="output", program="while True: pass", stdin=""):
        inside = psutil.Process(box.process.pid).children(recursive=True)
        box.close()
        _, alive = psutil.wait_procs(inside, timeout=HANG_S)
    assert len(inside) >= 3
    assert alive == []


@pytest.mark.parametrize("ancestor", ["agent", "zygote", "watcher"])
def test_a_run_dies_with_each_of_its_ancestors(ancestor: str) -> None:
    with Sandbox() as box, box._run(later(), mode="output", program="while True: pass", stdin=""):
        inside = psutil.Process(box.process.pid).children(recursive=True)  # by depth
        {"agent": box.process, "zygote": inside[0], "watcher": inside[1]}[ancestor].kill()
        _, alive = psutil.wait_procs(inside if ancestor != "watcher" else inside[1:], timeout=HANG_S)
    assert len(inside) == 3
    assert alive == []


def test_a_sandbox_that_was_killed_is_an_error_and_is_replaced(box: Sandbox) -> None:
    one = Sandbox()
    for process in psutil.Process(one.process.pid).children():
        process.kill()
    one.process.wait()
    with pytest.raises(RunFailed, match="sandbox"):
        value(one, "def f(): return 1", "f", end=later())
    one.close()
    before, client._shared = client._shared, one
    try:
        client.prepare()
        assert client.shared().alive
        assert client.shared() is not one
        client.shared().close()
    finally:
        client._shared = before


# -- a kernel that cannot -----------------------------------------------------------------------------------


def _refuse(number: int, errno: int) -> None:
    """A seccomp filter of this process and its children: one system call fails."""
    import struct

    code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno), (0x06, 0, 0, 0x7FFF0000)]
    buffer = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))) == 0


def _in_child(work: object, *, user: int | None = None) -> str:
    """What `check` says in a child after `work`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if user is not None:
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
            work()  # type: ignore[operator]
            sandbox.check()
            os.write(writing, b"works")
        except EnvironmentLacks as error:
            os.write(writing, f"exit {error.exit_code}: {error}".encode())
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")
@pytest.mark.parametrize(
    ("number", "errno", "named"),
    [
        (272, 1, "user namespaces (Operation not permitted)"),
        (272, 28, "user namespaces (No space left on device)"),
        (165, 1, "mounts (Operation not permitted)"),
        (155, 22, "a change of the root (Invalid argument)"),
        (442, 38, "a read-only root (Function not implemented)"),
        (444, 38, "Landlock (Function not implemented)"),
        (444, 95, "Landlock (Operation not supported)"),
        (126, 1, "no capabilities"),
    ],
)
def test_a_kernel_that_refuses_is_named_and_nothing_runs(number: int, errno: int, named: str) -> None:
    said = _in_child(lambda: _refuse(number, errno))
    assert said.startswith("exit 3: ")
    assert named in said
    assert "choose another task" in said


def test_an_ordinary_user_has_the_same_sandbox() -> None:
    for python in (sys.executable, "/usr/bin/python3"):
        said = _in_child(lambda python=python: setattr(sys, "executable", python), user=None if os.geteuid() else 12345)
        if said == "works":
            return
        # Root's own Python may be in a folder that others cannot enter.
        assert "a Python that starts" in said or "cannot be started" in said, said
    pytest.skip("no Python here can be started by another user")


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(EnvironmentLacks, match="lacks Linux"):
        sandbox.check()


def test_an_open_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_PROBE", client._PROBE.replace('"/etc"', "os.path.dirname(os.__file__)"))
    with pytest.raises(EnvironmentLacks, match="files can be read"):
        sandbox.check()
