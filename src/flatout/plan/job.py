"""The input of a plan: the parts of a configuration and the hardware that a plan depends on."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from flatout import hub
from flatout.config.recipes import RECIPES
from flatout.config.rules import BYTE_IDS
from flatout.config.settings import DataSettings, LoraSettings, ModelSettings, PlanSettings, Settings, settable
from flatout.cost import TARGETS, Adapters, Flops, ModelShape, flops_per_token
from flatout.errors import UsageError
from flatout.files import TEXT_BYTES, typed
from flatout.hardware import Hardware
from flatout.record import Run


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A phase of reinforcement learning, over all ranks: what is generated, and which models pass over it."""

    prompts: int
    samples: int
    steps: int  # that learn from it, over all epochs
    epochs: int
    prompt_tokens: float  # on average; before the tasks are opened, the most that fit
    max_tokens: int
    reference: bool
    critic: Literal["shared", "own"] | None
    # none: the sampler's, or not needed; check: the sampler's, if a part agrees; pass: computed again
    old_logprobs: Literal["none", "check", "pass"]
    sampler: str = "flatout"


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a plan is a function of."""

    shape: ModelShape
    hardware: Hardware
    sequence_length: int
    batch_tokens: int
    num_ranks: int
    steps: int | None = None
    packing: str = "concat"
    # Mean number of positions a token attends to, if documents end inside sequences; None: half the sequence.
    mean_context: float | None = None
    # Tokens of the longest document, if documents are packed; None: unknown.
    longest: int | None = None
    # Share of the tokens that the loss covers, if only answers are trained on; None: all of them.
    trained_share: float | None = None
    weights_only: bool = False
    pins: PlanSettings = field(default_factory=PlanSettings)
    # The adapters that are trained instead of the weights, and the name of the base model.
    adapters: Adapters | None = None
    base: str | None = None
    # If the recipe samples: the model that generates, and the number of concurrent sequences if pinned.
    generator: ModelShape | None = None
    rows: int | None = None
    # Of reinforcement learning: tasks whose gradients are kept apart, a critic with its own trunk, initial weights.
    gradient_tasks: int = 0
    own_critic: bool = False
    reference: bool = False
    rollout: Rollout | None = None
    # Share of the GPU's memory that another engine takes, such as vLLM.
    taken_share: float = 0.0

    @property
    def is_sharded(self) -> bool:
        return self.pins.sharding == "full"

    @property
    def device(self) -> str:
        return "cpu" if self.hardware.gpu is None and self.hardware.sm is None else "gpu"

    @property
    def num_parameters(self) -> int | None:
        """Those of the model; None if transformers builds it in a way that we do not know."""
        return None if self.shape.foreign else self.shape.num_parameters

    @property
    def num_trained(self) -> int | None:
        return self.num_parameters if self.adapters is None else self.adapters.num_parameters(self.shape)

    @property
    def memory_gib(self) -> float | None:
        """Memory of the GPU, or of the host if there is no GPU; None: unknown."""
        return self.hardware.memory_gib if self.device == "gpu" else self.hardware.ram_gib

    @property
    def usable_gib(self) -> float | None:
        """The share of `memory_gib` that the run may use."""
        share = min(self.pins.memory_fraction or 1.0, 1.0 - self.taken_share)
        return None if self.memory_gib is None else share * self.memory_gib

    def flops(self, recompute: str) -> Flops:
        """FLOPs per token of this job."""
        found = flops_per_token(
            self.shape,
            sequence_length=self.sequence_length,
            mean_context=self.mean_context,
            adapters=self.adapters,
            recompute=recompute,
        )
        head = 6 * self.shape.vocab * self.shape.hidden  # a critic has none
        return replace(found, critic=found.common - head) if self.own_critic else found

    @property
    def rank_sequences(self) -> int:
        """Sequences per optimizer step on one rank."""
        sequences, left = divmod(self.batch_tokens, self.sequence_length)
        if left:
            raise UsageError(
                f"train.batch_tokens {self.batch_tokens} is not a multiple of "
                f"data.sequence_length {self.sequence_length}"
            )
        share, left = divmod(sequences, self.num_ranks)
        if left:
            low = max(1, share) * self.num_ranks * self.sequence_length
            raise UsageError(
                f"train.batch_tokens {self.batch_tokens} is {sequences} sequences of {self.sequence_length}, "
                f"which {self.num_ranks} ranks cannot share evenly: use {low}"
            )
        return share


def job_of(
    settings: Settings,
    *,
    hardware: Hardware,
    num_ranks: int,
    total_steps: int | None = None,
    mean_context: float | None = None,
    longest: int | None = None,
    trained_share: float | None = None,
    prompt_tokens: float | None = None,
) -> Job:
    """Returns the job that a configuration describes on this hardware."""
    train = settings.train
    if total_steps is None:
        total_steps = train.steps or (math.ceil(train.tokens / train.batch_tokens) if train.tokens else None)
    settings = _of_runs(settings)
    generator, recipe = None, RECIPES[settings.recipe]
    if recipe.samples:
        name = settings.rft.generator
        asked = ModelSettings(name=name, trust=settings.model.trust)
        generator = shape_of(settings) if name is None else named_shape(asked)
    bank = [source.adapter for source in settings.data.sources] if recipe.routes else []
    rl, adapters = settings.rl, adapters_of(settings.lora, bank=bank)
    return Job(
        shape=shape_of(settings),
        hardware=hardware,
        sequence_length=settings.data.sequence_length,
        batch_tokens=train.batch_tokens,
        num_ranks=num_ranks,
        steps=total_steps,
        packing="documents" if recipe.packs_documents else settings.data.packing,
        mean_context=mean_context,
        longest=longest,
        trained_share=trained_share,
        weights_only=settings.save.weights_only,
        pins=settings.plan,
        adapters=adapters,
        base=settings.model.name if settings.model.weights == "load" else None,
        generator=generator,
        rows=settings.sample.rows,
        gradient_tasks=len(rl.tasks) if recipe.rolls_out and settings.mtl.method not in ("mixed", "equal") else 0,
        own_critic=recipe.rolls_out and rl.algorithm == "ppo" and rl.critic == "own",
        reference=recipe.rolls_out and bool(rl.kl) and adapters is None,  # under adapters it is the frozen base
        rollout=_rollout(settings, prompt_tokens=prompt_tokens) if recipe.rolls_out else None,
        taken_share=rl.vllm_memory if recipe.rolls_out and rl.sampler == "vllm" else 0.0,
    )


def _rollout(settings: Settings, *, prompt_tokens: float | None) -> Rollout:
    rl, sample = settings.rl, settings.sample
    plain = (sample.temperature, sample.top_p, sample.top_k) == (1.0, 1.0, 0)
    asked: dict[str, Literal["none", "check", "pass"]] = {"auto": "check", "sampler": "none", "trainer": "pass"}
    old = asked[rl.old_logprobs] if plain else "pass"
    return Rollout(
        prompts=rl.prompts,
        samples=rl.samples,
        steps=rl.steps_in_phase,
        epochs=rl.epochs,
        prompt_tokens=prompt_tokens or settings.data.sequence_length - sample.max_tokens,
        max_tokens=sample.max_tokens,
        reference=bool(rl.kl),
        critic=rl.critic if rl.algorithm == "ppo" else None,
        old_logprobs=old if rl.steps_in_phase > 1 else "none",
        sampler=rl.sampler,
    )


# -- the model ----------------------------------------------------------------------------------------------


def shape_of(settings: Settings) -> ModelShape:
    """The shape of the configured model, from its own numbers or from a Hugging Face config.json."""
    model, length = settings.model, settings.data.sequence_length
    shape = _own_shape(settings) if model.name is None else named_shape(model)
    if length > shape.positions:
        raise UsageError(
            f"data.sequence_length {length} is longer than the model's {shape.positions} positions: "
            "shorten the sequences" + ("" if model.name else ", or raise model.positions")
        )
    return shape


def _own_shape(settings: Settings) -> ModelShape:
    """The shape from the numbers in the configuration, with defaults for the missing ones."""
    model = settings.model
    if model.layers is None or model.hidden is None or model.heads is None:
        raise UsageError("model needs `name`, or `layers`, `hidden` and `heads`")
    return ModelShape(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads or model.heads,
        head_dim=model.head_dim or model.hidden // max(1, model.heads),  # a damaged run folder may say 0
        intermediate=model.intermediate or rounded_up(model.hidden * 8 // 3, 128),
        vocab=model.vocab or rounded_up(vocabulary(settings.data), 64),
        positions=model.positions or settings.data.sequence_length,
        tied=model.tied,
        qk_norm=model.qk_norm,
        qkv_bias=model.qkv_bias,
        rope_theta=model.rope_theta,
        norm_eps=model.norm_eps,
    )


def named_shape(model: ModelSettings) -> ModelShape:
    """The shape of a model in a folder or on the hub."""
    if model.name is None:
        raise UsageError("model.name is missing: give a folder or a name on the hub")
    config = hub.config_of(model.name, revision=model.revision, trust=model.trust)
    return ModelShape.of_config(config)


def adapters_of(lora: LoraSettings, *, bank: Sequence[str] = ()) -> Adapters | None:
    """The configured adapters, a bank if they have names; a target that matches nothing is refused."""
    if lora.rank is None:
        return None
    names = [name.strip().removesuffix("_proj") for name in lora.targets.split(",") if name.strip()]
    known = TARGETS if names == ["all-linear"] else tuple(name for name in TARGETS if name in names)
    unknown = [name for name in names if name not in (*TARGETS, "all-linear")]
    if unknown or not known or (len(names) > 1 and "all-linear" in names):
        what = ", ".join(repr(name) for name in unknown) or repr(lora.targets)
        raise UsageError(
            f"lora.targets: {what} matches no projection of this model: "
            f"give all-linear, or some of {', '.join(TARGETS)}"
        )
    return Adapters(
        rank=lora.rank,
        alpha=2.0 * lora.rank if lora.alpha is None else lora.alpha,
        targets=known,
        dropout=lora.dropout,
        rslora=lora.rslora,
        base_bits=4 if lora.base == "4-bit" else 16,
        names=tuple(bank),
    )


# -- run folders as models ----------------------------------------------------------------------------------


def _of_runs(settings: Settings) -> Settings:
    """Gives a model that is a run folder that run's shape; such a generator is assumed to have the student's shape."""
    if settings.rft.generator is not None and Run.is_named_by(settings.rft.generator):
        settings = replace(settings, rft=replace(settings.rft, generator=None))
    if settings.model.name is None or not Run.is_named_by(settings.model.name):
        return settings
    run = Run.open(settings.model.name)
    return replace(
        settings,
        model=model_settings(run, trust=settings.model.trust),
        data=replace(settings.data, tokenizer=str(run.tokenizer_dir)),
    )


def model_settings(run: Run, *, trust: str | None = None) -> ModelSettings:
    """The keys that this version knows of a run's `model` section. Trust never comes from a run folder."""
    known, recorded = {field.name for field in settable(ModelSettings)}, run.config.get("model")
    if isinstance(recorded, Mapping):
        recorded = {key: value for key, value in recorded.items() if key in known}
    return replace(typed(ModelSettings, recorded, source=f"the model section of {run.path}"), trust=trust)


