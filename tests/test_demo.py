"""The demo's story, shortened; what it measures is shown, never asserted."""

import importlib.util
import io
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")

from rich.console import Console

from flatout import demo, gallery
from flatout.config import load
from flatout.data import embedded
from flatout.data.prepare import prepare
from flatout.errors import RunFailed, UsageError
from flatout.hardware import detect
from flatout.insight import doctor
from flatout.insight.attach import Watched
from flatout.insight.prove import Proof
from flatout.model import Decoder
from flatout.plan import job_of
from flatout.record import Run

# The job itself stays: the script has its shape written into it.
SHORT = (
    *("train.steps=6", "train.warmup_steps=2", "eval.every=6", "eval.tokens=1024", "log.every=3"),
    *("data.embedded_mb=0.3", "plan.precision=fp32"),
)


@pytest.fixture(autouse=True)
def _one_story(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "DRAWS", 1)


@pytest.fixture
def heard() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def console(heard: io.StringIO) -> Console:
    return Console(file=heard, width=160)


def slow_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slow_train", gallery.folder() / demo.SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_does_the_job_of_the_configuration() -> None:
    slow, settings = slow_script(), load(gallery.find(demo.CONFIG).path, environ={}).settings
    shape = job_of(settings, hardware=detect(), num_ranks=1).shape
    sizes = [sum(p.numel() for p in model.parameters()) for model in (slow.Decoder(), Decoder(shape))]
    assert sizes[0] == sizes[1]
    assert (shape.layers, shape.hidden, shape.heads) == (slow.LAYERS, slow.HIDDEN, slow.HEADS)
    assert (shape.vocab, settings.data.sequence_length) == (slow.VOCAB, slow.MAX_LENGTH)


def test_the_script_reads_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, settings = slow_script(), load(gallery.find(demo.CONFIG).path, overrides=SHORT, environ={}).settings
    demo.slow_job(settings, tmp_path / "script")
    monkeypatch.setattr(slow, "HERE", tmp_path / "script")
    texts = list(embedded.documents(settings.seed, settings.data.embedded_mb))
    data, tokenizer = slow.Documents(), prepare(settings.data, seed=settings.seed).tokenizer
    assert data.rows == texts
    assert [data.encode(text) for text in texts[:40]] == tokenizer.encode_batch(texts[:40])
    ids, targets = data[0]
    assert (len(ids), len(targets)) == (slow.MAX_LENGTH + 1, slow.MAX_LENGTH)


@pytest.mark.long
@pytest.mark.slow
def test_the_story_from_the_slow_script_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console, heard: io.StringIO
) -> None:
    monkeypatch.setattr(demo, "LOOK", replace(demo.LOOK, steps=7, seconds=6.0))
    monkeypatch.setattr(demo, "PROOF", replace(demo.PROOF, seconds=0.1))
    monkeypatch.setattr(demo, "MOST_PROOFS", 1)
    outcome = demo.run(tmp_path / "run", console=console, repeats=1, overrides=SHORT)
    text = heard.getvalue()
    for heading in (
        "1. The machine",
        "2. A slow script",
        "3. The fixes",
        "4. The same job",
        "5. The speed",
        "6. The report",
    ):
        assert heading in text
    found = Run.open(tmp_path / "run" / "slow").diagnosis
    assert found is not None
    causes = {finding.cause for finding in found.findings}
    assert {"padding", "anomaly-mode"} <= causes
    assert "measured" in {finding.status for finding in found.findings}
    assert outcome.steps == 6
    assert outcome.saves == 1
    assert "It generates" in text
    assert "flatout" in text.split("times as fast")[1]
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert "What to try next" in text
    assert "step 0 loss" not in text, "what the script prints is not part of the story"


@pytest.mark.long
def test_without_the_doctor_the_job_is_still_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console, heard: io.StringIO
) -> None:
    def fails(*_: object, **__: object) -> doctor.Examined:
        raise RunFailed("no optimizer step was observed")

    monkeypatch.setattr(doctor, "look", fails)
    outcome = demo.run(tmp_path / "run", console=console, overrides=SHORT)
    text = heard.getvalue()
    assert "This did not work here: no optimizer step was observed" in text
    assert outcome.steps == 6
    assert "the script's:" not in text
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_failed_proof_is_said() -> None:
    heard = io.StringIO()
    proofs = [Proof(cause="anomaly-mode", gains=(), loss_difference=None, problem="RuntimeError: no [such] thing")]
    doctor.print_proofs(proofs, console=Console(file=heard, width=160))
    assert "failed: RuntimeError: no [such] thing" in heard.getvalue()


def test_who_interrupts_the_script_means_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    ended = Watched(returncode=-2, stopped=False, facts=None, steps=(), samples=(), crash="KeyboardInterrupt")
    monkeypatch.setattr(doctor, "watch", lambda *_, **__: ended)
    with pytest.raises(KeyboardInterrupt):
        demo.examine(["python", "train.py"], folder=tmp_path / "run", console=console)


def test_nothing_is_overwritten(tmp_path: Path, console: Console) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match="not an empty folder"):
        demo.run(tmp_path, console=console)
