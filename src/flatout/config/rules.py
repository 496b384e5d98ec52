"""Rules that involve several settings; the loader reports violations together with all other mistakes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from flatout import custom, limits
from flatout.config import slices
from flatout.config.recipes import OF_SOME, RECIPES, recipes_that
from flatout.config.settings import DataSettings, EvalSettings, LoraSettings, ModelSettings, Settings
from flatout.config.tasks import held_out, unknown_task

# The keys that are allowed together with `model.name`; all other keys of the section describe a shape.
OF_NAME = ("name", "weights", "revision", "trust")

BYTE_IDS = 257  # all bytes and EOS


@dataclass(frozen=True, kw_only=True)
class Breach:
    """A broken rule: the keys it involves (messages name the first one) and what is wrong."""

    keys: tuple[str, ...]
    text: str


def breaches(settings: Settings) -> Iterator[Breach]:
    """Yields every broken rule; each value alone is already known to be valid."""
    yield from _length(settings)
    yield from _model(settings.model)
    yield from _vocabulary(settings)
    yield from _data(settings.data)
    yield from _sources(settings)
    yield from _sequences(settings)
    yield from _stops(settings)
    yield from _tasks(settings)
    for section in OF_SOME:
        yield from _unused(settings, section)
    yield from _lora(settings.lora)
    yield from _conversations(settings)
    yield from _sampled(settings)
    yield from _rolled_out(settings)
    yield from _routed(settings)
    yield from _objective(settings)


def _objective(settings: Settings) -> Iterator[Breach]:
    name, recipe = settings.train.objective, settings.recipe
    if name is None:
        return
    if problem := custom.malformed(name):
        yield Breach(keys=("train.objective",), text=problem)
    if recipe not in ("pretrain", "sft"):
        text = f"{name} works only with recipe pretrain or sft; recipe {recipe} has its own loss"
        yield Breach(keys=("train.objective", "recipe"), text=text)


def _length(settings: Settings) -> Iterator[Breach]:
    train = settings.train
    keys = ("train.steps", "train.epochs", "train.tokens")
    lengths = (train.steps, train.epochs, train.tokens)
    given = [key for key, length in zip(keys, lengths, strict=True) if length is not None]
    if not given:
        yield Breach(keys=keys, text="the run has no length; set one of train.steps, train.epochs or train.tokens")
    if len(given) > 1:
        yield Breach(keys=tuple(given), text=f"the run has {len(given)} lengths ({', '.join(given)}); keep one")
    if train.steps is not None and train.warmup_steps >= train.steps:
        yield Breach(
            keys=("train.warmup_steps", "train.steps"),
            text=f"{train.warmup_steps} must be less than train.steps ({train.steps})",
        )


def _model(model: ModelSettings) -> Iterator[Breach]:
    shape = {"model.layers": model.layers, "model.hidden": model.hidden, "model.heads": model.heads}
    missing = [key for key, value in shape.items() if value is None]
    if model.name is None and missing:
        yield Breach(
            keys=(*missing, "model.name"),
            text="missing; set model.name, or all of model.layers, model.hidden and model.heads",
        )

    if model.name is None and model.revision is not None:
        text = f"{model.revision} works only with model.name; set model.name"
        yield Breach(keys=("model.revision", "model.name"), text=text)

    if model.name is not None:
        default = ModelSettings()
        for field in fields(model):
            if field.name not in OF_NAME and getattr(model, field.name) != getattr(default, field.name):
                value = getattr(model, field.name)
                yield Breach(
                    keys=(f"model.{field.name}", "model.name"),
                    text=f"{value} conflicts with model.name, whose config.json gives the shape; remove one",
                )

    head_dim = model.head_dim
    if model.hidden is not None and model.heads is not None and head_dim is None:
        if model.hidden % model.heads:
            yield Breach(
                keys=("model.hidden", "model.heads"),
                text=f"{model.hidden} is not a multiple of model.heads ({model.heads}); "
                f"use {_multiples(model.hidden, of=model.heads)}, or set model.head_dim",
            )
        else:
            head_dim = model.hidden // model.heads
    if head_dim is not None and head_dim % 2:
        keys = ("model.head_dim",) if model.head_dim is not None else ("model.hidden", "model.heads")
        yield Breach(keys=keys, text=f"heads have width {head_dim}; rotary embeddings need an even width")
    if model.heads is not None and model.kv_heads is not None and model.heads % model.kv_heads:
        yield Breach(
            keys=("model.kv_heads", "model.heads"),
            text=f"{model.kv_heads} must divide model.heads ({model.heads})",
        )


def _vocabulary(settings: Settings) -> Iterator[Breach]:
    vocab, data = settings.model.vocab, settings.data
    if data.tokenizer.startswith("bpe:") and (problem := size_problem(data.tokenizer)):
        yield Breach(keys=("data.tokenizer",), text=problem)
    if vocab is not None and vocab < BYTE_IDS and data.tokenizer == "byte" and data.source != "tokens":
        text = f"{vocab} is fewer than the {BYTE_IDS} ids of the byte tokenizer; set at least {BYTE_IDS}, or remove it"
        yield Breach(keys=("model.vocab", "data.tokenizer"), text=text)


def size_problem(tokenizer: str) -> str | None:
    """What is wrong with the size in bpe:SIZE; None if nothing is."""
    size = tokenizer.removeprefix("bpe:")
    if re.fullmatch("[0-9]{1,9}", size) and BYTE_IDS <= int(size) <= limits.VOCAB:
        return None
    return f"{tokenizer:.40}: SIZE must be a number from {BYTE_IDS} (all bytes and EOS) to {limits.VOCAB}"


def _data(data: DataSettings) -> Iterator[Breach]:
    if data.source in ("text", "jsonl", "parquet", "tokens") and data.path is None:
        yield Breach(
            keys=("data.path", "data.source"),
            text=f"missing; data.source {data.source} needs a file, folder or glob to read",
        )
    if data.source == "hf" and data.name is None:
        yield Breach(keys=("data.name", "data.source"), text="missing; data.source hf needs the dataset's name")


def _sources(settings: Settings) -> Iterator[Breach]:
    """Yields the broken rules of several sources of rows; a router's are in `_routed`."""
    data = settings.data
    if RECIPES[settings.recipe].routes:
        return
    given = [key for key in ("path", "name", "subset", "format") if data.sources and getattr(data, key) is not None]
    given += ["source"] if data.sources and data.source != DataSettings().source else []
    for key in given:
        text = f"{getattr(data, key)} conflicts with data.sources, whose items name their own; remove one"
        yield Breach(keys=(f"data.{key}", "data.sources"), text=text)
    weighted = [source.weight is not None for source in data.sources]
    if any(weighted) and not all(weighted):
        text = f"item {weighted.index(False)} has no weight, but others have; give every item one, or none"
        yield Breach(keys=("data.sources",), text=text)
    for number, source in enumerate(data.sources):
        if source.path is None and source.name is None:
            yield Breach(keys=("data.sources",), text=f"item {number} has neither path nor name; set one of them")
        if source.subset is not None and source.path is not None:
            text = f"item {number} has a subset, which Hugging Face datasets have, and a path; remove one"
            yield Breach(keys=("data.sources",), text=text)
        if wrong := slices.problem(source.split):
            yield Breach(keys=("data.sources",), text=f"item {number}: split {wrong}")


