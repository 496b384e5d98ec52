"""The run folder: what a training run leaves behind, and all that `watch`, `doctor`, `compare` and `report` read.

    config.yaml config.json plan.json hardware.json env.json     written once, atomically
    steps.jsonl events.jsonl monitor.jsonl                       appended, one line a time (rank 0)
    steps-rank00001.jsonl ...                                    the same of every other rank
    steps.rollup.jsonl                                           256 steps a line, rebuilt from steps.jsonl
    findings.json                                                the doctor's last word
    checkpoints/ profile/ trackers/ report.html                  owned by others, named here

Standard library only, so a run opens on any machine. No other module knows a file name in the folder.
"""

from flatout.record.events import Event, event_from_json, event_of
from flatout.record.outcome import Outcome, Speed, Verdict
from flatout.record.records import WARM_STEPS, Diagnosis, Finding, Sink, Span, StepExtra, StepRecord
from flatout.record.redact import redact, redact_command, redacted
from flatout.record.rollup import LARGEST_LOSS, Rollup
from flatout.record.run import Recorder, Run
from flatout.record.schemas import GPU_NUMBERS

__all__ = [
    "GPU_NUMBERS",
    "LARGEST_LOSS",
    "WARM_STEPS",
    "Diagnosis",
    "Event",
    "Finding",
    "Outcome",
    "Recorder",
    "Rollup",
    "Run",
    "Sink",
    "Span",
    "Speed",
    "StepExtra",
    "StepRecord",
    "Verdict",
    "event_from_json",
    "event_of",
    "redact",
    "redact_command",
    "redacted",
]
