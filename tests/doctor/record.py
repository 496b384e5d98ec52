"""Records what the agent sees of the scripts, for `test_doctor_scripts.py`.

    make record-doctor                                              every script
    make record-doctor SCRIPTS="plain_float64.py two_padding_and_evaluation.py"

Do it on a machine with nothing else to do, for the numbers are measured. All that the rules read goes to
`facts/SCRIPT.json` as it came: steps and facts of every rank, the monitor's samples, the hardware. Only the names of
folders are replaced.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from doctoring import SCRIPTS, SHARED, command_of, steps_of

from flatout.hardware import Hardware, detect
from flatout.insight.attach import Asked, Rank, Watched, watch
from flatout.insight.diagnose import diagnose
from flatout.insight.diagnose.observed import Observed
from flatout.insight.doctor import observed

FACTS = SCRIPTS.parent / "facts"


def record(script: str) -> Path:
    watched = watch(command_of(script), asked=Asked(steps=steps_of(script), seconds=5.0, quiet=True))
    assert watched.facts is not None, f"{script} did not train: {watched.crash}"
    kept: dict[str, Any] = {
        "cpus": os.cpu_count(),
        "hardware": detect().to_json(),
        "returncode": watched.returncode,
        "stopped": watched.stopped,
        "crash": watched.crash,
        "samples": watched.samples,
    }
    for number, rank in sorted(watched.ranks.items()):
        kept |= {f"facts-{number}": rank.facts, f"steps-{number}": rank.steps}
    text = "{\n" + ",\n".join(f'"{name}": {json.dumps(value)}' for name, value in kept.items()) + "\n}\n"
    for folder, name in ((str(SCRIPTS), "/scripts"), (sys.prefix, "/env"), (tempfile.gettempdir(), "/tmp")):
        text = text.replace(folder, name)
    path = FACTS / f"{Path(script).stem}.json"
    path.write_text(text)
    return path


def recorded(script: str) -> tuple[Observed, int]:
    """What was recorded, as the rules read it, and the number of cores of the machine it was recorded on."""
    kept = json.loads((FACTS / f"{Path(script).stem}.json").read_text())
    numbers = [int(name.removeprefix("facts-")) for name in kept if name.startswith("facts-")]
    ranks = {number: Rank(facts=kept[f"facts-{number}"], steps=kept[f"steps-{number}"]) for number in numbers}
    watched = Watched(
        returncode=kept["returncode"],
        stopped=kept["stopped"],
        facts=ranks[0].facts,
        steps=ranks[0].steps,
        samples=kept["samples"],
        crash=kept["crash"],
        ranks=ranks,
    )
    seen = observed(watched, hardware=Hardware.from_json(kept["hardware"]))
    assert seen is not None, f"too few steps were recorded: record {script} again"
    return seen, kept["cpus"]


def main() -> None:
    os.chdir(SCRIPTS)
    for name in ("OMP_NUM_THREADS", "PYTHONPATH"):
        os.environ.pop(name, None)
    for script in sys.argv[1:] or sorted(path.name for path in SCRIPTS.glob("*.py") if path.name not in SHARED):
        path = record(script)
        print(f"{path.name}: {diagnose(recorded(script)[0]).verdict}", flush=True)


if __name__ == "__main__":
    main()
