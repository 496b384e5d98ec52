"""`flatout report` as a user meets it, and on a run that was really trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.insight import made
from tests.insight.conftest import Flatout

from flatout import gallery
from flatout.insight.machine import Machine
from flatout.insight.report import fragments
from flatout.record import Run


def test_a_report_lies_in_the_run_folder(flatout: Flatout, tmp_path: Path):
    run = made.make(tmp_path / "run", steps=20)
    assert flatout("report", run.path) == (0, f"wrote {run.report_path}\n", "")
    assert run.report_path.read_text().startswith("<!doctype html>")
    assert flatout("report", run.path)[0] == 0  # written again as the run goes on


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        (("-o", "-"), "<!doctype html>"),
        (("-o", "-", "--format", "md"), "# h200"),
        (("--format", "md"), "# h200"),
        (("--format", "json"), "["),
        (("--json",), "["),
    ],
)
def test_a_report_can_be_piped(flatout: Flatout, h200: Run, arguments: tuple[str, ...], begins: str):
    code, out, err = flatout("report", h200.path, *arguments)
    assert (code, err) == (0, "")
    assert out.startswith(begins)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(("name", "begins"), [("x.md", "# "), ("x.json", "["), ("x.html", "<!doctype")])
def test_the_name_of_the_file_says_the_format(flatout: Flatout, h200: Run, name: str, begins: str):
    assert flatout("report", h200.path, h200.path, "-o", name)[0] == 0
    assert Path(name).read_text().startswith(begins)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-o", "x.pdf"), "'pdf' must be one of html, md, json"),
        (("-o", "nowhere/x.html"), "there is no folder nowhere"),
        (("no-such-run",), "no-such-run is not a run folder"),
        (("h200",), "choose one with -o FILE"),
    ],
)
def test_mistakes(flatout: Flatout, h200: Run, arguments: tuple[str, ...], says: str):
    given = [h200.path if argument == "h200" else argument for argument in arguments]
    code, out, err = flatout("report", h200.path, *given)
    assert (code, out) == (2, "")
    assert says in err


def test_a_gpu_of_this_machine_on_the_live_page():
    text = fragments.now(Machine(sample=made.h200_sample(1.0, step=11)))
    assert "29/139.8 GiB (20.7 %)" in text
    assert "<td>power cap</td>" in text
    assert "n/a" in fragments.now(Machine(sample={"gpus": [{"index": 0}]}))


@pytest.mark.long
def test_a_run_that_was_really_trained_and_resumed(flatout: Flatout, tmp_path: Path):
    pytest.importorskip("torch")
    demo = gallery.find("pretrain-demo").path
    small = ["model.layers=1", "model.hidden=32", "model.heads=2", "data.embedded_mb=0.2", "data.tokenizer=byte"]
    small += ["data.sequence_length=64", "train.batch_tokens=256", "eval.every=4", "eval.tokens=256", "save.every=4"]
    code, _, err = flatout("train", demo, *small, "train.steps=8", "train.warmup_steps=2", "--run", "run")
    assert code == 0, err
    settings = ["train.steps=12"]
    code, _, err = flatout("train", "run/config.yaml", *settings, "--run", "run", "--resume")
    assert code == 0, err
    code, out, err = flatout("report", "run", "--json")
    assert (code, err) == (0, "")
    (told,) = json.loads(out)
    assert told["state"]["kind"] == "finished"
    assert told["figures"]["steps"]["value"] == 12
    assert [found["step"] for found in told["evaluations"]] == [0, 4, 8, 12]
    assert {phase["name"] for phase in told["phases"]} >= {"data", "forward", "backward", "optimize", "eval", "save"}
    assert {verdict["criterion"] for verdict in told["criteria"]} >= {"loss_falling", "saves"}
    assert told["figures"]["mfu"]["value"] > 0
    assert "measured peak" in told["figures"]["mfu"]["source"]
    assert flatout("report", "run")[0] == 0
