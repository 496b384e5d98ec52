"""Secrets in the environment, in settings, in addresses and in error texts reach no report, view or page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tests import warm

from flatout.insight import watch
from flatout.insight.machine import Machine
from flatout.insight.report import FORMATS, render
from flatout.insight.story import tell
from flatout.record import Diagnosis, Finding, Run, Span, StepRecord

# By the value of an environment variable alone, by name, or by shape.
OF_ENVIRONMENT = {
    "WANDB_API_KEY": "sentinel01wandbvalue",
    "HF_TOKEN": "sentinel02hubvalue",
    "AWS_SECRET_ACCESS_KEY": "sentinel03awsvalue",
    "DB_PASSWORD": "sentinel04password",
}
NAMED = [
    "api_key: sentinel05named",
    "--token sentinel06flag",
    "password=sentinel07equals",
    "https://user:sentinel08userinfo@example.org/x",
    "Authorization: Bearer sentinel09bearer",
]
SHAPED = ["hf_sentinel10sentinel10", "sk-sentinel11sentinel11", "ghp_sentinel12sentinel12"]
EVERYWHERE = [*OF_ENVIRONMENT.values(), *NAMED, *SHAPED]


@pytest.fixture(params=["written by us", "written by others"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run with a secret in every place; also one whose files nobody masked when they were written."""
    for name, value in OF_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    facts = {f"fact{at}": secret for at, secret in enumerate(EVERYWHERE)}
    made = Run.create(
        tmp_path / "run",
        config_text="\n".join(EVERYWHERE),
        config={"recipe": "pretrain", "data": facts},
        plan={"decisions": facts, "reasons": facts},
        hardware=facts,
        environment={"variables": facts},
    )
    with made.recorder() as recorder:
        recorder.event("active", **facts)
        for secret in EVERYWHERE:
            recorder.event("notice", text=secret)
            recorder.event("save-failed", step=1, error=f"OSError: {secret}")
        spans = (Span(phase="data", seconds=0.4),)
        for step in range(9):
            recorder.step(
                StepRecord(
                    attempt=1, step=step, time=1e9, seconds=0.5, tokens=9, padded_tokens=9, loss=2.0, spans=spans
                )
            )
    secret = " ".join(EVERYWHERE)
    finding = Finding(
        cause="logging", sentence=secret, share=None, gain=None, status="measured", evidence=(secret,), fix=secret
    )
    made.write_diagnosis(Diagnosis(verdict=secret, limit={"ceiling": secret}, findings=(finding,)))
    if request.param == "written by others":
        (made.path / "config.yaml").write_text("\n".join(EVERYWHERE))
        for name in ("config.json", "plan.json", "hardware.json", "env.json"):
            (made.path / name).write_text(json.dumps({"recipe": "pretrain", "data": facts}))
        events = [{"attempt": 1, "time": 1e9, "kind": "notice", "step": 1, "data": {"text": s}} for s in EVERYWHERE]
        with (made.path / "events.jsonl").open("a") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)
    return made


def clean(text: str) -> None:
    assert "sentinel" not in text, text[max(0, text.index("sentinel") - 60) : text.index("sentinel") + 60]


@pytest.mark.parametrize("format", FORMATS)
def test_no_secret_is_in_a_report(run: Run, format: str):
    text = render([run, run], format=format)
    assert "***" in text
    clean(text)


def test_no_secret_is_in_a_view(run: Run, capsys: pytest.CaptureFixture[str]):
    console = Console(file=sys.stdout, width=200)
    console.print(watch.view([tell(run)], Machine(sample={}), console=console))
    console.print(watch.line(tell(run)))
    clean(capsys.readouterr().out)
    clean(json.dumps(watch.snapshot([run])))


HEADER = "Authorization: Bearer sentinel13header"
ADDRESS = "https://user:sentinel14userinfo@example.org/x?token=sentinel15query&sig=sentinel16query"
COMMAND = ["--auth", "sentinel17auth", "--key", "sentinel18key", "-p", "sentinel19p", "--pass=sentinel20pass"]


def test_no_secret_of_a_watched_command_is_in_its_run(tmp_path: Path):
    """The script quotes its own arguments as it fails; what the doctor keeps and adds has none of them."""
    (tmp_path / "train.py").write_text("import sys\nraise SystemExit(' '.join(sys.argv).replace('--', ''))\n")
    arguments = [sys.executable, "train.py", *COMMAND, "-H", HEADER, ADDRESS]
    run, found = tmp_path / "run", tmp_path / "found.json"
    done = warm.flatout("doctor", "--run", run, "--json", found, "--", *arguments, cwd=tmp_path)
    assert done.returncode == 4
    clean(done.stdout)
    clean(done.stderr.split("the script itself failed", 1)[1])
    for path in [*run.rglob("*"), found]:
        if path.is_file():
            clean(path.read_text(errors="replace"))
    assert (run / "config.yaml").read_text().count("***") >= 8
    render([Run.open(run)], format="md")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text("recipe: pretrain\nmodel: {layers: 2, hidden: 32, heads: 2}\ntrain: {steps: 3}\n")
    return path


@pytest.mark.parametrize("verb", [["config", "show"], ["config", "show", "--json"]])
def test_no_secret_is_in_a_configuration_that_is_shown(config: Path, tmp_path: Path, verb: list[str]):
    done = warm.flatout(*verb, config, f"run={ADDRESS}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "***" in done.stdout
    clean(done.stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "validate", "{config}", "train.stepz=--auth sentinel21"],
        ["plan", "{config}", "model.from=https://user:sentinel22@example.org/x?key=sentinel23"],
        ["train", "nowhere.yaml?api_key=sentinel24"],
        ["eval", "https://user:sentinel25@example.org/m", "--tasks", "jsonl:/nowhere?token=sentinel26"],
        ["report", "/nowhere?sig=sentinel27"],
        ["doctor", "--", "/nowhere?token=sentinel28"],
    ],
)
def test_no_secret_is_in_an_error(config: Path, tmp_path: Path, arguments: list[str]):
    done = warm.flatout(*(one.format(config=config) for one in arguments), cwd=tmp_path)
    assert done.returncode in (2, 3)
    assert "error:" in done.stderr
    clean(done.stdout + done.stderr)