# -- the vocabulary -----------------------------------------------------------------------------------------


def vocabulary(data: DataSettings) -> int:
    """The vocabulary size of the data, from its tokenizer or from the manifest of prepared shards."""
    for folder in (Path(data.path or "") / "train", Path(data.path or "")):
        if data.source == "tokens" and (manifest := folder / "manifest.json").is_file():
            tokenizer = hub.read_json(manifest).get("tokenizer")
            if isinstance(tokenizer, dict) and isinstance(size := tokenizer.get("vocab_size"), int):
                return size
    return tokenizer_size(data.tokenizer)


def tokenizer_size(spec: str) -> int:
    """The vocabulary size of a tokenizer, read without loading it."""
    if spec == "byte":
        return BYTE_IDS
    if match := re.fullmatch(r"bpe:(\d{1,9})", spec):
        return int(match[1])
    path = Path(os.path.expanduser(spec))
    if spec.startswith((".", "/", "~")) and not os.path.exists(path):
        raise UsageError(f"data.tokenizer: {spec} does not exist; give a tokenizer.json or a folder that contains one")
    file = path if os.path.isfile(path) else hub.folder(spec, weights=False) / "tokenizer.json"
    content = hub.read_json(file, limit=TEXT_BYTES)
    try:
        vocab = content["model"]["vocab"]
        # Unigram models list their tokens in the order of their ids; the others map each token to its id.
        ids = [*(range(len(vocab)) if isinstance(vocab, list) else vocab.values())]
        return int(max([*ids, *(token["id"] for token in content.get("added_tokens") or [])])) + 1
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise UsageError(f"{file} is not a tokenizer.json: it has no vocabulary at model.vocab") from None


def rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
