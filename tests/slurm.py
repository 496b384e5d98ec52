"""A SLURM cluster of one node for a test: munged, slurmctld and slurmd of this machine on the loopback device.

Needs root, and Debian's packages `slurm-wlm` and `munge`. Everything it writes lies in one folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import wait_until

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={node}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1
FirstJobId={first}
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why no cluster can be started here; None: it can."""
    if os.getuid() != 0:
        return "needs root"
    tools = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
    absent = [tool for tool in tools if shutil.which(tool) is None]
    return f"needs {', '.join(absent)}: Debian's slurm-wlm and munge" if absent else None


def _free_ports() -> list[int]:
    sockets = [socket.socket(), socket.socket()]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """The environment in which `sbatch` and the others speak to the cluster."""
    daemons: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder, ports = Path(name), _free_ports()
        for part in ("state", "spool"):
            (folder / part).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        host = socket.gethostname().partition(".")[0]
        # Jobs of two clusters on one machine have different ids: their ports follow from them.
        names = {"host": host, "folder": folder, "cpus": os.cpu_count(), "first": 1 + secrets.randbelow(10**6)}
        conf = CONF.format(**names, control=ports[0], node=ports[1])
        (folder / "slurm.conf").write_text(conf)
        environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

        def started(*command: str) -> None:
            with (folder / "said").open("ab") as said:
                daemons.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said))

        files = {"key-file": key, "socket": folder / "munge.sock", "pid-file": folder / "munged.pid"}
        files |= {"log-file": folder / "munged.log", "seed-file": folder / "munged.seed"}
        try:
            started("munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items()))
            wait_until(lambda: (folder / "munge.sock").exists(), process=daemons[0])
            started("slurmctld", "-D")
            started("slurmd", "-D")

            def idle() -> bool:
                done = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True)
                return done.stdout.strip() == "idle"

            wait_until(idle, process=daemons[-1])
            yield environment
        finally:
            subprocess.run(["scancel", "--user=root"], env=environment, capture_output=True)
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait()
