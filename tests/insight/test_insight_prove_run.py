"""`flatout doctor RUN --prove`: the fixes of a run of ours, as short runs of its configuration."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.insight.conftest import Flatout
from tests.insight.test_insight_runs import HEALTHY, made
from tests.warm import flatout as process

from flatout.config import load, to_mapping
from flatout.insight import trials
from flatout.insight.diagnose import runs
from flatout.insight.prove_run import TRIED, changes
from flatout.record import Run

ROOT = Path(__file__).parents[2]
CONFIG = """recipe: pretrain
model: {layers: 2, hidden: 64, heads: 2, positions: 128}
data: {sequence_length: 64}
train: {batch_tokens: 1024, steps: 100, lr: 1.0e-3}
plan: {recompute: full}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration that recomputes; its trials are the stand-in's, where that costs 30 %."""
    monkeypatch.setattr(trials, "flatout_command", lambda *_: [sys.executable, "-m", "tests.insight.stand_in"])
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "job.yaml").write_text(CONFIG)
    return tmp_path / "job.yaml"


def recomputing(folder: Path, config: Path) -> Run:
    settings = to_mapping(load(config, overrides=[]).settings)
    return made(folder, spans=HEALTHY, decisions={"recompute": "full"}, peak_gib=20.0, config=settings)


def test_a_fix_is_measured_as_short_runs_with_it(flatout: Flatout, tmp_path: Path, config: Path) -> None:
    recomputing(tmp_path / "run", config)
    code, out, err = flatout("doctor", "run", "--prove", "--config", config, "--repeats", "4", "--json", "-")
    assert code == 0, err
    read = json.loads(out)
    (finding,) = read["findings"]
    assert (finding["cause"], finding["status"]) == ("needless-recompute", "measured")
    assert finding["gain"] == pytest.approx(1 - 1 / 1.3, abs=0.02)
    (proof,) = read["proofs"]
    assert proof["verdict"] == "faster"
    assert proof["loss_difference"] == 0.0
    assert "needless-recompute" in read["verdict"]
    kept = [json.loads(file.read_text())["settings"] for file in (tmp_path / "runs").glob("doctor-*/trials/*.json")]
    assert kept.count({"plan.recompute": "none"}) == 4
    assert kept.count({}) == 8, "unchanged before and after the fix, in every round"


def test_a_round_that_was_interrupted_is_measured_anew(flatout: Flatout, tmp_path: Path, config: Path) -> None:
    recomputing(tmp_path / "run", config)
    words = ["doctor", "run", "--prove", "--config", config, "--repeats", "1", "--run", "proof", "--json", "-"]
    assert flatout(*words)[0] == 0
    kept = {file: json.loads(file.read_text()) for file in (tmp_path / "proof" / "trials").glob("*.json")}
    next(file for file, trial in kept.items() if trial["seed"] == 1).unlink()  # a call was killed before this one
    code, out, err = flatout(*words)
    assert code == 0, err
    assert json.loads(out)["proofs"][0]["gains"] == [pytest.approx(1 - 1 / 1.3, abs=0.02)]
    calls = [json.loads(file.read_text()) for file in (tmp_path / "proof" / "trials").glob("*.json")]
    assert len({trial["call"] for trial in calls if trial["seed"] in (2, 3)}) == 1, "a whole round of the second call"


def test_the_configuration_is_named_and_is_that_of_the_run(flatout: Flatout, tmp_path: Path, config: Path) -> None:
    recomputing(tmp_path / "run", config)
    for arguments, why in (
        (["run", "--prove"], "needs --config FILE"),
        (["--prove", "run"], "run/config.yaml is a copy, if you trust that folder"),
        (["run", "--config", str(config)], "names the configuration for RUN --prove"),
        (["--config", str(config), "--prove", "--", "python", "x.py"], "names the configuration for RUN --prove"),
    ):
        code, _, err = flatout("doctor", *arguments)
        assert code == 2
        assert why in " ".join(err.split())
    config.write_text(CONFIG.replace("1.0e-3", "2.0e-3"))
    code, _, err = flatout("doctor", "run", "--prove", "--config", config)
    assert code == 2
    assert "differs from what run was trained with (train.lr)" in " ".join(err.split())
    assert not (tmp_path / "started").exists(), "nothing was run"


def test_a_healthy_run_has_nothing_to_prove(flatout: Flatout, tmp_path: Path, config: Path) -> None:
    made(tmp_path / "run", spans=HEALTHY, config=to_mapping(load(config, overrides=[]).settings))
    code, _, err = flatout("doctor", "run", "--prove", "--config", config)
    assert code == 0
    assert "nothing to prove" in err
    for text, why in ((None, "job.yaml"), (CONFIG.replace("steps", "stepz"), "did you mean")):
        config.unlink() if text is None else config.write_text(text)
        code, _, err = flatout("doctor", "run", "--prove", "--config", config)
        assert code == 2, "a mistake in the configuration is named even then"
        assert why in err


def test_a_watched_script_is_proved_by_its_command(flatout: Flatout, tmp_path: Path, config: Path) -> None:
    Run.create(tmp_path / "run", config_text="", config={}, plan={"foreign": True}, hardware={}, environment={})
    code, _, err = flatout("doctor", "run", "--prove", "--config", config)
    assert code == 2
    assert "belongs to a script" in err


def test_every_cause_that_is_tried_names_its_settings(tmp_path: Path) -> None:
    pinned: dict[str, object] = {"plan": {"micro_batch": 1}}
    found = {
        "data-starvation": made(tmp_path / "a", spans={"train": 0.6, "data": 0.4}),
        "needless-recompute": made(tmp_path / "b", spans=HEALTHY, decisions={"recompute": "full"}, peak_gib=20.0),
        "small-batch": made(tmp_path / "c", spans=HEALTHY, decisions={"accumulation": 8}, peak_gib=20.0, config=pinned),
        "recompiles": made(tmp_path / "d", spans=HEALTHY, graphs=range(40)),
    }
    assert set(found) == set(TRIED)
    for cause, run in found.items():
        settings = changes(runs.diagnose(run)).get(cause)
        assert settings, cause
        overrides = [f"{key}={value}" for key, value in settings.items()]
        (tmp_path / "job.yaml").write_text(CONFIG)
        load(tmp_path / "job.yaml", overrides=overrides)


@pytest.mark.long
def test_a_real_run_is_trained_again(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(CONFIG.replace("steps: 100", "steps: 8") + "eval: {tokens: 256}\n")
    trained = process("train", job, "plan.workers=1", "--run", tmp_path / "run", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    steps = tmp_path / "run" / "steps.jsonl"
    rows = [json.loads(line) for line in steps.read_text().splitlines()]
    for row in rows:  # as if half of each step had been waiting
        row["spans"] = [{"phase": "data", "seconds": row["seconds"] / 2}]
    steps.write_text("".join(json.dumps(row) + "\n" for row in rows))
    copy = tmp_path / "run" / "config.yaml"
    asked = ("doctor", tmp_path / "run", "--prove", "--config", copy, "--repeats", "1", "--json", "-")
    done = process(*asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    proofs = json.loads(done.stdout)["proofs"]
    assert [proof["cause"] for proof in proofs] == ["data-starvation", "needless-recompute", "all together"]
    for proof in proofs:
        assert len(proof["gains"]) == 1
        assert proof["problem"] is None
