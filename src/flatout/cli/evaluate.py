"""`flatout eval`: measures models on tasks. Prints the scores as a table or JSON and records them in the run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatout import limits
from flatout.cli.shared import (
    Adapter,
    AsJson,
    BackendName,
    Dtype,
    MaxTokens,
    ModelName,
    Rows,
    Seed,
    TopP,
    Trust,
    err,
    escaped,
    out,
    path_text,
    print_json,
    require_torch,
    warn,
)
from flatout.errors import FlatoutError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from flatout.engine.opening import Opened
    from flatout.evaluate import Difference, Score
    from flatout.record import Run
    from flatout.sample import Backend, Sampling


def evaluate(
    model: ModelName,
    tasks: Annotated[
        list[str],
        typer.Option(
            help="units, sums, math, logic, simulation, table, stem, gsm8k:FILE, mmlu-stem:FOLDER, "
            "arc-challenge:FOLDER, choice:FILE, jsonl:FILE, guru:FILE, perplexity:FILE …; comma-separated"
        ),
    ],
    limit: Annotated[
        int | None, typer.Option(help="measure at most this many questions of each task", min=1, max=limits.QUESTIONS)
    ] = None,
    samples: Annotated[int, typer.Option(help="answers to each question", min=1, max=limits.SAMPLES)] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the most likely token (default: 0, or 0.7 with several samples)"),
    ] = None,
    top_p: TopP = 1.0,
    max_tokens: MaxTokens = 256,
    seed: Seed = 0,
    against: Annotated[
        str | None,
        typer.Option(
            help="another RUN|MODEL to compare with on the same questions", parser=path_text, metavar="RUN|MODEL"
        ),
    ] = None,
    dtype: Dtype = None,
    rows: Rows = None,
    backend: BackendName = "auto",
    adapter: Adapter = None,
    own_prompt: Annotated[
        bool, typer.Option("--own-prompt", help="use the task's own prompt, not the one that the run measured with")
    ] = False,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model on tasks: accuracy, likelihood of choices, perplexity, each with a 95 % interval."""
    require_torch()
    from flatout.sample import Sampling, backend_of, vocabulary_check
    from flatout.tasks import by_domain, open_task

    specs = [spec for several in tasks for spec in several.split(",") if spec]
    if not specs:
        raise UsageError("--tasks is empty: name at least one task, such as --tasks units")
    for spec in specs:
        open_task(spec)  # mistakes are reported before a model is loaded
    warmth = temperature if temperature is not None else (0.7 if samples > 1 else 0.0)
    if samples > 1 and warmth == 0:
        raise UsageError("--samples above 1 at temperature 0 would all be identical: give a --temperature above 0")
    sampling = Sampling(max_tokens=max_tokens, temperature=warmth, top_p=top_p, seed=seed, logprobs=False)
    chosen = backend_of(backend, sampling=sampling)
    request = Request(specs=specs, sampling=sampling, samples=samples, limit=limit, rows=rows, backend=chosen)
    from flatout.engine.opening import open_model
    from flatout.evaluate import compare

    found: list[list[Score]] = []
    documents = []
    asked = specs
    for name in [model, *([against] if against else [])]:
        opened = open_model(
            name, dtype=dtype, backend=chosen, trust=trust, adapter=adapter, check=vocabulary_check(chosen)
        )
        warn(opened.notices)
        if opened.run is not None and not own_prompt:
            asked, changed = _as_in_the_run(specs, opened.run)
            warn(changed)
        request = replace(request, specs=by_domain(asked))
        scores = _measured(opened, request, quiet=as_json)
        warn(_unfinished(scores, max_tokens=max_tokens))
        document = _document(opened, scores, request)
        _record(opened, document | {"tasks": [score.brief() for score in scores]})
        found.append(scores)
        documents.append(document)
        if not as_json:
            out.print(_scores_table(opened, scores))
        del opened
    differences = [compare(a, b) for a, b in zip(*found, strict=True)] if against else None
    if as_json:
        compared = [None if d is None else asdict(d) for d in differences] if differences is not None else None
        print_json(documents[0] if compared is None else {"models": documents, "differences": compared})
    elif differences is not None:
        out.print("", _differences_table(found[0], differences))


@dataclass(frozen=True, kw_only=True)
class Request:
    """The tasks, and how their answers are sampled."""

    specs: Sequence[str]
    sampling: Sampling
    samples: int
    limit: int | None
    rows: int | None
    backend: Backend


# Options that a run may bring with it: those of generated questions, and the prompt without examples.
_OPTION = r"(?:(?:level|shots|size|form)=\w+|prompt=bare)"
_HARMLESS = re.compile(rf"\?{_OPTION}(?:&{_OPTION})*")


def _as_in_the_run(specs: Sequence[str], run: Run) -> tuple[list[str], list[str]]:
    """The specs with the prompts and options that the run measured the same tasks with, and what to say of it."""
    from flatout.config.tasks import held_out
    from flatout.tasks import with_prompt

    def section(name: str) -> Mapping[str, Any]:
        found = run.config.get(name)
        return found if isinstance(found, Mapping) else {}

    def texts(value: Any) -> list[str]:
        return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []

    rft, asked, said = section("rft"), [], []
    known = [*texts(section("eval").get("tasks")), *(held_out(one) or one for one in texts(section("rl").get("tasks")))]
    task, valid, student, prompt = (
        "".join(texts([rft.get(name)])) or None for name in ("task", "valid", "student_prompt", "prompt")
    )
    if task is not None:
        known.append(with_prompt(valid or held_out(task) or task, student or prompt))
    for spec in specs:
        same = {one for one in known if one.partition("?")[0] == spec}
        chosen = same.pop() if len(same) == 1 else spec
        if chosen != spec and not _HARMLESS.fullmatch(chosen[len(spec) :]):
            said.append(
                f"{spec} uses its own prompt: the run measured {chosen}, whose options may name files, addresses or "
                "functions; if you trust them, name that task"
            )
            chosen = spec
        asked.append(chosen)
        if chosen != spec:
            said.append(f"{spec} is evaluated as {chosen}, as in the run; --own-prompt uses the task's own prompt")
    return asked, said


