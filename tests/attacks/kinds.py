"""The attacks, by what they aim at."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml
from tests.attacks import Attack, Trial, hostile
from tests.attacks.ground import TINY, TUNED
from tests.attacks.serving import serving

# -- configurations ------------------------------------------------------------------------------------------


@cache
def schema() -> Mapping[str, Mapping[str, Any]]:
    """Every setting by its dotted key, with its part of the schema."""
    from flatout.config import schema as published

    document, found = published(), {}
    for section, entry in document["properties"].items():
        reference = next((one["$ref"] for one in [entry, *entry.get("anyOf", [])] if "$ref" in one), None)
        leaves = {"": entry} if reference is None else document["$defs"][reference.rpartition("/")[2]]["properties"]
        found.update({f"{section}.{name}".rstrip("."): leaf for name, leaf in leaves.items()})
    return found


def bounds(key: str) -> tuple[float, float] | None:
    """The smallest and largest value of a number."""
    for node in [schema()[key], *schema()[key].get("anyOf", [])]:
        if node.get("type") in ("integer", "number"):
            low = node.get("minimum", node.get("exclusiveMinimum", 0) + (1 if node["type"] == "integer" else 1e-9))
            return low, node.get("maximum", node.get("exclusiveMaximum", 1) * 0.999999)
    return None


def check(t: Trial, config: str, *overrides: str) -> None:
    """One of the commands that read a configuration and train nothing."""
    command = t.random.choice(
        (["config", "validate"], ["config", "show"], ["plan"], ["plan", "--json"], ["train", "--dry-run"])
    )
    t.run(*command, config, *overrides)


def settings_text(t: Trial) -> None:
    """Hostile texts for settings, in the file and on the command line."""
    t.copy("rows.jsonl")
    base = t.random.choice((TINY, TUNED, {**TINY, "recipe": "rl", "rl": {"tasks": ["units"]}}))
    keys = t.random.sample(sorted(schema()), t.random.choice((1, 1, 2, 4)))
    if t.random.random() < 0.5:
        content = {section: dict(one) if isinstance(one, dict) else one for section, one in base.items()}
        for key in keys:
            section, _, name = key.rpartition(".")
            given = t.random.choice((hostile.text, hostile.value))(t.random)
            (content.setdefault(section, {}) if section else content)[name] = given
        t.write("c.yaml", hostile.dumped(content) if t.random.random() < 0.5 else yaml_text(content))
        check(t, "c.yaml")
    else:
        t.write("c.yaml", yaml.safe_dump(base))
        check(t, "c.yaml", *(f"{key}={hostile.argument(t.random)}" for key in keys))


def yaml_text(content: Any) -> str:
    """YAML with the hostile texts as they are, unquoted, so that some of them are tags, anchors and comments."""
    try:
        return "".join(
            f"{section}:\n" + "".join(f"  {name}: {inner}\n" for name, inner in one.items())
            if isinstance(one, dict)
            else f"{section}: {one}\n"
            for section, one in content.items()
        )
    except ValueError:  # more digits than Python prints
        return hostile.dumped(content)


def settings_file(t: Trial) -> None:
    """A damaged file of settings, and what other programs write under that name."""
    text = yaml.safe_dump(t.random.choice((TINY, TUNED))).encode()
    bombs = (
        b"a: &a [x,x,x,x]\n"
        + b"".join(b"%c: &%c [*%c,*%c,*%c]\n" % (98 + i, 98 + i, *[97 + i] * 3) for i in range(20)),
        b"- " * 100_000,
        b"{" * 100_000,
        b"model: !!python/object/apply:os.system ['touch EXECUTED']\n",
        b"model: !!python/object/new:subprocess.Popen [['touch','EXECUTED']]\n",
        "\ufeffmodel: {layers: 1}\n".encode("utf-16"),
        b"%YAML 9.9\n---\n" + text,
        b"a" * (2 << 20),
        text + b"---\n" + text,
        b"\x89PNG\r\n\x1a\n",
    )
    content = t.random.choice(bombs) if t.random.random() < 0.3 else hostile.spoiled(t.random, text)
    t.write("c.yaml", content)
    check(t, "c.yaml")


def counts(t: Trial) -> None:
    """Numbers at, inside and beyond their limits."""
    t.write("c.yaml", yaml.safe_dump(TINY))
    numbers = [key for key in schema() if bounds(key)]
    given = []
    for key in t.random.sample(numbers, t.random.choice((1, 1, 2, 5))):
        low, high = bounds(key) or (0, 1)
        inside = t.random.choice((low, high, (low + high) / 2, low * 2, high / 3))
        inside = int(inside) if "integer" in str(schema()[key]) else inside
        given.append(f"{key}={inside if t.random.random() < 0.6 else hostile.number(t.random)}")
    check(t, "c.yaml", *given)


# Counts of which the largest must train as well as any other.
HARMLESS = (
    *("plan.workers", "plan.prefetch", "plan.threads", "plan.loss_chunk", "eval.every", "eval.tokens"),
    *(
        "eval.patience",
        "save.every",
        "save.keep",
        "log.every",
        "train.hang_s",
        "seed",
        "criteria.saves",
        "target.val_loss",
    ),
)


def counts_trained(t: Trial) -> None:
    """A training of two steps with a number at its limit."""
    t.write("c.yaml", yaml.safe_dump(TINY))
    key = t.random.choice(HARMLESS)
    low, high = bounds(key) or (0, 1)
    most = t.random.choice((low, high, high)) if key != "plan.threads" else t.random.choice((low, 64))
    shown = int(most) if "integer" in str(schema()[key]) else most
    ended = t.run("train", "c.yaml", "--run", "run", "train.steps=2", f"{key}={shown}")
    if ended.code == 0:
        t.run(t.random.choice(("doctor", "report", "runs")), "run" if t.random.random() < 0.9 else ".")


# -- paths ---------------------------------------------------------------------------------------------------

COMMANDS = (
    *(
        "plan PATH",
        "train PATH",
        "train c.yaml --run PATH --dry-run",
        "launch PATH",
        "launch c.yaml --run PATH --dry-run",
    ),
    *("export PATH --to out", "export run --to PATH", "doctor PATH", "doctor --log PATH", "doctor run --json PATH"),
    *("eval PATH --tasks units --limit 1", "eval run --tasks jsonl:PATH --limit 1 --max-tokens 1"),
    *(
        "eval run --tasks units?prompt=PATH --limit 1 --max-tokens 1",
        "chat PATH",
        "compare PATH PATH",
        "compare run PATH",
    ),
    *("report PATH", "report run -o PATH", "report run --format md -o PATH", "watch PATH --once", "runs PATH"),
    *("examples pretrain-demo --to PATH", "data prepare PATH --to out", "data prepare embedded --to PATH"),
    *("data prepare text.txt --to out --tokenizer PATH", "data prepare text.txt --to out --valid-path PATH"),
    *("data show PATH", "config validate PATH", "config show PATH", "tune PATH --revert", "sample PATH"),
    *("train c.yaml --dry-run data.source=text data.path=PATH", "config validate c.yaml data.tokenizer=PATH"),
    *(
        "train c.yaml --dry-run data.cache=PATH",
        "plan c.yaml model.name=PATH",
        "config validate c.yaml eval.tasks=PATH",
    ),
    *(
        "data show tuned.yaml data.path=PATH",
        "data show tuned.yaml data.tokenizer=PATH",
        "train c.yaml --dry-run run=PATH",
    ),
    *(
        "train c.yaml --run PATH train.steps=1",
        "train c.yaml train.steps=1 data.cache=PATH",
        "watch run --once --json PATH",
    ),
)
WRITING = ("--to PATH", "--run PATH", "-o PATH", "--json PATH", "cache=PATH", "run=PATH")


def paths(t: Trial) -> None:
    """Every argument that names a file, with names of everything that is not the file that is wanted."""
    r = t.random
    t.write("c.yaml", yaml.safe_dump(TINY))
    for name in ("tuned.yaml", "rows.jsonl", "talk", "text.txt", "run"):
        t.copy(name)
    command = r.choice(COMMANDS)
    special = ("loop", "fifo", "dangling", "dir", "empty", "binary", "unreadable", "deep", "file-as-folder/x", "socket")
    path = r.choice(special) if r.random() < 0.5 else hostile.argument(r)
    if any(one in command for one in WRITING) and path.startswith(("/", "~", "..")) and not path.startswith("/dev/"):
        path = f"{'n' * r.choice((200, 240, 250, 255))}"
    os.symlink("loop", t.folder / "loop")
    os.mkfifo(t.folder / "fifo")
    os.symlink("nowhere", t.folder / "dangling")
    t.write("dir/inner/file.txt", "x")
    t.write("empty", b"")
    t.write("binary", r.randbytes(5000))
    t.write("unreadable", "x").chmod(0)
    t.write("file-as-folder", "x")
    deep = t.folder / "deep"
    for _ in range(40):
        deep = deep / ("d" * 60)
    deep.mkdir(parents=True)
    t.keep(t.folder / "dir")
    t.keep(t.folder / "talk")
    if not any(one in command for one in WRITING):  # a file that is named as output is replaced
        t.keep(t.folder / "binary")
    if path == "deep":
        path = str(deep.relative_to(t.folder)) + "/" + "d" * r.choice((200, 250, 1600))
    t.run(*(one.replace("PATH", path) for one in command.split(" ")), hang_s=60)


# -- templates, rows, tasks ----------------------------------------------------------------------------------

BASES = (
    "'<'",
    "'a '",
    "'http://a.b '",
    "messages",
    "messages|string",
    "'x' * 1000",
    "range(1000)|list",
    "'%s'",
    "'{}'",
)
SIZES = ("10", "1000", "1000000", "100000000", "10**9", "2**40", "9**9**9")
FILTERS = (
    *(
        "striptags",
        "urlize",
        "wordwrap(1)",
        "center(100000000)",
        "indent(100000)",
        "upper",
        "title",
        "escape",
        "forceescape",
    ),
    *(
        "replace('a', 'aaaaaaaaaa')",
        "join('x' * 1000)",
        "list",
        "sort",
        "unique|list",
        "batch(1)|list",
        "slice(100000)|list",
    ),
    *(
        "groupby('x')|list",
        "tojson",
        "pprint",
        "xmlattr",
        "filesizeformat",
        "format('a' * 100000)",
        "truncate(5)",
        "wordcount",
    ),
    *(
        "map('upper')|join",
        "select|list",
        "random",
        "reverse|list",
        "sum",
        "length",
        "string",
        "safe",
        "urlencode",
        "attr('x')",
    ),
)
JUMPS = (
    "cycler.__init__.__globals__.os.popen('touch EXECUTED').read()",
    "''.__class__.__mro__[1].__subclasses__()",
    "lipsum.__globals__['os'].system('touch EXECUTED')",
    "self.__init__.__globals__.__builtins__.__import__('os').system('touch EXECUTED')",
    "messages.__class__.__base__.__subclasses__()",
    "('{0.__class__.__init__.__globals__}').format(messages)",
    "(messages|attr('__class__')|attr('__mro__'))",
    "namespace.__init__.__globals__['__builtins__']['exec']('import os; os.system(\"touch EXECUTED\")')",
    "raise_exception.__globals__['os'].system('touch EXECUTED')",
    "strftime_now.__globals__['os'].system('touch EXECUTED')",
    "joiner.__init__.__globals__",
    "'%c' * 1000 % range(1000)",
    "raise_exception('\x1b[2J')",
    "undefined.a.b.c",
    "strftime_now('%' * 100000)",
)
WRAPPINGS = (
    "{{{{ {0} }}}}",
    "{{% for i in range(100000) %}}{{{{ {0} }}}}{{% endfor %}}",
    "{{% for i in range(99999) %}}{{% for j in range(99999) %}}{{% endfor %}}{{% endfor %}}{{{{ {0} }}}}",
    "{{% set x = {0} %}}{{{{ x }}}}{{{{ x }}}}",
    "{{% macro m(n) %}}{{{{ m(n + 1) }}}}{{% endmacro %}}{{{{ m({0}) }}}}",
    "{{% set ns = namespace(x='aa') %}}{{% for i in range(60) %}}{{% set ns.x = ns.x ~ ns.x %}}{{% endfor %}}"
    "{{{{ {0} }}}}",
    "{{% if {0} %}}{{% include '/etc/passwd' %}}{{% endif %}}",
    "{{% import 'os' as os %}}{{{{ {0} }}}}",
    "{{% filter wordwrap(1) %}}{{{{ {0} }}}}{{% endfilter %}}",
    "{{{{ [{0}] * 100000 }}}}",
    "{{% call(x) {0} %}}{{% endcall %}}",
)


def expression(t: Trial) -> str:
    r = t.random
    if r.random() < 0.3:
        return r.choice(JUMPS)
    base = f"({r.choice(BASES)}{f' * {r.choice(SIZES)}' if r.random() < 0.8 else ''})"
    return "|".join((base, *(r.choice(FILTERS) for _ in range(r.choice((1, 1, 2, 3))))))


def templates(t: Trial) -> None:
    """Templates of others: beside a tokenizer, of the rows, of a model that is chatted with."""
    r = t.random
    template = r.choice(WRAPPINGS).format(expression(t)) if r.random() < 0.9 else hostile.text(r) * 20
    t.write("rows.jsonl", (t.ground / "rows.jsonl").read_text())
    settings = {**TUNED, "data": {**TUNED["data"], "on_bad_row": r.choice(("skip", "stop"))}}
    t.copy("talk")
    where = r.choice(("beside", "config", "row", "model", "several"))
    if where == "row":
        settings["data"] |= {"template": template, "path": "questions.jsonl", "completion_field": "answer"}
        t.copy("questions.jsonl")
    elif where == "beside":
        t.write("talk/chat_template.jinja", template)
    elif where in ("config", "several"):
        path = t.folder / "talk" / "tokenizer_config.json"
        several = [{"name": "default", "template": template}, {"name": "tool_use", "template": template}]
        made = json.loads(path.read_text()) | {"chat_template": several if where == "several" else template}
        path.write_text(json.dumps(made))
    if where == "model":
        t.copy("model")
        t.write("model/chat_template.jinja", template)
        t.run("chat", "model", "--max-tokens", "4", typed=b"hello\n/reset\nagain\n")
        return
    t.write("c.yaml", yaml.safe_dump(settings))
    t.run("data", "show", "c.yaml", "-n", "1", *r.choice(((), ("--json",))))


def row(t: Trial) -> str:
    """A line that is read as a row."""
    r = t.random
    turn = {"role": r.choice(("user", "assistant", "system", "tool", "x", "")), "content": "hello"}
    match r.randrange(9):
        case 0:
            return json.dumps(
                {"messages": [turn, {"role": "assistant", "content": "b"}] * r.choice((10, 500, 4000, 9000))}
            )
        case 1:
            big = "word " * r.choice((1000, 200_000, 1_000_000))
            return json.dumps({"messages": [{"role": "user", "content": big}, {"role": "assistant", "content": "b"}]})
        case 2:
            return hostile.dumped({"messages": hostile.value(r)})
        case 3:
            return hostile.dumped(hostile.value(r))
        case 4:
            good = {"messages": [turn, {"role": "assistant", "content": "b"}], "prompt": "p", "completion": "c"}
            return hostile.dumped(hostile.spoiled_json(r, good, times=r.choice((1, 2, 3))))
        case 5:
            return hostile.nested(r.choice((900, 100_000)))
        case 6:
            return '{"messages": ' * r.choice((10, 3000))
        case 7:
            return json.dumps({"prompt": hostile.text(r), "completion": hostile.text(r) * 100})
        case _:
            parts = [{"type": "text", "text": hostile.text(r)}, {"type": "image", "image": "/etc/passwd"}] * r.choice(
                (1, 500)
            )
            return json.dumps({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "b"}]})


def rows(t: Trial) -> None:
    """Rows of all formats, right and wrong, in all kinds of files."""
    r = t.random
    t.copy("talk")
    lines = [row(t) for _ in range(r.choice((1, 1, 3, 10)))]
    good = (t.ground / "rows.jsonl").read_text().splitlines()[: r.choice((0, 20))]
    content = "\n".join([*lines, *good]).encode(errors="surrogatepass")
    suffix = r.choice((".jsonl", ".jsonl", ".json", ".csv", ".tsv", ".jsonl.gz", ".jsonl.xz", ".parquet", ".arrow"))
    if suffix.endswith(".gz"):
        import gzip

        content = gzip.compress(content * r.choice((1, 200))) if len(content) < 1 << 20 else gzip.compress(content)
    if suffix.endswith(".xz"):
        import lzma

        content = lzma.compress(content)
    t.write(f"rows{suffix}", hostile.spoiled(r, content) if r.random() < 0.2 else content)
    data = {**TUNED["data"], "path": f"rows{suffix}", "on_bad_row": r.choice(("skip", "stop")), "max_bad_share": 1.0}
    data |= {"too_long": r.choice(("drop", "truncate", "stop")), "as_chat": r.choice((None, True, False))}
    if r.random() < 0.5:
        data.pop("source")
    recipe = r.choice(("sft", "sft", "dpo"))
    t.write("c.yaml", yaml.safe_dump({**TUNED, "recipe": recipe, "data": data}))
    t.run("data", "show", "c.yaml", "-n", "2", *r.choice(((), ("--json",))), hang_s=90)


def tasks(t: Trial) -> None:
    """Specs of tasks and their files."""
    r = t.random
    names = (
        "units",
        "sums",
        "math",
        "code",
        "logic",
        "table",
        "sentiment",
        "jsonl",
        "gsm8k",
        "choice",
        "mbpp",
        "humaneval",
    )
    names += (
        "guru",
        "math500",
        "cruxeval",
        "codeio",
        "arc-agi",
        "bbh",
        "perplexity",
        "tatqa",
        "scibench",
        "mmlu-stem",
        "qa",
    )
    questions = (t.ground / "questions.jsonl").read_bytes()
    lines = [json.loads(line) for line in questions.splitlines()]
    spoilt = "\n".join(hostile.dumped(hostile.spoiled_json(r, one, times=2)) for one in lines[:5])
    t.write("q.jsonl", r.choice((spoilt, row(t), hostile.spoiled(r, questions), questions)))
    spec = f"{r.choice(names)}{r.choice((':q.jsonl', ':q.jsonl', ':train', ':valid', '', ':' + hostile.argument(r)))}"
    options = ("level", "size", "shots", "form", "prompt", "grader", "part", "share", "x", "timeout")
    if r.random() < 0.5:
        spec += "?" + "&".join(f"{r.choice(options)}={hostile.argument(r)}" for _ in range(r.choice((1, 2))))
    if r.random() < 0.5:
        t.write("c.yaml", yaml.safe_dump({**TINY, "eval": {"every": 2, "tasks": [spec], "task_limit": 2}}))
        t.run("config", "validate", "c.yaml")
    else:
        t.copy("run")
        t.run("eval", "run", "--tasks", spec.replace(",", ""), "--limit", "2", "--max-tokens", "2")


# -- output --------------------------------------------------------------------------------------------------

PRINTING = (
    *(
        "runs .",
        "runs . --json",
        "report run -o -",
        "report run --format md -o -",
        "report run --json",
        "config schema",
    ),
    *(
        "config show c.yaml",
        "config show c.yaml --json",
        "config validate c.yaml",
        "watch run --once",
        "watch --once --json",
    ),
    *(
        "plan c.yaml",
        "plan c.yaml --json",
        "doctor run",
        "doctor run --json -",
        "compare run run2",
        "examples",
        "hardware",
    ),
    *("compare run run2 --json", "doctor --log train.log", "data show tuned.yaml -n 1", "data show tuned.yaml --json"),
    *(
        "examples pretrain-demo",
        "--version",
        "--help",
        "train --help",
        "doctor run --json /dev/full",
        "report run -o /dev/full",
    ),
    *("train nowhere.yaml", "plan c.yaml x=1", "hardware --json", "train c.yaml --dry-run", "eval run --tasks nothing"),
    *("train c.yaml --run new train.steps=1", "data prepare text.txt --to shards", "export run --to out", "report run"),
)
REDIRECTED = (
    *(
        ">/dev/full",
        "2>/dev/full",
        ">/dev/full 2>&1",
        ">&-",
        "2>&-",
        ">&- 2>&-",
        "</dev/null >&-",
        "<&-",
        "<&- >&- 2>&-",
    ),
    *("| true", "| head -c 1", "2>&1 | head -c 1", ">/dev/null", "| sh -c 'exec <&-; sleep 0.1'"),
)


def output(t: Trial) -> None:
    """Output that is full, closed, or a pipe that nobody reads."""
    r = t.random
    t.write("c.yaml", yaml.safe_dump(TINY))
    for name in ("tuned.yaml", "rows.jsonl", "talk", "run", "train.log", "text.txt"):
        t.copy(name)
    t.copy("run", "run2")
    t.keep(t.folder / "run2")
    environment = r.choice(
        ({}, {}, {"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}, {"TERM": "xterm-256color"})
    )
    t.run(*r.choice(PRINTING).split(" "), fresh=True, shell=r.choice(REDIRECTED), environment=environment)


# -- run folders ---------------------------------------------------------------------------------------------

READING = (
    *(
        "doctor RUN",
        "doctor RUN --json -",
        "watch RUN --once",
        "watch RUN --once --json",
        "report RUN --format md -o -",
    ),
    *("report RUN -o r.html", "report RUN --json", "runs .", "runs . --json", "compare RUN other", "compare other RUN"),
    *("config validate RUN/config.yaml", "plan c.yaml model.name=RUN", "data show c2.yaml", "chat RUN --max-tokens 2"),
    *("eval RUN --tasks units --limit 1 --max-tokens 2", "export RUN --to out"),
)


def reading(t: Trial, folder: str) -> None:
    t.copy("run", "other")
    t.write("c.yaml", yaml.safe_dump({**TINY, "model": {"name": folder}}))
    t.write("c2.yaml", yaml.safe_dump({**TUNED, "model": folder, "data": {**TUNED["data"], "tokenizer": "byte"}}))
    t.copy("rows.jsonl")
    for command in t.random.sample(READING, 2):
        t.run(*(one.replace("RUN", folder) for one in command.split(" ")), typed=b"hi\n")


def escapes(t: Trial) -> None:
    """Control characters and hostile values in the records of a run."""
    from flatout.record.sealed import seal

    r = t.random
    run = t.copy(r.choice(("run", "tuned")), "run")

    def text(_: object) -> Any:
        return r.choice(
            ("\x1b[2J\x1b[31mred", "\x1b]0;t\x07", "\x9b31m", "a\rb", "\u202eb", "\x08\x08")
        ) + hostile.text(r)

    for path in r.sample(sorted(run.rglob("*.json*")), 3):
        if path.suffix == ".jsonl":
            lines = path.read_text().splitlines()
            kept = [
                hostile.dumped(hostile.spoiled_json(r, json.loads(line), new=text if r.random() < 0.8 else None))
                if r.random() < 0.5
                else line
                for line in lines
            ]
            path.write_text("\n".join(kept) + "\n", errors="replace")
            continue
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            continue
        sealed = found.pop("checksum", None) is not None
        found = hostile.spoiled_json(r, found, times=r.choice((1, 3)), new=text if r.random() < 0.8 else None)
        plain = isinstance(found, dict) and "RAW" not in repr(found)
        try:
            path.write_bytes(
                seal(found, name=path.name) if sealed and plain else hostile.dumped(found).encode(errors="replace")
            )
        except (ValueError, RecursionError, TypeError):
            path.write_text(hostile.dumped(found), errors="replace")
    if r.random() < 0.3:
        run = run.rename(run.with_name(r.choice(("a\x1b[31mb", "[bold]", "-x", "x y", "%s", "\u202ea", "a\nb"))))
    reading(t, f"./{run.name}" if run.name.startswith("-") else run.name)


def damage(t: Trial) -> None:
    """A run folder with damaged, missing, exchanged and linked files: nothing of it is lost by reading it."""
    r = t.random
    run = t.copy(r.choice(("run", "tuned")), "run")
    files = [path for path in sorted(run.rglob("*")) if path.is_file()]
    for path in r.sample(files, r.choice((1, 1, 2, 4))):
        match r.randrange(8):
            case 0:
                path.unlink()
            case 1:
                path.unlink()
                path.symlink_to(r.choice(("/etc/passwd", "/dev/zero", path.name, "../../other/plan.json")))
            case 2:
                path.unlink()
                os.mkfifo(path)
            case 3:
                path.unlink()
                path.mkdir()
            case 4:
                shutil.copy(
                    r.choice([one for one in files if one.is_file() and not one.is_symlink()] or [path]), t.folder / "x"
                )
                path.write_bytes((t.folder / "x").read_bytes())
            case 5:
                path.write_bytes(b"cposix\nsystem\n(S'touch EXECUTED'\ntR.")
            case _:
                path.write_bytes(hostile.spoiled(r, path.read_bytes()))
    t.keep(run)
    reading(t, "run")


def resumed(t: Trial) -> None:
    """A run that is killed, again and again, and resumed; what was saved stays, and it ends."""
    r = t.random
    t.write("c.yaml", yaml.safe_dump(TINY))
    saved: set[str] = set()
    for _ in range(r.choice((1, 2, 3))):
        more = ["--resume"] if r.random() < 0.5 or (t.folder / "run" / "plan.json").exists() else []
        t.run("train", "c.yaml", "--run", "run", *more, "train.steps=40", "eval.every=20", kill_s=r.uniform(0.05, 6.0))
        now = {path.name for path in (t.folder / "run" / "checkpoints").glob("step-*")}
        if saved and not now:
            t.fault(f"lost: checkpoints {sorted(saved)}")
        saved = now
    begun = (t.folder / "run" / "config.yaml").exists()
    ended = t.run(
        "train", "c.yaml", "--run", "run", *(["--resume"] if begun else []), "train.steps=40", "eval.every=20"
    )
    if ended.code != 0:
        t.fault(f"a killed run does not go on: {ended.code} {ended.err[-400:]!r}")


def resumed_damaged(t: Trial) -> None:
    """A damaged run is resumed: it goes on from what is sound, or says why not, and its checkpoints stay."""
    r = t.random
    run = t.copy("run")
    for path in r.sample([path for path in sorted(run.rglob("*")) if path.is_file()], r.choice((1, 2))):
        if r.random() < 0.3:
            path.unlink()
        else:
            path.write_bytes(hostile.spoiled(r, path.read_bytes()))
    t.write("c.yaml", yaml.safe_dump(TINY))
    t.run("train", "c.yaml", "--run", "run", "--resume", "train.steps=8")


# -- the rest ------------------------------------------------------------------------------------------------


def serve(t: Trial) -> None:
    """Requests to the server, each on a connection of its own."""
    serving(t)


def log_line(t: Trial) -> str:
    r = t.random
    words = (
        "step",
        "loss",
        "lr",
        "tokens/s",
        "it/s",
        "s/it",
        "epoch",
        "eval_loss",
        "grad_norm",
        "GPU util",
        "MFU",
        "mem",
    )
    parts = [
        f"{r.choice(words)}{r.choice((' ', '=', ': ', ':'))}{hostile.number(r)}" for _ in range(r.choice((1, 3, 8)))
    ]
    return r.choice((" | ", ", ", " ", "\t")).join(parts)


def logs(t: Trial) -> None:
    """Logs of other tools, damaged, enormous, and with control characters."""
    r = t.random
    sound = (t.ground / "train.log").read_bytes()
    lines = [log_line(t) for _ in range(r.choice((1, 50, 2000)))]
    match r.randrange(7):
        case 0:
            content = hostile.spoiled(r, sound)
        case 1:
            content = "\n".join(lines).encode(errors="replace")
        case 2:
            content = sound * r.choice((100, 2000))
        case 3:
            content = (log_line(t) * r.choice((100, 30_000))).encode(errors="replace")
        case 4:
            content = "\n".join(f"{{'loss': {hostile.number(r)}, 'step': {i}}}" for i in range(500)).encode()
        case 5:
            content = "\n".join(hostile.dumped({"step": i, "loss": hostile.value(r)}) for i in range(50)).encode(
                errors="replace"
            )
        case _:
            content = b"".join(line + hostile.text(r).encode(errors="replace") + b"\n" for line in sound.splitlines())
    t.write("x.log", content)
    more = []
    for option in r.sample(("--on", "--params", "--target-loss"), r.choice((0, 1, 2))):
        known = {
            "--on": ("H100x8", "A100-80GBx1", "H100x99999999999", "cpu", "x"),
            "--params": ("124M", "1B", "0", "1e99B"),
        }
        choices = known.get(option, ("2.0", "-1", "nan", "1e400"))
        more += [f"{option}={r.choice(choices) if r.random() < 0.6 else hostile.argument(r)}"]
    t.run("doctor", "--log", "x.log", *more)


OPTIONS = (
    *(
        "chat run --temperature=N --max-tokens=N",
        "chat run --top-p=N --seed=N",
        "chat run --serve --port=N",
        "watch --once --interval=N",
    ),
    *(
        "eval run --tasks units --limit=N --samples=N",
        "eval run --tasks units --temperature=N --max-tokens 1",
        "export run --step=N --to o",
    ),
    *(
        "doctor run --steps=N",
        "doctor run --seconds=N --window=N",
        "doctor run --prove --repeats=N",
        "launch c.yaml --ranks=N --dry-run",
    ),
    *(
        "launch c.yaml --nodes=N --on torchrun --dry-run",
        "launch c.yaml --on slurm --gpus=N --cpus=N --dry-run",
        "watch --once --port=N",
    ),
    *(
        "launch c.yaml --on slurm --memory=N --time=N --partition=N --dry-run",
        "launch c.yaml --restarts=N --dry-run",
        "runs N",
    ),
    *(
        "ablate c.yaml --blocks=N --steps=N --budget=N --only N",
        "tune c.yaml --trials=N --budget=N --search N",
        "plan c.yaml --on=N",
    ),
    *(
        "plan c.yaml --on=H100xN",
        "data prepare text.txt --to o --valid-share=N",
        "data prepare text.txt --to o --max-bad-share=N --seed=N",
    ),
    *(
        "data show tuned.yaml -n N",
        "compare run run2 --loss-margin=N",
        "export run --to o --dtype=N",
        "report run --format=N",
        "examples N",
    ),
    *(
        "doctor --log train.log --on=N --params=N --target-loss=N",
        "launch c.yaml --rendezvous=N --on torchrun --nodes 2 --dry-run",
        "N",
    ),
    *(
        "eval run --tasks N",
        "chat run --backend=N",
        "chat run --adapter=N --system=N",
        "config N",
        "data N",
        "train c.yaml N --dry-run",
    ),
)


def options(t: Trial) -> None:
    """Values of options that are no use: every one of them is refused or works."""
    r = t.random
    t.write("c.yaml", yaml.safe_dump(TINY))
    for name in ("tuned.yaml", "rows.jsonl", "talk", "run", "train.log", "text.txt"):
        t.copy(name)
    t.copy("run", "run2")
    t.keep(t.folder / "run2")
    while True:
        command = r.choice(OPTIONS).split(" ")
        given = [one.replace("N", hostile.argument(r)) if "N" in one else one for one in command]
        # What would only work for long is asked for nothing.
        if command[0] in ("ablate", "tune") and not any(one.startswith("--budget=") and len(one) > 40 for one in given):
            given.append("x=1")
        if "--serve" in given:
            given.append("--system=x")
        break
    if command[0] == "eval" and "--max-tokens" not in given:
        given += ["--max-tokens", "1", "--limit", "1"]
    t.run(*given, typed=b"hi\n", hang_s=90)


def history(t: Trial) -> None:
    """The history of a configuration that `tune --apply` edited."""
    r = t.random
    text = yaml.safe_dump(TINY)
    t.write("c.yaml", text)
    t.write("c.yaml.history/0001.yaml", hostile.spoiled(r, text.encode()))
    note: dict[str, Any] = {
        "after": __import__("hashlib").sha256(text.encode()).hexdigest(),
        "values": {"plan.workers": 1},
    }
    t.write("c.yaml.history/0001.json", hostile.dumped(note if r.random() < 0.5 else hostile.spoiled_json(r, note)))
    if r.random() < 0.3:
        os.symlink("/etc/passwd", t.folder / "c.yaml.history" / "0002.yaml")
    t.run("tune", "c.yaml", "--revert")


def models(t: Trial) -> None:
    """A model of others: its config.json, tokenizer and weights."""
    r = t.random
    model = t.copy("model")
    for path in r.sample(sorted(model.iterdir()), r.choice((1, 1, 2))):
        if path.suffix == ".json" and r.random() < 0.7:
            found = json.loads(path.read_text())
            path.write_bytes(
                hostile.dumped(hostile.spoiled_json(r, found, times=r.choice((1, 3)))).encode(errors="replace")
            )
        else:
            path.write_bytes(hostile.spoiled(r, path.read_bytes()))
    if r.random() < 0.3:
        t.write("model/own.py", "open('EXECUTED', 'w')")
        path = model / "config.json"
        text = path.read_text(errors="replace").strip()
        path.write_text(
            text.removesuffix("}") + ', "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}'
        )
    t.write("c.yaml", yaml.safe_dump({**TUNED, "model": "model", "data": {**TUNED["data"], "tokenizer": "byte"}}))
    t.copy("rows.jsonl")
    command = r.choice(
        (
            "plan c.yaml",
            "data show c.yaml -n 1",
            "eval model --tasks units --limit 1 --max-tokens 2",
            "chat model --max-tokens 2",
        )
    )
    t.run(*command.split(" "), typed=b"hi\n")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """`share`: how many of a hundred trials are of it; `runs`: whether they start from trained runs."""

    attack: Attack
    share: int
    runs: bool = True


KINDS: Mapping[str, Kind] = {
    "settings-text": Kind(attack=settings_text, share=9, runs=False),
    "settings-file": Kind(attack=settings_file, share=5, runs=False),
    "counts": Kind(attack=counts, share=9, runs=False),
    "counts-trained": Kind(attack=counts_trained, share=2, runs=False),
    "paths": Kind(attack=paths, share=12),
    "templates": Kind(attack=templates, share=9),
    "rows": Kind(attack=rows, share=8, runs=False),
    "tasks": Kind(attack=tasks, share=5),
    "output": Kind(attack=output, share=8),
    "escapes": Kind(attack=escapes, share=7),
    "damage": Kind(attack=damage, share=6),
    "resumed": Kind(attack=resumed, share=1, runs=False),
    "resumed-damaged": Kind(attack=resumed_damaged, share=1),
    "serve": Kind(attack=serve, share=6),
    "logs": Kind(attack=logs, share=6, runs=False),
    "options": Kind(attack=options, share=8),
    "history": Kind(attack=history, share=1, runs=False),
    "models": Kind(attack=models, share=4),
}
