"""Every verifier pays for right answers and for nothing that is near: thirty labelled by hand for each."""

from __future__ import annotations

from typing import Any

import pytest

from flatout.tasks.verifiers import VERIFIERS

ZEBRA = {"header": ["House", "Pet"], "rows": [["1", "cat"], ["2", "dog"]]}

# (verifier, right answer, [(answer, reward)]); an answer without a mark of its own is put into tags.
LABELLED: list[tuple[str, Any, list[tuple[str, float]]]] = [
    ("math", "1/2", [
        ("1/2", 1), ("0.5", 1), ("\\frac{1}{2}", 1), ("\\boxed{\\dfrac{1}{2}}", 1), ("$\\frac{1}{2}$", 1),
        ("2/1", 0), ("0.51", 0), ("\\frac{1}{3}", 0), ("1", 0), ("half", 0),
    ]),
    ("math", "10000000001", [
        ("10000000001", 1), ("10,000,000,001", 1), ("10000000002", 0), ("1e10", 0), ("10000000001.5", 0),
    ]),
    ("math", "-7", [
        ("-7", 1), ("-7.0", 1), ("\\boxed{-7}", 1), ("7", 0), ("−7", 0), ("- 7", 1), ("-7x", 0), ("-70", 0), ("--7", 0),
    ]),
    ("math", "x+1", [
        ("x+1", 1), ("x + 1", 1), ("x+2", 0), ("\\text{x+1}", 1), ("", 0), ("The answer is x+1", 0), ("y+1", 0),
    ]),
    ("number", {"value": 9.81, "tolerance": 0.01}, [
        ("9.81", 1), ("9.8", 1), ("9.81 m/s^2", 0), ("9.9", 1), ("9.6", 0), ("-9.81", 0), ("about 9.8", 1), ("98.1", 0),
        ("9,81", 0), ("9.8 or 9.9", 0), ("ten", 0),
    ]),
    ("number", "3e8", [
        ("3e8", 1), ("300000000", 1), ("300,000,000", 1), ("3 \\times 10^8", 1), ("3 \\times 10^{8}", 1),
        ("3 × 10^8", 1), ("3*10^8", 1), ("3 \\times 10^7", 0), ("3e9", 0), ("3", 0), ("3^8", 0), ("$3\\cdot10^{8}$", 1),
    ]),
    ("number", "-2", [
        ("-2", 1), ("−2", 1), ("2", 0), ("-2.0", 1), ("-2.001", 0), ("\\boxed{-2}", 1), ("٢-", 0), ("- 2", 1),
    ]),
    ("letter", "B", [
        ("B", 1), ("b", 1), ("(B)", 1), ("B.", 1), ("B)", 1), ("B) the dog", 1), ("(B) the dog", 1), ("B: dog", 1),
        ("\\boxed{B}", 1), ("\\boxed{\\text{B}}", 1), ("**B**", 1), ("$B$", 1), ("(b)", 1),
        ("A", 0), ("AB", 0), ("B or C", 0), ("A, B", 0), ("Bee", 0), ("the dog", 0), ("", 0), ("A) not B", 0),
        ("(A) B", 0), ("B C", 0), ("8", 0), ("ß", 0), ("В", 0), ("C. B", 0), ("not B", 0), ("?", 0), ("(B", 1),
    ]),
    ("text", "New York", [
        ("New York", 1), ("new york", 1), ("New  York.", 1), ("\\boxed{New York}", 1),
        ("NEW YORK", 1), ("New\nYork", 1),
        ("New York City", 0), ("York", 0), ("NewYork", 0), ("in New York", 0),
        ("New York, Boston", 0), ("New Yorck", 0),
        ("'New York'", 0), ("", 0), ("Old York", 0),
    ]),
    ("text", "] ]", [("] ]", 1), ("]]", 0), ("] ] ]", 0), ("]", 0), ("[ ]", 0), (" ]  ] ", 1)]),
    ("text", 8, [("8", 1), ("8.", 1), ("eight", 0), ("08", 0), ("80", 0), ("8 8", 0), ("-8", 0), ("8,", 0), ("８", 0)]),
    ("word", "fdebme", [
        ("fdebme", 1), ("FDEBME", 1), (" fdebme ", 1), ("fdebm", 0), ("fdebmes", 0), ("fdebme.", 0), ("f d e b m e", 0),
        ("the fdebme", 0), ("fdebme fdebme", 0), ("", 0), ("fdebme\u200b", 0), ("\\boxed{fdebme}", 0), ("eme", 0),
        ("fdebmé", 0), ("'fdebme'", 0),
    ]),
    ("word", "yes", [
        ("yes", 1), ("Yes", 1), ("YES", 1), ("no", 0), ("yes no", 0), ("no yes", 0), ("yess", 0), ("y", 0), ("true", 0),
        ("1", 0), ("yes!", 0), ("not yes", 0), ("maybe", 0), ("yes,", 0), ("\nyes\n", 1),
    ]),
    ("ordering", ["Ann", "Bob", "Cid"], [
        ("Ann, Bob, Cid", 1), ("['Ann', 'Bob', 'Cid']", 1), ('["Ann","Bob","Cid"]', 1), ("[Ann, Bob, Cid]", 1),
        ("ann, bob, cid", 1), ("Ann,Bob,Cid", 1), ("\nAnn, Bob,\nCid\n", 1),
        ("Bob, Ann, Cid", 0), ("Ann, Bob", 0), ("Ann, Bob, Cid, Dan", 0), ("Ann Bob Cid", 0), ("Cid, Bob, Ann", 0),
        ("Ann, Bob, Cid, Cid", 0), ("Ann,, Bob, Cid", 0), ("[]", 0), ("", 0), ("Ann > Bob > Cid", 0), ("Ann", 0),
        ("Ann, Bob, Cyd", 0), ("[['Ann', 'Bob', 'Cid']]", 0), ("Ann, Bob, Cid.", 0), ("1. Ann, 2. Bob, 3. Cid", 0),
        ("\\boxed{Ann, Bob, Cid}", 0), ("Ann, Bob, Cid,", 0), ("eval('[1]')", 0), ("Ann; Bob; Cid", 0),
    ]),
    ("ordering", "['a b', 'c']", [("a b, c", 1), ("['a b', 'c']", 1), ("ab, c", 0), ("a, b, c", 0)]),
    ("zebra", ZEBRA, [
        ('{"header": ["House", "Pet"], "rows": [["1", "cat"], ["2", "dog"]]}', 1),
        ("{'header': ['House', 'Pet'], 'rows': [['1', 'cat'], ['2', 'dog']]}", 1),
        ('{"header": ["Pet", "House"], "rows": [["cat", "1"], ["dog", "2"]]}', 1),
        ('{"header": ["house", "PET"], "rows": [["1", "Cat"], ["2", "DOG"]]}', 1),
        ('{"header": ["House", "Pet"], "rows": [[1, "cat"], [2, "dog"]]}', 1),
        ('[["1", "cat"], ["2", "dog"]]', 1),
        ('```json\n[["1", "cat"], ["2", "dog"]]\n```', 1),
        ('[["1", "dog"], ["2", "cat"]]', 0.5), ('[["1", "cat"], ["2", "cat"]]', 0.75), ('[["2", "x"], ["x", "x"]]', 0),
        ('[["1", "x"], ["x", "x"]]', 0.25), ('[["2", "dog"], ["1", "cat"]]', 0),
        ('{"header": ["Pet", "House"], "rows": [["1", "cat"], ["2", "dog"]]}', 0),
        ('{"header": ["House"], "rows": [["1", "cat"], ["2", "dog"]]}', 0),
        ('{"header": ["House", "House"], "rows": [["1", "cat"], ["2", "dog"]]}', 0),
        ('{"header": ["House", "Car"], "rows": [["1", "cat"], ["2", "dog"]]}', 0),
        ('[["1", "cat"]]', 0), ('[["1", "cat"], ["2", "dog"], ["3", "owl"]]', 0), ('[["1"], ["2"]]', 0), ("[]", 0),
        ('[["1", "cat", "x"], ["2", "dog", "x"]]', 0), ("cat dog", 0), ("{}", 0), ('{"rows": 7}', 0), ("null", 0),
        ('{"rows": [["1", "cat"], ["2", "dog"]]}', 1), ('[["1", ["cat"]], ["2", "dog"]]', 0), ("", 0),
        ('{"header": ["House", "Pet"], "rows": [["1", "cat"], ["2", "dog"]]', 0), ('[[True, "cat"], ["2", "dog"]]', 0),
    ]),
    ("grid", [[1, 0], [0, 2]], [
        ("[[1, 0], [0, 2]]", 1), ("[[1,0],[0,2]]", 1), ("1 0\n0 2", 1), ("[[1, 0],\n [0, 2]]", 1),
        ("```\n[[1, 0], [0, 2]]\n```", 1), ("The grid: [[1, 0], [0, 2]]", 1), (" 1 0 \n 0 2 ", 1),
        ("[[1, 0], [0, 1]]", 0), ("[[1, 0]]", 0), ("[[1, 0], [0, 2], [0, 0]]", 0), ("[[1, 0, 0], [0, 2, 0]]", 0),
        ("[1, 0, 0, 2]", 0), ("10\n02", 0), ("1 0 0 2", 0), ("[[1, 0], [0]]", 0), ("[[1.0, 0], [0, 2]]", 0),
        ("[[True, 0], [0, 2]]", 0), ("[['1', '0'], ['0', '2']]", 0), ("[[1, 0], [0, 2]", 0), ("", 0), ("[[]]", 0),
        ("1 0\n0 ２", 0), ("[[0, 1], [2, 0]]", 0), ("[[1, 0], [0, 1+1]]", 0),
        ("[[1, 0], [0, 2]] or [[1, 1], [1, 1]]", 0),
        ("\\boxed{[[1, 0], [0, 2]]}", 0), ("a b\nc d", 0), ("[[[1, 0], [0, 2]]]", 0), ("((1, 0), (0, 2))", 0),
        ("[[1, 0], [0, ...]]", 0),
    ]),
    ("table", "2004", [
        ("2004", 1), ("\\boxed{2004}", 1), ("2,004", 1), ("2004.0", 1), ("2005", 0), ("2003", 0), ("2004.4", 0),
        ("2004|2005", 0), ("in 2004", 0), ("1+2003", 0),
    ]),
    ("table", ["12.346", "Ann Lee"], [
        ("12.346|Ann Lee", 1), ("ann lee | 12.35", 1), ("\\boxed{12.346 | \\text{Ann Lee}}", 1), ("12.346", 0),
        ("12.346|Ann", 0), ("12.4|Ann Lee", 0), ("12.346|Ann Lee|Ann Lee", 0), ("Ann Lee|Ann Lee", 0),
        ("12.346, Ann Lee", 0), ("|", 0),
    ]),
    ("table", "0.125", [
        ("12.5%", 1), ("12.5\\%", 1), ("0.125", 1), ("12.5", 0), ("0.13", 0), ("1/8", 1), ("__import__('os')", 0),
    ]),
    ("table", "$(3.1)", [("$(3.1)", 1), ("(3.2)", 0)]),
    ("table", "(3.1)", [("-3.1", 1), ("3.1", 0), ("(3.1)", 1), ("($3.1)", 1)]),
    ("literal", "[(4, 1), 'a']", [
        ("[(4, 1), 'a']", 1), ('[(4,1),"a"]', 1), ("[ (4, 1), 'a' ]", 1), ("```python\n[(4, 1), 'a']\n```", 1),
        ("[[4, 1], 'a']", 0), ("[(4, 1), 'A']", 0), ("[(4, 1)]", 0), ("((4, 1), 'a')", 0), ("[(4, 1), a]", 0),
        ("list([(4, 1), 'a'])", 0), ("[(4, 1), 'a'] + []", 0), ("[(2+2, 1), 'a']", 0),
    ]),
    ("literal", "True", [("True", 1), ("true", 1), ("1", 0), ("'True'", 0), ("False", 0), ("not False", 0)]),
    ("literal", "{'b': 1.5, 'a': None}", [
        ("{'a': None, 'b': 1.5}", 1), ('{"b": 1.5, "a": null}', 1), ("{'b': 1.5}", 0), ("{'b': 1.51, 'a': None}", 0),
        ("{'b': '1.5', 'a': None}", 0), ("{'b': 1.50, 'a': None}", 1),
    ]),
    ("literal", "'ab'", [("'ab'", 1), ('"ab"', 1), ("ab", 1), ("AB", 0), ("'a b'", 0), ("'ab '", 0)]),
    ("json", '"output": {"n": 5, "ok": true}', [
        ('{"output": {"n": 5, "ok": true}}', 1), ('```json\n{"output": {"n": 5, "ok": true}}\n```', 1),
        ('So it is {"output": {"n": 5, "ok": true}}', 1), ('\\boxed{"output": {"n": 5, "ok": true}}', 1),
        ('{"n": 5, "ok": true}', 1), ('{"output": {"ok": true, "n": 5.0}}', 1),
        ('{"output": "{\\"n\\": 5, \\"ok\\": true}"}', 1),
        ('{"output": {"n": 5, "ok": "True"}}', 1), ('{"a": "}{"} then {"output": {"n": 5, "ok": true}}', 1),
        ('{"output": {"n": 5, "ok": false}}', 0), ('{"output": {"n": 6, "ok": true}}', 0), ('{"output": {"n": 5}}', 0),
        ('{"output": {"n": "5", "ok": true}}', 0), ('{"output": {"n": 5, "ok": 1}}', 0), ('{"output": [5, true]}', 0),
        ('{"output": {"n": 5, "ok": true, "x": 1}}', 0), ("5", 0), ("{", 0), ('{"output": {"n": 5, "ok": true}', 0),
        ('{"output": {"n": 5, "ok": true}} no, {"output": {"n": 6, "ok": true}}', 0), ("output: n = 5", 0), ("", 0),
    ]),
    ("json", '{"output": [1.5, "x"]}', [
        ('{"output": [1.5, "x"]}', 1), ('[1.5, "x"]', 1), ('{"output": [1.5, "X"]}', 0), ('{"output": ["x", 1.5]}', 0),
        ('{"output": [1.5]}', 0), ('{"output": [1.5000001, "x"]}', 0), ("[1.5, 'x']", 0), ('{"output": NaN}', 0),
    ]),
]  # fmt: skip
MARKS = ("\\boxed{", "{", "```", "So it")


