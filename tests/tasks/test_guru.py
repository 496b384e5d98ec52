"""GURU rows: the verifier by data source, with any prefix; rows that cannot be graded are reported with their place."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flatout.errors import EnvironmentLacks, UsageError
from flatout.tasks import Grader, Named, Texts, by_domain, open_task
from flatout.tasks.guru import source_verifier

ZEBRA = {"header": ["House", "Pet"], "rows": [["1", "cat"], ["2", "dog"]]}
ROWS = [
    ("math__combined_54.4k", "\\frac{3}{4}", "so \\boxed{0.75}"),
    ("simulation__codeio_3.7k", '"output": {"n": 5}', '```json\n{"output": {"n": 5}}\n```'),
    ("logic__arcagi1_111", [[1, 2], [3, 4]], "<answer>[[1, 2], [3, 4]]</answer>"),
    ("simulation__barc_1.6k", [[1]], "<answer>[[1]]</answer>"),
    ("zebra_puzzle_dataset", ZEBRA, f"<answer>{ZEBRA}</answer>"),
    ("logic__ordering_puzzle_dataset", ["crow", "owl"], "<answer>['crow', 'owl']</answer>"),
    ("graph_logical_dataset", "fdebme", "<answer> fdebme </answer>"),
    ("table__hitab_4.3k", "12.5|Ann", "\\boxed{Ann | 12.5}"),
    ("stem__supergpqa_200", "C", "\\boxed{C}"),
]


def row(source: str, gold: Any, **more: Any) -> dict[str, Any]:
    prompt = [{"role": "system", "content": "Think."}, {"role": "user", "content": f"A question of {source}"}]
    model = {"style": "rule", "ground_truth": gold}
    return {"data_source": source, "prompt": prompt, "reward_model": model, "extra_info": {"index": 0}} | more


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def opened(spec: str) -> Any:
    task = open_task(spec)
    assert not isinstance(task, Texts)
    return task


def test_each_row_is_graded_by_the_verifier_of_its_source(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *(row(source, gold) for source, gold, _ in ROWS))
    listed = tmp_path / "rows.json"
    listed.write_text(json.dumps([row(source, gold) for source, gold, _ in ROWS]))
    for spec in (f"guru:{path}", f"guru:{listed}"):
        task = opened(spec)
        assert task.size == len(ROWS)
        assert task.prompt(0)[0] == {"role": "system", "content": "Think."}
        for i, (_, _, right) in enumerate(ROWS):
            assert task.reward(i, right) == 1.0
            assert task.answer(right) is not None
            assert task.reward(i, "<answer>zz</answer>") == task.reward(i, "") == 0.0
    with Grader(f"guru:{path}", timeout_s=60) as grader:
        assert [grader.grade(i, right).reward for i, (_, _, right) in enumerate(ROWS)] == [1.0] * len(ROWS)


@pytest.mark.parametrize(
    ("sources", "name"),
    [
        (["logic__zebra_puzzle_dataset", "zebra_puzzle_dataset"], "zebra"),
        (["logic__graph_logical_dataset", "graph_logical_dataset"], "word"),
        (["simulation__arcagi1", "logic__arcagi2_190", "arcagi"], "grid"),
        (["codegen__leetcode2k", "simulation__cruxeval-o"], "code"),
        (["stem_web", "stem__web_3.6k"], "judge"),
        (["table__multihier", "table__finqa"], "table"),
        (["ood__ifeval", "reasoning_gym", "", "logic__"], None),
    ],
)
def test_sources_are_known_with_and_without_their_prefix(sources: list[str], name: str | None) -> None:
    assert {source_verifier(source) for source in sources} == {name}


def test_every_domain_of_a_file_is_scored_with_its_own_metric(tmp_path: Path) -> None:
    file = write(tmp_path / "valid.jsonl", *(row(source, gold) for source, gold, _ in ROWS))
    specs = by_domain([f"guru:{file}", "units"])
    domains = ["math", "simulation", "logic", "table", "stem"]
    assert specs == [*(f"guru:{file}?domain={domain}" for domain in domains), "units"]
    told = {spec.rpartition("=")[2]: open_task(spec) for spec in specs[:-1]}
    assert [task.size for task in told.values()] == [1, 2, 4, 1, 1]
    assert sorted(task.name for task in told.values()) == sorted(f"guru {domain}" for domain in domains)
    [zebra] = by_domain([f"guru:{write(tmp_path / 'zebra.jsonl', row('zebra_puzzle_dataset', ZEBRA))}"])
    assert zebra.endswith("zebra.jsonl")  # one domain: the file as a whole
    assert isinstance(whole := open_task(zebra), Named)
    assert whole.metric == "right cells"
    with pytest.raises(UsageError, match="has only rows of math, simulation"):
        open_task(f"guru:{file}?domain=poetry")


def test_parquet_is_read_as_the_same_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for at, (source, gold, right) in enumerate(ROWS):  # a column has one type, as in GURU's files
        path = tmp_path / f"{at}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([row(source, gold)] * 2), path)
        task = opened(f"guru:{path}")
        assert task.size == 2
        assert task.reward(1, right) == 1.0
        assert task.reward(1, "<answer>zz</answer>") == 0.0
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and nothing more")
    with pytest.raises(UsageError, match=r"broken\.parquet cannot be read as Parquet"):
        open_task(f"guru:{broken}")
    with pytest.raises(UsageError, match="there is no file"):
        open_task(f"guru:{tmp_path / 'gone.parquet'}")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(EnvironmentLacks, match=r"pip install 'flatout\[hf\]'"):
        open_task(f"guru:{tmp_path / 'rows.parquet'}")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (
            row("ood__ifeval", "x"),
            r"rows\.jsonl:2: data_source 'ood__ifeval' is unknown; .*zebra_puzzle.*\?verifier=NAME",
        ),
        (row("math", None), r"rows\.jsonl:2: has no reward_model\.ground_truth"),
        (row("math", "x", reward_model={"style": "rule"}), r"rows\.jsonl:2: has no reward_model\.ground_truth"),
        (row("math", "x", reward_model=None), "has no reward_model.ground_truth"),
        (row("math", ""), "has no reward_model.ground_truth"),
        (row("logic__zebra_puzzle", "no grid"), r"rows\.jsonl:2: ground_truth must be an object with header"),
        (row("stem__gpqa", "dog"), "must be the letter of an option"),
        (row("math", "1", prompt="text"), "prompt must be a list of messages"),
        (row("math", "1", prompt=[{"role": "assistant", "content": "x"}]), "and end with a user"),
        (row("math", "1", prompt=[{"role": "user", "content": 7}]), "prompt must be a list of messages"),
        (row("stem_web", "x"), r"answers to stem_web are free text; name a judge: \?judge=URL&model=NAME"),
        (row("codegen__taco", "{}"), "functional"),
        ({"prompt": []}, "needs data_source"),
    ],
)
def test_a_row_that_cannot_be_graded_is_reported(tmp_path: Path, bad: dict[str, Any], says: str) -> None:
    path = write(tmp_path / "rows.jsonl", row("math", "1"), bad)
    with pytest.raises(UsageError, match=says):
        open_task(f"guru:{path}")


def test_a_verifier_can_be_named_for_an_unknown_source(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", row("my_own", "Oslo"))
    assert opened(f"guru:{path}?verifier=text").reward(0, "<answer>oslo</answer>") == 1.0
    with pytest.raises(UsageError, match="verifier=texts: is unknown; use one of math"):
        open_task(f"guru:{path}?verifier=texts")


@pytest.mark.usefixtures("sandboxed")
def test_programs_run_in_the_sandbox(tmp_path: Path) -> None:
    truth = json.dumps({"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11\n"]})
    task = opened(f"guru:{write(tmp_path / 'rows.jsonl', row('codegen__taco', truth), row('math', '2'))}")
    assert (task.timeout_s or 0) > 2
    task.prepare()
    right = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    assert (task.reward(0, right), task.reward(0, right.replace("+", "-")), task.reward(1, "\\boxed{2}")) == (
        1.0,
        0.0,
        1.0,
    )
    assert "print" in (task.answer(right) or "")