def _sequences(settings: Settings) -> Iterator[Breach]:
    length, batch_tokens = settings.data.sequence_length, settings.train.batch_tokens
    positions = settings.model.positions
    if positions is not None and length > positions:
        yield Breach(
            keys=("data.sequence_length", "model.positions"),
            text=f"{length} must be at most model.positions ({positions})",
        )

    sequences, rest = divmod(batch_tokens, length)
    if rest:
        yield Breach(
            keys=("train.batch_tokens", "data.sequence_length"),
            text=f"{batch_tokens} is not a multiple of data.sequence_length ({length}); "
            f"use {_multiples(batch_tokens, of=length)}",
        )
        return
    micro_batch, accumulation = settings.plan.micro_batch, settings.plan.accumulation
    if micro_batch is not None and accumulation is not None and sequences % (micro_batch * accumulation):
        yield Breach(
            keys=("plan.accumulation", "plan.micro_batch", "train.batch_tokens", "data.sequence_length"),
            text=f"plan.micro_batch {micro_batch} × plan.accumulation {accumulation} must divide the "
            f"{sequences} sequences of a step (train.batch_tokens / data.sequence_length)",
        )


def _stops(settings: Settings) -> Iterator[Breach]:
    if settings.eval.every is None:
        by_tasks = settings.eval.criterion == "tasks" and settings.eval.tasks_every is not None
        needing = {
            "eval.patience": settings.eval.patience is not None and not by_tasks,
            "save.best": settings.save.best and not by_tasks,
            "target.val_loss": settings.target.val_loss is not None,
        }
        for key in (key for key, needed in needing.items() if needed):
            yield Breach(keys=(key, "eval.every"), text="needs evaluations during the run; set eval.every")
    if settings.profile.steps is not None:
        first, last = settings.profile.steps
        steps = settings.train.steps
        if not 0 <= first <= last:
            yield Breach(
                keys=("profile.steps",),
                text=f"[{first}, {last}] must be the first and the last step, in this order, counted from 0",
            )
        elif steps is not None and last >= steps:
            yield Breach(
                keys=("profile.steps", "train.steps"),
                text=f"[{first}, {last}] must end before train.steps ({steps}); steps count from 0",
            )


