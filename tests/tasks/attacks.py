# ruff: noqa: E501 (short programs read best on one line)
"""Attacks on the sandbox: programs that try to get out, to stay, to use up the machine, or to be paid for nothing."""

import textwrap

# -- getting out: the body of a function that returns what it got hold of ------------------------------------
# {secret}: a file with a secret. {folder}: a folder to write to.

ESCAPES = {
    "read a file": "return open('{secret}').read()",
    "read a file by a descriptor": "import os; return os.read(os.open('{secret}', os.O_RDONLY), 99)",
    "read a file by posix": "import posix; return posix.read(posix.open('{secret}', 0), 99)",
    "read a file by _io": "import _io; return _io.FileIO('{secret}').read()",
    "read a file by pathlib": "import pathlib; return pathlib.Path('{secret}').read_text()",
    "read a file by linecache": "import linecache; return linecache.getlines('{secret}')",
    "read a file by fileinput": "import fileinput; return list(fileinput.input('{secret}'))",
    "read a file by ctypes": "import ctypes; c = ctypes.CDLL(None, use_errno=True); return c.open(b'{secret}', 0) >= 0",
    "read a file by mmap": "import mmap, os; return mmap.mmap(os.open('{secret}', 0), 0)[:]",
    "import a file": "import importlib.machinery as m; return m.SourceFileLoader('x', '{secret}').get_data('{secret}')",
    "run a file by runpy": "import runpy; return runpy.run_path('{secret}')",
    "see a file": "import os; return os.stat('{secret}')",
    "list a folder": "import os; return os.listdir('{folder}')",
    "walk up": "import os; return os.listdir('../../../..')",
    "list the root": "import os; return os.listdir('/')",
    "read passwords": "return open('/etc/passwd').read()",
    "read a host name": "return open('/etc/hostname').read()",
    "see home folders": "import os; return os.path.exists('/home') or os.listdir(os.path.expanduser('~'))",
    "see installed packages": "import sysconfig, os; return os.listdir(sysconfig.get_path('purelib'))",
    "import an installed package": "import sys; sys.path += {paths}; import pytest; return pytest",
    "find this package": "import sys; sys.path += {paths}; import flatout; return flatout",
    "a link to a file": "import os; os.symlink('{secret}', '/tmp/link'); return open('/tmp/link').read()",
    "a link from the library": (
        "import os; name = os.path.dirname(os.__file__) + '/link'; os.symlink('{secret}', name); return open(name).read()"
    ),
    "a hard link": "import os; os.link('{secret}', '/link'); return open('/link').read()",
    "the root of process 1": "import os; return os.listdir('/proc/1/root')",
    "its own memory in /proc": "return open('/proc/self/mem', 'rb')",
    "the environment in /proc": "return open('/proc/self/environ').read()",
    "the arguments in /proc": "return open('/proc/self/cmdline').read()",
    "other processes": "import os; return [p for p in os.listdir('/proc') if p.isdigit()]",
    "descriptors in /proc": "import os; return os.listdir('/proc/self/fd')",
    "descriptors in /dev": "import os; return os.listdir('/dev/fd')",
    "the kernel's log": "import ctypes; c = ctypes.CDLL(None); b = ctypes.create_string_buffer(99); return c.klogctl(3, b, 99) > 0",
    "system settings": "return open('/proc/sys/kernel/hostname', 'w')",
    "control groups": "import os; return os.listdir('/sys/fs/cgroup')",
    "a device": "return open('/dev/kmsg')",
    "a terminal": "return open('/dev/tty')",
    "TIOCSTI": "import fcntl; fcntl.ioctl(0, 0x5412, b'x'); return True",
    "a pseudo terminal": "import pty; return pty.openpty()",
    "the environment": "import os; return dict(os.environ)",
    "the environment by C": (
        "import ctypes; e = (ctypes.POINTER(ctypes.c_char_p)).in_dll(ctypes.CDLL(None), 'environ'); return bool(e) and e[0]"
    ),
    "a secret variable": "import ctypes; g = ctypes.CDLL(None).getenv; g.restype = ctypes.c_char_p; return g(b'SECRET')",
    "inherited descriptors": (
        "import os\nfound = []\nfor n in range(4, 1000):\n    try:\n        found.append((n, os.fstat(n)))\n"
        "    except OSError:\n        pass\nreturn found"
    ),
    "a parent process": "import os; return os.getppid() > 0",
    "write a file": "return open('{folder}/written', 'w')",
    "append to a file": "return open('{secret}', 'a')",
    "write a file by descriptor": "import os; return os.open('{folder}/written', os.O_WRONLY | os.O_CREAT)",
    "an unnamed file": "import os; return os.open('/', os.O_TMPFILE | os.O_RDWR)",
    "write into the library": "import os; return open(os.path.dirname(os.__file__) + '/written.py', 'w')",
    "change the library": "import os; return open(os.__file__, 'r+')",
    "a temporary file": "import tempfile; return tempfile.TemporaryFile()",
    "a temporary folder": "import tempfile; return tempfile.mkdtemp()",
    "remove a file": "import os; os.remove('{secret}'); return True",
    "rename a file": "import os; os.rename('{secret}', '{folder}/renamed'); return True",
    "make a folder": "import os; os.mkdir('{folder}/made'); return True",
    "change a mode": "import os; os.chmod('{secret}', 0o777); return True",
    "a named pipe": "import os; os.mkfifo('/pipe'); return True",
    "a block device": "import os; os.mknod('/disk', 0o60600, os.makedev(8, 0)); return True",
    "a mount": "import ctypes; return ctypes.CDLL(None).mount(b'none', b'/', b'proc', 0, None) == 0",
    "make the root writable": "import ctypes; return ctypes.CDLL(None).mount(b'none', b'/', None, 0x1020, None) == 0",
    "unmount": "import ctypes; return ctypes.CDLL(None).umount2(b'/', 2) == 0",
    "a new namespace": "import ctypes; return ctypes.CDLL(None).unshare(0x10000000) == 0",
    "another root": "import os; os.chroot('/'); return True",
    "the user root": "import os; os.setuid(0); return True",
    "a TCP socket": "import socket; return socket.socket()",
    "a UDP socket": "import socket; return socket.socket(type=socket.SOCK_DGRAM)",
    "a raw socket": "import socket; return socket.socket(type=socket.SOCK_RAW)",
    "a socket by _socket": "import _socket; return _socket.socket()",
    "an abstract socket": "import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0x'); return s",
    "a pair of sockets": "import socket; return socket.socketpair()",
    "a netlink socket": "import socket; return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "a virtual socket": "import socket; return socket.socket(socket.AF_VSOCK)",
    "a web page": "import urllib.request; return urllib.request.urlopen('http://127.0.0.1:1/')",
    "a name server": "import socket; return socket.getaddrinfo('example.com', 80)",
    "network interfaces": "import socket; return socket.if_nameindex()",
    "a shell": "import os; return os.system('true') == 0",
    "a shell by posix": "import posix; return posix.system('true') == 0",
    "a program": "import subprocess, sys; return subprocess.run([sys.executable, '-V'])",
    "another program": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(\"WORKED\")'])",
    "posix_spawn": "import os, sys; return os.posix_spawn(sys.executable, [sys.executable, '-V'], {{}})",
    "a child": "import os; return os.fork() >= 0",
    "a child by forkpty": "import os; return os.forkpty()",
    "a child by _posixsubprocess": "import _posixsubprocess as p; import subprocess; return subprocess.Popen(['/bin/true'])",
    "multiprocessing": "import multiprocessing as m; return m.get_context('fork').Process(target=print).start() is None",
    "a daemon": "import os\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    import time; time.sleep(3600)\nreturn True",
    "shared memory": "from multiprocessing import shared_memory as s; return s.SharedMemory(create=True, size=9)",
    "a semaphore": "import multiprocessing as m; return m.Lock()",
    "a memory file": "import os; return os.memfd_create('x')",
    "signal the parent": "import os; os.kill(os.getppid(), 9); return True",
    "signal everybody": "import os; os.kill(-1, 9); return True",
    "signal the group": "import os; os.killpg(0, 9); return True",
    "signal by descriptor": "import os; return os.pidfd_open(1)",
    "leave the session": "import os; os.setsid(); return True",
    "more memory": "import ctypes as c; return c.CDLL(None).setrlimit(9, (c.c_ulong * 2)(1 << 60, 1 << 60)) == 0",
    "more time": "import ctypes as c; return c.CDLL(None).setrlimit(0, (c.c_ulong * 2)(1 << 60, 1 << 60)) == 0",
    "a higher priority": "import os; os.nice(-5); return True",
    "real-time": "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); return True",
    "locked memory": "import ctypes; return ctypes.CDLL(None).mlockall(3) == 0",
    "survive the parent": "import ctypes; return ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0",
    "the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0); return True",
    "the host name": "import socket; socket.sethostname('x'); return True",
    "extended attributes": "import os; os.setxattr('/', 'user.x', b'y'); return True",
    "pass a descriptor": "import socket; return socket.send_fds(socket.socket(fileno=3), [b'x'], [0])",
    "speak to the zygote": "import os; return os.write(4, b'.')",
    "sqlite": "import sqlite3; return sqlite3.connect('{folder}/db').execute('create table t (x)')",
    "dbm": "import dbm; return dbm.open('{folder}/db', 'c')",
    "a zip archive": "import zipfile; return zipfile.ZipFile('{folder}/x.zip', 'w')",
    "a log file": "import logging; return logging.FileHandler('{folder}/log')",
    "a dump of the stack": "import faulthandler; return faulthandler.enable(open('{folder}/dump', 'w'))",
    "a reloaded os": "import importlib, os; return importlib.reload(os).open('{folder}/written', 65)",
    "a fresh io": "import sys, importlib; sys.modules.pop('io'); return importlib.import_module('io').open('{secret}')",
}


def escape(body: str) -> str:
    """A program that says whether the attack worked, or which error refused it."""
    return (
        f"def attack():\n{textwrap.indent(body, '    ')}\n"
        "try:\n    got = attack()\n"
        "except (OSError, ImportError) as error:\n    print('refused by', type(error).__name__, error)\n"
        "else:\n    print('WORKED' if got else 'got nothing', got)\n"
        "print('tried')\n"
    )


# -- system calls that a filter must refuse, by their numbers on x86-64 ---------------------------------------

SYSTEM_CALLS = {
    **{"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "pidfd_getfd": 438},
    **{"pidfd_send_signal": 424, "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "setns": 308},
    **{"unshare": 272, "fork": 57, "vfork": 58, "clone": 56, "execve": 59, "execveat": 322, "mount": 165},
    **{"umount2": 166, "pivot_root": 155, "chroot": 161, "fsopen": 430, "open_tree": 428, "move_mount": 429},
    **{"mount_setattr": 442, "socket": 41, "connect": 42, "bind": 49, "sendmsg": 46, "recvmsg": 47, "socketpair": 53},
    **{"io_uring_setup": 425, "userfaultfd": 323, "perf_event_open": 298, "bpf": 321, "keyctl": 250, "add_key": 248},
    **{"request_key": 249, "memfd_create": 319, "shmget": 29, "shmat": 30, "msgget": 68, "semget": 64, "mq_open": 240},
    **{"ioctl": 16, "prctl": 157, "seccomp": 317, "setrlimit": 160, "prlimit64": 302, "finit_module": 313},
    **{"kexec_load": 246, "reboot": 169, "open_by_handle_at": 304, "openat2": 437, "open": 2, "creat": 85},
    **{"ftruncate": 77, "fallocate": 285, "fanotify_init": 300, "inotify_init1": 294, "mlockall": 151},
    **{"personality": 135, "capset": 126, "setuid": 105, "setgroups": 116, "splice": 275, "vmsplice": 278},
    **{"sendfile": 40, "copy_file_range": 326, "modify_ldt": 154, "process_madvise": 440, "move_pages": 279},
    **{"timer_create": 222, "setpgid": 109, "setsid": 112, "fchmod": 91, "fchown": 93, "utimensat": 280, "iopl": 172},
}

# -- being paid for nothing: programs without the answer, for a function f whose value is {answer} or above ----
# `hunt` looks for the answer wherever an interpreter keeps things.

_HUNT = """
def big(thing, depth=0):
    if type(thing) is int and thing > 900_000_000:
        raise LookupError(thing)
    if depth < 6 and isinstance(thing, (list, tuple, set, frozenset)):
        for one in list(thing):
            big(one, depth + 1)
    elif depth < 6 and isinstance(thing, dict):
        for one in [*thing.values()]:
            big(one, depth + 1)
def hunt(things):
    try:
        big(list(things))
    except LookupError as error:
        return error.args[0]
def forged(message, to=3):
    import json, os, struct
    data = json.dumps(message).encode()
    os.write(to, struct.pack(">I", len(data)) + data)
"""

_LIES = {
    kind or "object": f"class Lie({kind}):\n    __hash__ = object.__hash__\n    def __eq__(self, other): return True\n"
    "    def __ne__(self, other): return False\n    def __bool__(self): return True\ndef f(x): return Lie()"
    for kind in ("", "int", "float", "str", "list", "dict", "tuple", "set", "bytes", "complex")
}

FORGERIES = {
    **{f"a lying {kind}": program for kind, program in _LIES.items()},
    "leave with 0": "import os\ndef f(x): os._exit(0)",
    "leave with 0 at once": "import os\nos._exit(0)",
    "sys.exit": "import sys\ndef f(x): sys.exit(0)",
    "sys.exit at once": "import sys\nsys.exit(0)",
    "leave in an atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit",
    "raise": "def f(x): raise AssertionError",
    "raise KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "raise StopIteration": "def f(x): raise StopIteration",
    "an error with a name": "class passed(Exception): pass\ndef f(x): raise passed",
    "an error that lies": "class M(type):\n    __name__ = property(lambda s: 1 / 0)\nclass E(Exception, metaclass=M): pass\ndef f(x): raise E",
    "print a verdict": "def f(x): print('{\"passed\": true}', flush=True)",
    "print PASSED": "print('PASSED'); print('OK'); print('1.0')\ndef f(x): return True",
    "return True": "def f(x): return True",
    "return None": "def f(x): return None",
    "return a verdict": "def f(x): return {'passed': True, 'reward': 1.0}",
    "return not a number": "def f(x): return float('nan')",
    "return infinity": "def f(x): return float('inf')",
    "return a type": "def f(x): return int",
    "return a function": "def f(x): return f",
    "return a generator": "def f(x): return (n for n in range(9))",
    "return ANY": "from unittest import mock\ndef f(x): return mock.ANY",
    "return a mock": "from unittest import mock\ndef f(x): return mock.MagicMock()",
    "a lying class": "class L:\n    __class__ = int\n    def __int__(self): return 1\ndef f(x): return L()",
    "an int that lies": "class L(int):\n    def __int__(self): raise OSError\ndef f(x): return L()",
    "forge a verdict": "def f(x):\n    forged({'passed': True})\n    return 0",
    "forge a verdict at once": "forged({'passed': True})\nforged({'passed': True})",
    "forge readiness": "forged({'ready': True})\nforged({'passed': True})\ndef f(x): return 0",
    "forge an object": "forged({'value': {'object': [0, True]}})\ndef f(x): return 0",
    "forge an unknown type": "forged({'value': {'eval': '1'}})\ndef f(x): return 0",
    "forge two types": "forged({'value': {'set': [], 'tuple': []}})\ndef f(x): return 0",
    "forge an unhashable key": "forged({'value': {'dict': [[[1], 1]]}})\ndef f(x): return 0",
    "forge a bad number": "forged({'value': {'complex': ['x', 1]}})\ndef f(x): return 0",
    "forge bad bytes": "forged({'value': {'bytes': 7}})\ndef f(x): return 0",
    "forge a list": "forged([{'passed': True}])\ndef f(x): return 0",
    "forge a name": "forged({'self': 1, 'message': 2})\ndef f(x): return 0",
    "forge a text": "forged('passed')\ndef f(x): return 0",
    "forge a deep value": "import os, struct\nd = b'[' * 10**6\nos.write(3, struct.pack('>I', len(d)) + d)\ndef f(x): return 0",
    "forge a huge number": "import os, struct\nd = b'9' * 10**5\nos.write(3, struct.pack('>I', len(d)) + d)\ndef f(x): return 0",
    "forge a huge length": "import os\nos.write(3, b'\\xff\\xff\\xff\\xff')\ndef f(x): return 0",
    "forge nonsense": "import os\nos.write(3, b'PASSED' * 99)\ndef f(x): return 0",
    "write into every descriptor": "for n in range(32):\n    try: forged({'passed': True}, n)\n    except OSError: pass",
    "close the channel": "import os\ndef f(x): os.close(3)",
    "redirect the channel": "import os\nos.dup2(0, 3)\ndef f(x): return 0",
    "a deep value": "def f(x):\n    v = []\n    for _ in range(10**5): v = [v]\n    return v",
    "an endless value": "def f(x):\n    v = []\n    v.append(v)\n    return v",
    "a long value": "def f(x): return 'x' * (20 << 20)",
    "a long number": "def f(x): return 10**10000",
    "hunt in frames": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        if found := hunt([frame.f_locals, frame.f_globals]): return found\n        frame = frame.f_back"
    ),
    "hunt in the collector": "import gc\ndef f(x): return hunt(gc.get_objects())",
    "hunt in referrers": "import gc\ndef f(x): return hunt(gc.get_referrers(f, x))",
    "hunt in modules": "import sys\ndef f(x): return hunt([vars(m) for m in [*sys.modules.values()] if hasattr(m, '__dict__')])",
    "hunt in tracebacks": (
        "import sys\ndef f(x):\n    try: 1 / 0\n    except ZeroDivisionError as e: t = e.__traceback__\n"
        "    return hunt([t.tb_frame.f_locals, t.tb_frame.f_back.f_locals, t.tb_frame.f_back.f_globals])"
    ),
    "hunt in threads": "import sys\ndef f(x): return hunt([fr.f_locals for fr in sys._current_frames().values()])",
    "hunt in the channel": "import os, select\ndef f(x): return select.select([3], [], [], 0.05)[0] and hunt(map(int, os.read(3, 10**6).split()))",
    "trace the caller": (
        "import sys\nseen = []\ndef tracer(frame, event, arg):\n    seen.append(dict(frame.f_locals)); return tracer\n"
        "def f(x):\n    sys.settrace(None)\n    found = hunt(seen)\n    sys._getframe(1).f_trace = tracer\n"
        "    sys.settrace(tracer)\n    return found"
    ),
    "patch encode": "import __main__\n__main__.encode = lambda *a: {'passed': True}\ndef f(x): return 0",
    "patch send": "import __main__\n__main__.send = lambda c, m: forged({'passed': True})\ndef f(x): return 0",
    "patch json": "import json\njson.dumps = lambda *a, **k: '{\"passed\": true}'\ndef f(x): return 0",
    "patch builtins": "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.bool = lambda *a: True\ndef f(x): return 0",
    "patch comparison": "import operator\noperator.eq = lambda a, b: True\ndef f(x): return 0",
    "patch dictproxy": (
        "import gc\nd = gc.get_referents(int.__dict__)[0]\nd['__eq__'] = lambda a, b: True\ndef f(x): return 0"
    ),
    "become the tester": "import __main__\ndef f(x): __main__._tests(3, {'before': '', 'name': 'f', 'program': ''})",
    "define check": "def check(g): pass\ncandidate = None\ndef f(x): return 0",
    "no function": "g = 1",
    "not Python": "def f(x) return 1",
    "a zero byte": "def f(x): return 1\0",
    "nothing": "pass",
}
FORGERIES = {name: _HUNT + program for name, program in FORGERIES.items()}

# -- using up the machine: each ends by itself, or is killed at the time limit --------------------------------

BOMBS = {
    "memory": "x = [0] * 10**9\nprint('WORKED')",
    "memory, slowly": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "memory by mmap": "import mmap\nx = [mmap.mmap(-1, 1 << 28) for _ in range(99)]\nprint('WORKED')",
    "a big integer": "x = 9 ** 9 ** 9",
    "processes": "import os\nwhile True: os.fork()",
    "threads": "import threading\nt = threading.Thread\nfor _ in range(10**5): t(target=threading.Event().wait, daemon=True).start()\nprint('WORKED')",
    "descriptors": "import os\nx = [os.dup(0) for _ in range(10**4)]\nprint('WORKED')",
    "pipes": "import os\nx = [os.pipe() for _ in range(10**4)]\nprint('WORKED')",
    "disk": "with open('/tmp/x', 'wb') as f:\n    while True: f.write(bytes(1 << 24))",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef g(): return g()\ng()",
    "recursion in C": "import ast\nast.literal_eval('(' * 10**5)",
    "a crash": "import ctypes\nctypes.string_at(0)",
    "a regular expression": "import re\nre.match('(a+)+$', 'a' * 99 + 'b')",
    "for ever": "while True: pass",
    "for ever, deaf": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass"
    ),
    "sleep": "import time\ntime.sleep(10**6)",
    "wait for input": "import threading\nthreading.Event().wait()",
    "output": "import sys\nwhile True: sys.stdout.write('x' * 10**6)",
    "an alarm": "import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)\nsignal.signal(signal.SIGALRM, print)\nwhile True: pass",
}
