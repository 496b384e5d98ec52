"""Attacks the command from outside with files, options and requests that nobody means well with.

    python -m tests.attack --trials 2000 --seed 1
    python -m tests.attack --seed 1 --one paths/17

The first runs so many trials and prints what failed, each with its commands and the folder that is kept; the second
repeats one of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="trials at the same time")
    parser.add_argument("--kinds", help="only these kinds, comma-separated")
    parser.add_argument("--one", help="repeat one trial, KIND/NUMBER, and keep its folder")
    parser.add_argument("--folder", type=Path, default=Path("attacks"), help="where the trials work")
    given = parser.parse_args()
    # Not above: each process of a trial imports this module again.
    from tests.attacks.campaign import campaign, report

    found = campaign(
        folder=given.folder.absolute(),
        trials=given.trials,
        seed=given.seed,
        jobs=given.jobs,
        kinds=given.kinds.split(",") if given.kinds else None,
        one=given.one,
        progress=lambda text: print(text, flush=True),
    )
    print(report(found, seed=given.seed))
    return 1 if any(result.faults for result in found) else 0


if __name__ == "__main__":
    sys.exit(main())