def _tasks(settings: Settings) -> Iterator[Breach]:
    evaluation, default = settings.eval, EvalSettings()
    named = {"rft.task": settings.rft.task, "rft.valid": settings.rft.valid, "rft.teach": settings.rft.teach}
    several = {"eval.tasks": evaluation.tasks, "rl.tasks": settings.rl.tasks}
    for key, spec in [*named.items(), *((key, spec) for key, specs in several.items() for spec in specs)]:
        if spec is not None and (problem := unknown_task(spec)):
            yield Breach(keys=(key,), text=problem)
    if not evaluation.tasks:
        for name in ("tasks_every", "task_limit", "task_tokens", "criterion"):
            if getattr(evaluation, name) != getattr(default, name):
                text = f"{getattr(evaluation, name)} works only with eval.tasks; set it, such as [units]"
                yield Breach(keys=(f"eval.{name}", "eval.tasks"), text=text)
    elif evaluation.criterion == "tasks" and all(spec.startswith("perplexity") for spec in evaluation.tasks):
        yield Breach(
            keys=("eval.criterion", "eval.tasks"),
            text="tasks, but no task in eval.tasks has answers to score; add one, or use eval.criterion: loss",
        )


def _unused(settings: Settings, name: str) -> Iterator[Breach]:
    """Yields the keys that were set in a section that the recipe does not use."""
    if name in RECIPES[settings.recipe].sections:
        return
    section, users = getattr(settings, name), recipes_that(lambda recipe: name in recipe.sections)
    for field in fields(section):
        if (value := getattr(section, field.name)) != field.default:
            yield Breach(keys=(f"{name}.{field.name}", "recipe"), text=f"{value} works only with recipe {users}")


def _lora(lora: LoraSettings) -> Iterator[Breach]:
    if lora.rank is None:
        for field in fields(lora):
            if (value := getattr(lora, field.name)) != field.default:
                text = f"{value} works only with adapters; set lora.rank, such as 16"
                yield Breach(keys=(f"lora.{field.name}", "lora.rank"), text=text)


