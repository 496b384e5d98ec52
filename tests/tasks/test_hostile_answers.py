"""Hostile answers to every verifier: none is run, none takes long, none is paid, and honest ones count as before.

1,000 of them in every run of the tests; FLATOUT_HOSTILE=1 tries all 10,000.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waiting import HANG_S

from flatout.tasks.verifiers import VERIFIERS
from flatout.tasks.workers import TIMEOUT_S

COUNT = 10_000 if os.environ.get("FLATOUT_HOSTILE") else 1_000
# A right answer for each verifier, and an honest completion.
HONEST: dict[str, tuple[Any, str]] = {
    "math": ("\\frac{7}{13}", "\\boxed{\\frac{7}{13}}"),
    "number": ({"value": 73.125, "tolerance": 0.01}, "<answer>73.1 kg</answer>"),
    "letter": ("Q", "<answer>(Q)</answer>"),
    "text": ("Rayleigh scattering", "<answer>rayleigh scattering</answer>"),
    "word": ("fdebme", "<answer>fdebme</answer>"),
    "ordering": (["owl", "crow", "wren"], "<answer>owl, crow, wren</answer>"),
    "zebra": ({"header": ["Pet"], "rows": [["owl"], ["crow"]]}, '<answer>[["owl"], ["crow"]]</answer>'),
    "grid": ([[7, 3], [2, 5]], "<answer>7 3\n2 5</answer>"),
    "table": ("73.125|Ann Lee", "\\boxed{Ann Lee | 73.125}"),
    "literal": ("[(7, 'q'), {'k': 73}]", "<answer>[(7, 'q'), {'k': 73}]</answer>"),
    "json": ('"output": {"k": [73, "q"]}', '```json\n{"output": {"k": [73, "q"]}}\n```'),
}


def payloads(sentinel: Path) -> list[str]:
    run = f"__import__('os').system('touch {sentinel}')"
    deep = 30_000
    return [
        run,
        f"[{run}]",
        f"[[{run}]]",
        f'{{"output": {run}}}',
        f"{{'header': [], 'rows': {run}}}",
        f"eval({run!r})",
        f"exec({run!r})",
        f"open({str(sentinel)!r}, 'w')",
        f"(lambda: {run})()",
        f"f'{{{run}}}'",
        f"[x for x in [{run}]]",
        f"().__class__.__base__.__subclasses__() or {run}",
        f"!!python/object/apply:os.system ['touch {sentinel}']",
        f"\\input{{|touch {sentinel}}}",
        f"\\write18{{touch {sentinel}}}",
        f"$(touch {sentinel})",
        f"`touch {sentinel}`",
        f"; touch {sentinel} #",
        f"sympify({run!r})",
        "9**9**9",
        "10**10**10",
        "[9**9**9]",
        '"a" * 10**10',
        "[0] * 10**10",
        "9" * 60_000,
        "1e999999",
        "1" + "0" * 5000 + ".5",
        "-" * deep + "1",
        "not " * 10_000 + "1",
        "~" * deep + "1",
        "(" * deep,
        "(" * deep + ")" * deep,
        "[" * deep,
        "[" * deep + "]" * deep,
        "{" * deep,
        "{" * deep + "}" * deep,
        '{"a":' * 10_000,
        '{"a":' * 900 + "1" + "}" * 900,
        "[" * 900 + "]" * 900,
        "[[" * 400 + "1" + "]]" * 400,
        "1+" * deep + "1",
        "a." * deep + "a",
        "\\frac{" * 9_000 + "1" + "}" * 9_000,
        "\\frac{1}{" * 6_000,
        "\\sqrt{" * 9_000,
        "\\boxed{" * 9_000,
        "\\text{" * 10_000,
        "\\left(" * 10_000 + "\\right)" * 1_000,
        "x^" * deep + "2",
        "<answer>" * 8_000,
        "</answer>" * 7_000,
        "<answer>" * 4_000 + "</answer>" * 3_000,
        "<think>" * 9_000,
        "</think><answer>",
        "```" * 20_000,
        "```json\n" * 8_000,
        '"' * 60_000,
        "\\" * 60_000,
        '\\"' * deep,
        "'" * 60_000,
        "|" * 60_000,
        "," * 60_000,
        "1|" * deep,
        "A " * deep,
        "\n" * 60_000,
        " " * 65_000,
        "\t1" * deep,
        "0 " * deep,
        "[[0]," * 10_000,
        "１２３",
        "٣٫١٤",
        "७३.१२५",
        "７３.１２５",
        "²³",
        "Ⅷ",
        "\u202e731.37",
        "\u200b" * 20_000,
        "\x00" * 20_000,
        "\ud800",
        "e\u0301" * 20_000,
        "İ" * deep,
        "ﬁ" * deep,
        "NaN",
        "Infinity",
        '{"output": NaN}',
        "-inf",
        "None",
        "null",
        "true",
        "...",
        "0x1F",
        "1_000",
        "1,2,3,4",
        "1,23",
        "12/0",
        "1/" * deep + "1",
        "b'\\x00'",
        "'\\N{DIGIT ONE}'",
        "{1, 2, []}",
        "{[]: 1}",
        "{{}}",
        "{**{}}",
        "[*[]]",
        "1j",
        '{"header": {}, "rows": []}',
        '{"header": ["Pet"], "rows": ' + "[" * 800 + "]" * 800 + "}",
        '{"header": ["Pet", "Pet"], "rows": [["owl", "owl"], ["crow", "crow"]]}',
        '{"rows": [[' + "9" * 5000 + "], [1]]}",
    ]


def dressed(payload: str, how: int) -> str:
    return [
        f"<answer>{payload}</answer>",
        f"\\boxed{{{payload}}}",
        f"```json\n{payload}\n```",
        f"```python\n{payload}\n```",
        payload,
        f"<answer><answer>{payload}</answer></answer>",
        f"<think>{payload}</think><answer>{payload}</answer>",
        f"{payload * 3}<answer>{payload[:200]}</answer>",
        f'<answer>{{"output": {payload}}}</answer>',
        f"<answer>[{payload}, {payload}]</answer>",
        f"<answer>\\text{{{payload}}}</answer>",
        f"{'x' * 300_000}<answer>{payload}</answer>",
    ][how]


# Runs in a process of its own: reads [verifier, right answer, completion] as JSON lines, and writes the reward and the
# CPU seconds of each. CPU time does not depend on what else the machine does.
GRADING = """
import json, sys, time
from flatout.tasks import workers
from flatout.tasks.verifiers import VERIFIERS
workers.KILLABLE = True
sys.setrecursionlimit(2000)
for line in sys.stdin:
    name, gold, text = json.loads(line)
    begun = time.process_time()
    reward = VERIFIERS[name](gold, text)
    print(json.dumps([reward, time.process_time() - begun]), flush=True)
