"""The run folder: what a training run writes, and the only input of `watch`, `doctor` and `report`.

    config.yaml config.json plan.json hardware.json env.json     written once, atomically
    steps.jsonl events.jsonl monitor.jsonl                       appended line by line (rank 0)
    steps-rank00001.jsonl ...                                    the same for every other rank
    steps.rollup.jsonl                                           256 steps per line, rebuilt from steps.jsonl
    findings.json                                                the doctor's latest diagnosis
    checkpoints/ profile/ trackers/ report.html                  written by other modules, named here

Standard library only, so a run opens on any machine. Only this package knows the file names in the folder.
"""

from flatout.record import rollouts as rollouts  # their events are registered by importing them
from flatout.record import routed as routed
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
