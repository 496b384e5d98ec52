"""A watched script stays the script it was: its output, its exit code, its signals; and its secrets stay its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from doctoring import SRC, doctor, environment
from tests.waiting import HANG_S

TRAINS = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAINS + text)
    return str(path)


@pytest.mark.long
def test_continue_keeps_output_and_exit_code(tmp_path: Path) -> None:
    """Binary on stdout, forked loader workers, and an exit code of its own."""
    name = script(
        tmp_path,
        """
import sys
from torch.utils.data import DataLoader
for batch in DataLoader(range(64), batch_size=8, num_workers=2):
    sys.stdout.buffer.write(bytes(range(256)))
    train(4)
sys.stdout.buffer.write(b"\\xff\\x00end")
sys.stdout.flush()
sys.stderr.write("own words\\n")
sys.exit(7)
""",
    )
    plain = subprocess.run([sys.executable, name], capture_output=True, check=False)
    watched = doctor(*("--then", "continue", "--run", str(tmp_path / "run"), "--", sys.executable, name))
    assert watched.returncode == plain.returncode == 7
    assert watched.stdout == plain.stdout
    assert watched.stderr.startswith(plain.stderr)
    assert b"Doctor" in watched.stderr


@pytest.mark.long
def test_a_script_that_looks_torch_up_before_it_imports_it_is_seen(tmp_path: Path) -> None:
    """As transformers and datasets do, to know whether it is installed."""
    name = script(tmp_path, "train(40)\n")
    looks = "import importlib.util\nassert importlib.util.find_spec('torch') is not None\n"
    Path(name).write_text(looks + Path(name).read_text())
    watched = doctor(*("--steps", "8", "--run", str(tmp_path / "run"), "--", sys.executable, name))
    assert watched.returncode == 0, watched.stderr.decode()
    assert (tmp_path / "run" / "steps.jsonl").read_text().splitlines()


def test_an_interrupt_reaches_the_script_and_its_answer_counts(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        """
import sys, time
train(3)
try:
    print("ready", flush=True)
    while True:
        train(1)
        time.sleep(0.01)
except KeyboardInterrupt:
    print("saved", flush=True)
    sys.exit(9)
""",
    )
    command = [sys.executable, "-m", "flatout", "doctor", "--then", "continue", "--run", str(tmp_path / "run")]
    process = subprocess.Popen(
        [*command, "--", sys.executable, name], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=HANG_S)
    assert out == b"saved\n"
    assert process.returncode == 9


def test_a_crash_is_the_scripts_own(tmp_path: Path) -> None:
    name = script(tmp_path, "train(4)\nraise ValueError('the data has no column text')\n")
    done = doctor("--run", str(tmp_path / "run"), "--", sys.executable, name)
    assert done.returncode == 4
    assert b"the script itself failed, with exit code 1" in done.stderr
    assert b"ValueError: the data has no column text" in done.stderr.splitlines()[-1]


def test_a_command_that_never_trains_says_so(tmp_path: Path) -> None:
    done = doctor("--run", str(tmp_path / "run"), "--", sys.executable, "-c", "print('hello')")
    assert done.returncode == 4
    assert done.stdout.startswith(b"hello\n")
    assert b"no optimizer step was observed" in done.stderr


def test_stopping_is_clean_and_json_on_stdout_alone_there(tmp_path: Path) -> None:
    """The script's own clean-up runs, its end is no error, and what it prints goes to stderr."""
    name = script(
        tmp_path,
        """
import atexit
atexit.register(lambda: print("cleaned up", flush=True))
print("chatter", flush=True)
try:
    train(100000)
finally:
    print("closed", flush=True)
""",
    )
    arguments = ("--steps", "10", "--window", "4", "--run", str(tmp_path / "run"), "--json", "-")
    done = doctor(*arguments, "--", sys.executable, name)
    assert done.returncode == 0, done.stderr
    assert b"chatter\nclosed\ncleaned up\n" in done.stderr
    found = json.loads(done.stdout)
    assert {"verdict", "limit", "findings"} <= found.keys()


@pytest.mark.long
def test_a_sitecustomize_of_the_users_own_still_runs(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins\nbuiltins.theirs = 'here'\n")
    name = script(
        tmp_path, "import builtins, sys\nprint(builtins.theirs, [p for p in sys.path if 'inject' in p])\ntrain(12)\n"
    )
    env = environment(PYTHONPATH=os.pathsep.join((str(tmp_path / "own"), str(SRC))))
    done = doctor("--then", "continue", "--run", str(tmp_path / "run"), "--", sys.executable, name, env=env)
    assert done.returncode == 0
    assert done.stdout == b"here []\n"


def test_secrets_reach_no_record_and_no_output(tmp_path: Path) -> None:
    secrets = {
        "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
        "HF_TOKEN": "hf_" + "S3cretS3cretS3cretS3cret",
        "MY_PASSWORD": "correct-horse-battery",
    }
    name = script(
        tmp_path, "import os\ntrain(12)\nraise RuntimeError('login with ' + ' '.join(os.environ[k] for k in KEYS))\n"
    )
    Path(name).write_text(Path(name).read_text().replace("KEYS", repr(list(secrets))))
    flags = ("--api-key", "sk-flagflagflagflagflag", "https://me:p4ssw0rdp4ss@example.org/x")
    done = doctor(
        *("--steps", "100", "--json", str(tmp_path / "found.json"), "--run", str(tmp_path / "run")),
        *("--", sys.executable, name, *flags),
        env=environment(**secrets),
    )
    assert done.returncode == 4
    sentinels = [*secrets.values(), "sk-flagflagflagflagflag", "p4ssw0rdp4ss"]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()] + [tmp_path / "found.json"]
    assert len(files) >= 6
    for path in files:
        assert not [s for s in sentinels if s in path.read_text(errors="replace")], path
    # The script prints its own traceback itself; what the doctor adds to it is masked.
    added = done.stderr.decode().split("the script itself failed", 1)[1]
    assert not [s for s in sentinels if s in added + done.stdout.decode()]
    assert "RuntimeError: login with ***" in added


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--then", "pause", "--", "python"), "must be stop or continue"),
        (("--steps", "2", "--", "python"), "too few"),
        ((), "needs something to diagnose"),
        (("--", "no-such-program"), "is neither a run folder nor a command"),
        (("--", __file__), "cannot be run: Permission denied"),
    ],
)
def test_wrong_usage_is_told_without_a_traceback(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = doctor("--run", str(tmp_path / "run"), *arguments)
    assert done.returncode == 2
    assert said in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