def _conversations(settings: Settings) -> Iterator[Breach]:
    """Yields the broken rules of the keys for recipes that read rows."""
    data, default = settings.data, DataSettings()
    if RECIPES[settings.recipe].learns_from == "rows":
        for key in ("split", "valid_split"):
            if (given := getattr(data, key)) is not None and (wrong := slices.problem(given)):
                yield Breach(keys=(f"data.{key}",), text=wrong)
        if data.source not in ("jsonl", "parquet", "hf", "embedded"):
            text = f"{data.source} has no rows; recipe {settings.recipe} takes jsonl, parquet or hf"
            yield Breach(keys=("data.source", "recipe"), text=text)
        elif data.source == "embedded" and not (data.path or data.name or data.sources):
            text = f"missing; recipe {settings.recipe} reads rows: set data.path, data.name or data.sources"
            yield Breach(keys=("data.path", "data.source", "recipe"), text=text)
        if data.valid_path is not None and data.valid_name is not None:
            text = f"{data.valid_path} conflicts with data.valid_name ({data.valid_name}); remove one"
            yield Breach(keys=("data.valid_path", "data.valid_name"), text=text)
        if data.valid_split and len(data.sources) > 1 and not (data.valid_path or data.valid_name):
            text = f"{data.valid_split} of which source? Set data.valid_path or data.valid_name too"
            yield Breach(keys=("data.valid_split", "data.sources"), text=text)
        if RECIPES[settings.recipe].compares:
            for name in ("template", "prompt_field", "completion_field", "train_on"):
                if getattr(data, name) != getattr(default, name):
                    text = f"{getattr(data, name)} works only with recipe sft; dpo reads prompt, chosen and rejected"
                    yield Breach(keys=(f"data.{name}", "recipe"), text=text)
            if settings.dpo.margin and settings.dpo.loss != "simpo":
                text = f"{settings.dpo.margin} works only with dpo.loss: simpo"
                yield Breach(keys=("dpo.margin", "dpo.loss"), text=text)
        if data.template is not None and data.format is not None:
            text = f"{data.format} conflicts with data.template, which reads rows of any keys; remove one"
            yield Breach(keys=("data.format", "data.template"), text=text)
        return
    for name in (
        "as_chat", "system", "train_on", "too_long", "prompt_field", "completion_field", "messages_field", "sources",
        "format", "template", "valid_name", "valid_split",
    ):  # fmt: skip
        several = name == "sources"
        if getattr(data, name) != getattr(default, name) and not (several and RECIPES[settings.recipe].routes):
            users = recipes_that(lambda recipe: recipe.learns_from == "rows" or (several and recipe.routes))  # noqa: B023
            told = f"{len(data.sources)} items work" if several else f"{getattr(data, name)} works"
            yield Breach(keys=(f"data.{name}", "recipe"), text=f"{told} only with recipe {users}")
    if data.source == "hf" and "[" in data.split:
        text = f"{data.split}: slices of rows work only with recipe {recipes_that(lambda r: r.learns_from == 'rows')}"
        yield Breach(keys=("data.split", "recipe"), text=text)


def _sampled(settings: Settings) -> Iterator[Breach]:
    """Yields the broken rules of the keys for recipes that sample their own data."""
    rft, sample, data = settings.rft, settings.sample, settings.data
    if not RECIPES[settings.recipe].samples:
        return
    if rft.task is None:
        yield Breach(keys=("rft.task", "recipe"), text="missing; name a task, such as units:train or jsonl:FILE")
    elif rft.valid is None and held_out(rft.task) is None and unknown_task(rft.task) is None:
        text = (
            f"missing; {rft.task} has no held-out split, unlike units:train and math:train; set rft.valid to the task "
            "to score"
        )
        yield Breach(keys=("rft.valid", "rft.task"), text=text)
    for name in ("path", "name", "valid_path", "valid_name"):
        if getattr(data, name) is not None:
            value = getattr(data, name)
            text = f"{value} works only with other recipes; {settings.recipe} trains on its own samples (rft.task)"
            yield Breach(keys=(f"data.{name}", "recipe"), text=text)
    if settings.model.name is not None and data.tokenizer != DataSettings().tokenizer:
        text = f"{data.tokenizer} conflicts with model.name, which has its own tokenizer; remove one"
        yield Breach(keys=("data.tokenizer", "model.name"), text=text)
    if settings.model.name is None and rft.teach is None:
        yield Breach(
            keys=("model.name", "rft.teach"),
            text="missing; random weights solve nothing: set model.name, or rft.teach to fine-tune them first",
        )
    if sample.min_tokens > sample.max_tokens:
        yield Breach(
            keys=("sample.min_tokens", "sample.max_tokens"),
            text=f"{sample.min_tokens} must be at most sample.max_tokens ({sample.max_tokens})",
        )
    if rft.keep > rft.oversample:
        yield Breach(
            keys=("rft.keep", "rft.oversample"),
            text=f"{rft.keep} must be at most rft.oversample ({rft.oversample}), the number of samples",
        )
    if sample.temperature == 0 and rft.oversample > 1:
        yield Breach(
            keys=("sample.temperature", "rft.oversample"),
            text=f"at 0 all {rft.oversample} samples of a question are identical; raise it, or set rft.oversample: 1",
        )