"""


def test_hostile_answers_are_neither_run_nor_paid_nor_slow(tmp_path: Path) -> None:
    assert set(HONEST) == set(VERIFIERS)
    sentinel = tmp_path / "executed"
    chance = random.Random("hostile")
    every = [
        (name, HONEST[name][0], dressed(payload, how))
        for name in VERIFIERS
        for payload in payloads(sentinel)
        for how in range(12)
    ]
    assert len(every) >= 10_000
    chance.shuffle(every)
    honest = [(name, gold, text) for name, (gold, text) in HONEST.items()]
    asked = [*honest, *every[:COUNT], *honest]
    done = subprocess.run(
        [sys.executable, "-c", GRADING],
        input="".join(json.dumps(one) + "\n" for one in asked),
        capture_output=True,
        text=True,
        timeout=10 * HANG_S,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(asked), f"{asked[len(found)][0]}: {asked[len(found)][2][:100]!r}: {done.stderr[-2000:]}"
    assert not sentinel.exists()
    paid = [(one[0], one[2][:100]) for one, (reward, _) in zip(asked, found, strict=True) if reward]
    assert paid == [(name, text[:100]) for name, _, text in [*honest, *honest]]
    slowest, what = max((seconds, one[0] + one[2][:80]) for one, (_, seconds) in zip(asked, found, strict=True))
    assert slowest < TIMEOUT_S, what
