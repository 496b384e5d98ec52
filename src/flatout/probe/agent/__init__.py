"""The doctor's agent: watches the training loop of any PyTorch script from inside its process (`flatout doctor -- …`).

Standard library only, torch taken from the script that imports it: the agent runs in any environment, with torch from
2.4 on, on Python from 3.9 on. It never prints, never changes what the script computes while it watches, and never lets
an error of its own reach the script. Its modules import each other relatively, because in the script's process the
package has a name of its own, `_flatout_agent`, and no folder of flatout is on the path there.

    warm-up      the optimizer's steps divide the time; the model is found by the parameters it steps
    timed        the training thread's time is divided into phases (by CUDA events where the work is on a GPU) and its
                 stack is sampled, so that time between the phases has a file and a line
    profiled     two steps under torch.profiler, with the places that wait for the device
    what if      only when the script is stopped anyway: its last batch is replayed with one thing changed
                 (precision, batch, no recomputation, ...), so that an estimate stands on this model and this device

The observations go to two files in the folder named by FLATOUT_AGENT: steps as lines, the rest as one JSON object.
"""

from __future__ import annotations

import os

from .agent import start

if os.environ.get("FLATOUT_AGENT") and __name__ == "_flatout_agent":
    AGENT = start()
