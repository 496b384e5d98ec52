"""Starts `flatout train` on several ranks: on this machine, by torchrun, on Ray or on SLURM. Torch is not imported."""

from flatout.launch.job import Job, exit_code_of

__all__ = ["Job", "exit_code_of"]