def _rolled_out(settings: Settings) -> Iterator[Breach]:
    """Yields the broken rules of the keys for recipes that learn from rollouts."""
    rl, sample, method = settings.rl, settings.sample, settings.mtl.method
    if not RECIPES[settings.recipe].rolls_out:
        return
    if not rl.tasks:
        yield Breach(keys=("rl.tasks", "recipe"), text="missing; name tasks, such as [math, logic]")
    elif rl.prompts % (len(rl.tasks) * rl.updates):
        text = (
            f"{rl.prompts} must be a multiple of the {len(rl.tasks)} tasks times rl.updates ({rl.updates}); "
            f"use {_multiples(rl.prompts, of=len(rl.tasks) * rl.updates)}"
        )
        yield Breach(keys=("rl.prompts", "rl.tasks", "rl.updates"), text=text)
    if len(set(rl.tasks)) < len(rl.tasks):
        yield Breach(keys=("rl.tasks",), text="names a task twice; to see a task more often, raise rl.prompts")
    if method != "mixed" and len(rl.tasks) < 2:
        yield Breach(keys=("mtl.method", "rl.tasks"), text=f"{method} needs at least two tasks")
    if rl.samples < 2 and rl.algorithm != "ppo":
        text = f"{rl.algorithm} compares the completions of a prompt, so it needs at least 2; ppo takes 1"
        yield Breach(keys=("rl.samples", "rl.algorithm"), text=text)
    if sample.temperature == 0:
        text = f"at 0 all {rl.samples} completions of a prompt are identical; raise it"
        yield Breach(keys=("sample.temperature", "rl.samples"), text=text)
    if rl.old_logprobs == "sampler" and (sample.temperature, sample.top_p, sample.top_k) != (1.0, 1.0, 0):
        text = "the sampler reports log-probabilities at temperature 1, without top-p and top-k; use trainer"
        yield Breach(keys=("rl.old_logprobs", "sample.temperature", "sample.top_p", "sample.top_k"), text=text)
    if rl.ahead and rl.dynamic_sampling:
        text = "phases that are generated early cannot wait for grades; set one of the two to 0"
        yield Breach(keys=("rl.ahead", "rl.dynamic_sampling"), text=text)
    if rl.ahead and (rl.correction is None or (sample.temperature, sample.top_p, sample.top_k) != (1.0, 1.0, 0)):
        text = (
            "completions of older weights need importance weights: set rl.correction, and sample with temperature 1, "
            "top_p 1 and top_k 0"
        )
        yield Breach(
            keys=("rl.ahead", "rl.correction", "sample.temperature", "sample.top_p", "sample.top_k"), text=text
        )
    if rl.overlong_buffer > sample.max_tokens:
        text = f"{rl.overlong_buffer} must be at most sample.max_tokens ({sample.max_tokens})"
        yield Breach(keys=("rl.overlong_buffer", "sample.max_tokens"), text=text)
    if sample.max_tokens >= settings.data.sequence_length:
        text = (
            f"{sample.max_tokens} leaves no room for a prompt in data.sequence_length ({settings.data.sequence_length})"
        )
        yield Breach(keys=("sample.max_tokens", "data.sequence_length"), text=text)
    if rl.teach_lr is not None and not rl.teach:
        text = "has no effect, because rl.teach is 0; set rl.teach, or leave rl.teach_lr out"
        yield Breach(keys=("rl.teach_lr", "rl.teach"), text=text)
    if settings.train.steps is None and settings.train.epochs is None:
        text = "missing; give the number of steps, or train.epochs over the questions of the tasks"
        yield Breach(keys=("train.steps", "recipe"), text=text)
    elif settings.train.steps is not None and settings.train.steps % rl.steps_in_phase:
        text = (
            f"{settings.train.steps} must be a multiple of the {rl.steps_in_phase} steps of a phase "
            "(rl.updates x rl.epochs)"
        )
        yield Breach(keys=("train.steps", "rl.updates", "rl.epochs"), text=text)