def _unfinished(scores: Sequence[Score], *, max_tokens: int) -> list[str]:
    """A warning for each task in which answers count as wrong because they did not fit."""
    said = []
    for score in scores:
        cut, long = score.details.get("cut_short", 0), score.details.get("too_long", 0)
        answers = score.n * score.samples
        if cut:
            text = f"{cut} of {answers} answers were cut off after {max_tokens} tokens and are graded as they are"
            said.append(f"{score.task}: {text}; --max-tokens allows longer ones")
        if long:
            said.append(f"{score.task}: {long} of {answers} did not fit the model's window and count as wrong")
    return said


def _measured(opened: Opened, request: Request, *, quiet: bool) -> list[Score]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from flatout.evaluate import evaluate
    from flatout.sample import sampler_of

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=quiet or not err.is_terminal) as bars:
        bar = bars.add_task(escaped(opened.name), total=None)
        scores = evaluate(
            request.specs,
            sampler=sampler_of(opened, backend=request.backend, rows=request.rows),
            tokenizer=opened.tokenizer,
            sampling=replace(request.sampling, stop_ids=opened.stop_ids),
            samples=request.samples,
            limit=request.limit,
            progress=lambda done, of: bars.update(bar, completed=done, total=of),
        )
        return list(scores)


def _differences_table(scores: Sequence[Score], differences: Sequence[Difference | None]) -> Table:
    from flatout.terminal import table
    from flatout.words import number

    drawn = table("Second minus first", "task", "difference", "95 % interval", "n", "McNemar p")
    for score, difference in zip(scores, differences, strict=True):
        cells = ["n/a"] * 4
        if difference is not None:
            scale, digits, unit = (1, 4, "loss per token") if score.metric == "perplexity" else (100, 1, "points")
            span = f"{scale * difference.low:+.{digits}f} to {scale * difference.high:+.{digits}f}"
            value = f"{scale * difference.value:+.{digits}f} {unit}"
            cells = [value, span, f"{difference.n:,}", number(difference.p)]
        elif score.metric == "perplexity":
            cells[0] = "n/a: different tokens; compare bits per byte"
        drawn.add_row(escaped(score.task), *cells)
    return drawn


def _scores_table(opened: Opened, scores: Sequence[Score]) -> Table:
    from flatout.terminal import table
    from flatout.words import interval_text, score_text

    at = "" if opened.step is None else f", step {opened.step}"
    rows = table(
        f"{escaped(opened.name)}{at} ({opened.where})", "task", "metric", "value", "95 % interval", "n", "notes"
    )
    for score in scores:
        rows.add_row(
            escaped(score.task),
            score.metric + (f", mean of {score.samples}" if score.samples > 1 else ""),
            f"[bold]{score_text(score.metric, score.value)}[/]",
            interval_text(score.metric, score.low, score.high),
            f"{score.n:,}" + (f" of {score.of:,}" if score.of is not None and score.of > score.n else ""),
            escaped(", ".join(_notes(score))),
        )
    return rows


def _notes(score: Score) -> list[str]:
    """Facts that qualify a score."""
    from flatout.words import duration, number, percent

    facts = score.details
    said = []
    if score.metric == "perplexity":
        said += [f"loss {facts['loss']:.4f}", f"{number(facts['bits_per_byte'])} bits per byte"]
    if "answered" in facts:
        said.append(f"{percent(facts['answered'])} in the requested format")
    if once := facts.get("solved_once"):
        said.append(f"{percent(once['value'])} solved at least once in {score.samples}")
    for key, words in (
        ("cut_short", "cut off at the length limit"),
        ("too_long", "longer than the context window"),
        ("killed", "graders killed"),
    ):
        if facts.get(key):
            said.append(f"{facts[key]} {words}")
    for name, value in (facts.get("measures") or {}).items():
        said.append(f"{name} {number(value, digits=3)}")
    if facts.get("adapters"):
        said.append("answered by " + ", ".join(f"{name} {count}" for name, count in facts["adapters"].items()))
    if facts.get("tokens"):
        said.append(f"{facts['tokens'] / score.seconds:,.0f} tokens/s")
    return [*said, duration(score.seconds)]


def _document(opened: Opened, scores: Sequence[Score], request: Request) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "model": opened.name,
        "step": opened.step,
        "notices": list(opened.notices),
        "on": opened.where,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "samples": request.samples,
        "limit": request.limit,
        "template": opened.tokenizer.has_template,
        "tasks": [score.to_json() for score in scores],
    }


def _record(opened: Opened, document: dict[str, Any]) -> None:
    """Adds the scores to the run's events."""
    if opened.run is None:
        return
    from flatout.record import event_of, redact

    try:
        opened.run.note(event_of("tasks", document, step=opened.step, source="the scores:"))
    except FlatoutError as error:  # the run is being trained, or its disk is full: the scores are still printed
        err.print(
            f"not recorded in the run: {escaped(redact(str(error)))}", style="yellow", highlight=False, soft_wrap=True
        )
