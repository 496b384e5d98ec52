"""Simulation: what a small program prints, where a machine ends, what is left on a stack."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from flatout.tasks.domains.made import ByLevel, Made, several

WORDS = [
    "bead",
    "cafe",
    "dice",
    "fade",
    "face",
    "gate",
    "hide",
    "idea",
    "jade",
    "kite",
    "lace",
    "made",
    "nice",
    "oath",
    "page",
    "race",
    "safe",
    "tide",
    "vase",
    "wave",
]


def _assignments(chance: Random, /, *, level: int) -> Made:
    """One variable at level 1, two from level 2."""
    values = {"x": chance.randint(1, 59)} | ({"y": chance.randint(1, 20)} if level > 1 else {})
    lines = [f"{name} = {value}" for name, value in values.items()]
    steps = []
    for _ in range(2 * level - 1):
        name = chance.choice(sorted(values))
        other, sign = chance.choice(sorted(values)), chance.choice("+-")
        n = chance.randint(1, 39)
        from_other = level > 1 and other != name and chance.random() < 0.5
        value = values[other] if from_other else n
        values[name] += value if sign == "+" else -value
        lines.append(f"{name} = {name} {sign} {other if from_other else n}")
        steps.append(f"{name} = {values[name]}")
    shown = chance.choice(sorted(values))
    return _printed([*lines, f"print({shown})"], values[shown], "" if level == 1 else ", ".join(steps) + ".")


def _stack(chance: Random, /, *, level: int) -> Made:
    """Pushes and pops, from level 4 also operations on the top of the stack."""
    stack: list[int] = []
    said, steps = [], []
    for _ in range(2 * level):
        kinds = ["push", "push"] + ["pop"] * (len(stack) > 1)
        if level > 3 and len(stack) > 1:
            kinds += ["add", "swap", "dup"]
        kind = chance.choice(kinds)
        if kind == "push":
            stack.append(chance.randint(0, 9))
            said.append(f"push {stack[-1]}")
        else:
            said.append(kind)
            top = stack.pop()
            if kind == "add":
                stack[-1] += top
            elif kind == "swap":
                stack[-1:] = [top, stack[-1]]
            elif kind == "dup":
                stack += [top, top]
        steps.append(json.dumps(stack))
    note = " add replaces the top two by their sum." if level > 3 else ""
    text = f"An empty stack: {', '.join(said)}.{note} What is on it, from bottom to top, as JSON?"
    return _value(text, stack, " ".join(steps))


def _queue(chance: Random, /, *, level: int) -> Made:
    queue, said, steps = [chance.choice(WORDS)], [], []
    said.append(f"join {queue[0]}")
    for _ in range(2 * level - 1):
        if len(queue) > 1 and chance.random() < 0.4:
            said.append("leave")
            queue.pop(0)
        else:
            queue.append(chance.choice(WORDS))
            said.append(f"join {queue[-1]}")
        steps.append(json.dumps(queue))
    text = f"An empty queue, first in, first out: {', '.join(said)}. Who is in it, from first to last, as JSON?"
    return _value(text, queue, " ".join(steps))


def _machine(chance: Random, /, *, level: int) -> Made:
    states = several(chance, "ABCDEFGH", level)
    rules = {(state, bit): chance.choice(states) for state in states for bit in "01"}
    bits = "".join(chance.choice("01") for _ in range(2 * level))
    here, steps = states[0], []
    for bit in bits:
        here = rules[here, bit]
        steps.append(f"{bit} -> {here}.")
    table = "; ".join(f"{state}: 0 -> {rules[state, '0']}, 1 -> {rules[state, '1']}" for state in states)
    text = f"A machine starts in {states[0]}. {table}. It reads {bits}. In which state does it end?"
    return Made(text=text, gold=here, verifier="word", steps=" ".join(steps))


def _loop(chance: Random, /, *, level: int) -> Made:
    start, stop, add = chance.randint(0, 9), chance.randint(3, level + 3), chance.randint(1, 5)
    divisor = chance.randint(2, 3)
    lines = [f"t = {start}", f"for i in range({stop}):"]
    total, steps = start, []
    if level < 4:
        lines.append(f"    t = t + i * {add}")
    else:
        lines += [f"    if i % {divisor} == 0:", f"        t = t + i * {add}", "    else:", "        t = t - 1"]
    if level > 4:
        lines.append("    if t > 20: t = t - 7")
    for i in range(stop):
        total = total + i * add if level < 4 or i % divisor == 0 else total - 1
        if level > 4 and total > 20:
            total -= 7
        steps.append(f"i = {i}: t = {total}.")
    return _printed([*lines, "print(t)"], total, " ".join(steps))


def _strings(chance: Random, /, *, level: int) -> Made:
    word = chance.choice(WORDS)
    lines, steps = [f"s = '{word}'"], []
    for _ in range(level - 1):
        kind = chance.choice(("reverse", "upper", "add", "drop", "replace"))
        if kind == "reverse":
            word, line = word[::-1], "s = s[::-1]"
        elif kind == "upper":
            word, line = word.upper(), "s = s.upper()"
        elif kind == "add":
            tail = chance.choice(WORDS)[:2]
            word, line = word + tail, f"s = s + '{tail}'"
        elif kind == "drop" and len(word) > 1:
            word, line = word[1:], "s = s[1:]"
        else:
            old, new = chance.choice(word), chance.choice("xyz")
            word, line = word.replace(old, new), f"s = s.replace('{old}', '{new}')"
        lines.append(line)
        steps.append(f"s = '{word}'.")
    return _printed([*lines, "print(repr(s))"], word, " ".join(steps), answer=f"'{word}'")


def _nested(chance: Random, /, *, level: int) -> Made:
    a, b, step = chance.randint(2, 3), chance.randint(2, 4), chance.randint(1, 3)
    found: dict[str, int] = {}
    for i in range(a):
        for j in range(b):
            found[str(i)] = found.get(str(i), 0) + i * j + step
    lines = [
        "d = {}",
        f"for i in range({a}):",
        f"    for j in range({b}):",
        f"        d[str(i)] = d.get(str(i), 0) + i * j + {step}",
        "print(json.dumps(d))",
    ]
    steps = " ".join(f"i = {i}: {' + '.join(str(i * j + step) for j in range(b))} = {found[str(i)]}." for i in range(a))
    return _printed(lines, found, steps)


def _printed(lines: list[str], value: Any, steps: str, *, answer: str | None = None) -> Made:
    text = "\n".join(lines) if len(lines) > 3 else "; ".join(lines)
    return _value(text + ("\nWhat is printed?" if len(lines) > 3 else " prints?"), value, steps, answer=answer)


def _value(text: str, value: Any, steps: str, *, answer: str | None = None) -> Made:
    shown = json.dumps(value)
    return Made(text=text, gold=shown, verifier="literal", steps=steps, answer=answer or shown)


make = ByLevel(
    [_assignments],
    [_assignments, _stack, _machine, _strings],
    [_assignments, _stack, _queue, _machine, _loop, _strings],
    [_assignments, _stack, _queue, _machine, _loop, _strings],
    [_assignments, _stack, _queue, _machine, _loop, _strings, _nested],
)