def _routed(settings: Settings) -> Iterator[Breach]:
    """Yields the broken rules of the keys for recipes that train many adapters."""
    router, sources = settings.router, settings.data.sources
    if not RECIPES[settings.recipe].routes:
        return
    if len(sources) < 2:
        text = (
            f"{len(sources)} sources; a router needs at least two, each with its task: [{{task: qa}}, {{task: code}}]"
        )
        yield Breach(keys=("data.sources", "recipe"), text=text)
    names = [source.adapter for source in sources]
    for number, (source, name) in enumerate(zip(sources, names, strict=True)):
        said = None
        if source.task is None:
            said = "has no task; name one, such as sentiment, qa, summary, code, translation or mbpp"
        elif problem := unknown_task(source.task):
            said = problem
        elif ":" in source.task.partition("?")[0]:
            said = f"task {source.task}: give the file as path, and leave the split out"
        elif not re.fullmatch("[A-Za-z][A-Za-z0-9_-]{0,31}", name):
            said = f"is called {name!r:.60}, but an adapter's name has letters, digits, _ and - only; set another name"
        elif names.count(name) > 1:
            said = f"is called {name}, as another source is; give each its own name"
        elif other := next((key for key in ("subset", "format") if getattr(source, key) is not None), None):
            said = f"sets {other}, which recipe {settings.recipe} does not use; remove it"
        elif source.split != "train":
            said = f"has split {source.split}; its task holds questions out by itself, so remove it"
        if said:
            yield Breach(keys=("data.sources",), text=f"item {number} {said}")
    weighted = [source.weight is not None for source in sources]
    if any(weighted) and not all(weighted):
        yield Breach(keys=("data.sources",), text="some items have a weight and some have none; give all of them one")
    if settings.lora.rank is None:
        yield Breach(keys=("lora.rank", "recipe"), text="null trains all weights; a router needs adapters, such as 16")
    if settings.lora.adapter is not None:
        yield Breach(keys=("lora.adapter",), text="is for a single adapter; use router.start, with one for each source")
    alone = router.phase in ("2", "3")
    if alone and router.start is None:
        before = "1" if router.phase == "2" else "2"
        text = f"missing; phase {router.phase} alone continues a run of phase {before}: set its folder, or phase: all"
        yield Breach(keys=("router.start", "router.phase"), text=text)
    if not alone and router.start is not None:
        text = f"{router.start} works only with phase 2 or 3 alone; remove it, or set router.phase"
        yield Breach(keys=("router.start", "router.phase"), text=text)
    if alone and router.teach_steps is not None:
        yield Breach(keys=("router.teach_steps", "router.phase"), text="works only before phase 1; remove it")
    if router.teach_lr is not None and router.teach_steps is None:
        yield Breach(keys=("router.teach_lr", "router.teach_steps"), text="has no effect without router.teach_steps")
    if router.teach_answers != "own" and router.teach_steps is None:
        text = "has no effect without router.teach_steps"
        yield Breach(keys=("router.teach_answers", "router.teach_steps"), text=text)
    if settings.model.name is None and router.teach_steps is None and not alone:
        text = "missing; adapters on random weights are of no use: set model.name, or router.teach_steps"
        yield Breach(keys=("model.name", "router.teach_steps"), text=text)
    if router.temperature_mode == "annealed" and router.temperature_end > router.temperature:
        text = f"{router.temperature_end} must be at most router.temperature ({router.temperature}), where it starts"
        yield Breach(keys=("router.temperature_end", "router.temperature"), text=text)
    if settings.data.train_on != "completion":
        yield Breach(
            keys=("data.train_on", "recipe"), text="all leaves no prompt to route by; recipe router needs completion"
        )
    if settings.eval.tasks:
        text = "is not used by recipe router, which scores the task of each source after every phase; remove it"
        yield Breach(keys=("eval.tasks", "recipe"), text=text)
    if settings.data.source != DataSettings().source or settings.data.path is not None:
        yield Breach(keys=("data.source", "data.path"), text="recipe router reads data.sources; remove it")


def _multiples(value: int, *, of: int) -> str:
    """The nearest multiples below and above a value."""
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)