@pytest.mark.parametrize(("name", "gold", "answer", "reward"), [
    (name, gold, answer, reward) for name, gold, answers in LABELLED for answer, reward in answers
])  # fmt: skip
def test_answers_are_worth_what_was_labelled(name: str, gold: Any, answer: str, reward: float) -> None:
    marked = answer.startswith("\\boxed{") or (name == "json" and answer.startswith(MARKS))
    text = f"Well. {answer}" if marked else f"Well.\n<answer>{answer}</answer>"
    assert VERIFIERS[name](gold, text) == reward


def test_every_verifier_has_thirty_labels() -> None:
    counts = dict.fromkeys(VERIFIERS, 0)
    for name, _, answers in LABELLED:
        counts[name] += len(answers)
    assert min(counts.values()) >= 30, counts


@pytest.mark.parametrize("name", list(VERIFIERS))
def test_an_answer_counts_only_after_the_thinking_and_only_with_its_mark(name: str) -> None:
    golds = {name: (gold, answers[0][0]) for name, gold, answers in reversed(LABELLED)}
    gold, right = golds[name]
    tagged = f"<answer>{right}</answer>"
    assert VERIFIERS[name](gold, f"<think>{tagged}</think> <answer>zzz</answer>") == 0
    assert VERIFIERS[name](gold, f"<think>hm</think> {tagged}") == 1
    assert VERIFIERS[name](gold, f"<think>{tagged}") == 0
    assert VERIFIERS[name](gold, f"<answer>zzz</answer> no, {tagged}") == 1
    if name != "json":
        assert VERIFIERS[name](gold, right.replace("\\boxed", "")) == 0


@pytest.mark.parametrize(
    ("name", "gold"),
    [
        ("math", None), ("math", ["1"]), ("math", ""), ("number", "ten"), ("number", {"value": 1, "tolerance": 2}),
        ("number", True), ("letter", "dog"), ("word", "two words"), ("ordering", []), ("ordering", ""),
        ("zebra", {"header": ["a"], "rows": [["1", "2"]]}), ("zebra", "no grid"), ("grid", [[1], [1, 2]]), ("grid", []),
        ("grid", [["1"]]), ("table", []), ("table", "a||b"), ("literal", "f(x)"), ("text", {"a": 1}),
    ],
)  # fmt: skip
def test_a_right_answer_that_cannot_be_one_is_refused(name: str, gold: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        VERIFIERS[name].read(gold)
