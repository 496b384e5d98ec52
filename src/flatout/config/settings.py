"""Every setting of a run, as plain dataclasses: names, types, defaults, rules and one line of help each.

The loader builds its strict schema from these fields, `flatout config schema` prints them, and the rest of
the program uses the dataclasses directly, so only the loader needs pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

from flatout import limits
from flatout.config.recipes import RecipeName

Precision = Literal["fp32", "bf16", "fp16"]
Recompute = Literal["none", "selective", "full"]
Compile = Literal["none", "default", "max-autotune"]
Attention = Literal["cudnn", "flash", "efficient", "math", "short"]
Sharding = Literal["none", "full"]
Preset = Literal["safe", "balanced", "max"]
RowFormat = Literal[
    "messages",
    "sharegpt",
    "alpaca",
    "prompt-completion",
    "question-answer",
    "instruction-response",
    "segments",
    "tokens",
    "text",
    "preference",
]


def setting(default: Any, help: str, *, path: bool = False, **rules: Any) -> Any:
    """A field with its help line and rules: `gt`, `ge`, `lt`, `le`, or `each`, the rules of a list's items.

    With `path` its text may name a file or a folder, and must be able to.
    """
    return field(default=default, metadata={"help": help, "rules": rules, "path": path})


def section(kind: type[Any], help: str) -> Any:
    """A field that holds a whole section."""
    return field(default_factory=kind, metadata={"help": help, "rules": {}})


def settable(kind: type[Any]) -> list[Field[Any]]:
    """The fields that a file, the environment or an override can set, and that a run records."""
    return [each for each in fields(kind) if "help" in each.metadata]


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    name: str | None = setting(None, "Hugging Face name or local folder; its config.json gives the shape", path=True)
    weights: Literal["load", "random"] = setting("load", "with `name`: load its weights, or start from random ones")
    revision: str | None = setting(None, "with a hub `name`: branch, tag or commit (default: main)")
    # The pin of --trust-remote-code. It is given on the command line each time, and never read from or saved to a file.
    trust: str | None = None
    layers: int | None = setting(None, "number of decoder blocks", gt=0, le=limits.LAYERS)
    hidden: int | None = setting(None, "width of the residual stream", gt=0, le=limits.HIDDEN)
    heads: int | None = setting(None, "number of query heads", gt=0, le=limits.HEADS)
    kv_heads: int | None = setting(None, "number of key/value heads (default: heads)", gt=0, le=limits.HEADS)
    head_dim: int | None = setting(None, "width of one head (default: hidden / heads)", gt=0, le=limits.HEAD_DIM)
    intermediate: int | None = setting(
        None, "width of the MLP (default: 8/3 hidden, rounded up to a multiple of 128)", gt=0, le=limits.INTERMEDIATE
    )
    vocab: int | None = setting(
        None, "vocabulary size (default: the tokenizer's, rounded up to a multiple of 64)", gt=0, le=limits.VOCAB
    )
    positions: int | None = setting(
        None, "longest sequence the model can process (default: data.sequence_length)", gt=0, le=limits.POSITIONS
    )
    tied: bool = setting(False, "share the embedding with the output head")
    qk_norm: bool = setting(False, "normalise queries and keys per head (as Qwen3)")
    qkv_bias: bool = setting(False, "bias on the query, key and value projections (as Qwen2)")
    rope_theta: float = setting(10000.0, "base of the rotary frequencies", gt=0)
    norm_eps: float = setting(1e-5, "epsilon of RMSNorm", gt=0)


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """One item of `data.sources`."""

    path: str | None = setting(None, "file, folder or glob: jsonl, json, csv, tsv, parquet or arrow", path=True)
    name: str | None = setting(
        None, "Hugging Face dataset; with `path`: what the source is called in the output", path=True
    )
    subset: str | None = setting(None, "configuration of the Hugging Face dataset")
    split: str = setting("train", "split, optionally with a slice in rows or per cent: train[:8000], test[10%:20%]")
    format: RowFormat | None = setting(None, "format of its rows (default: recognised by their keys)")
    size: int | None = setting(None, "read at most this many rows of the split, from its start", gt=0, le=limits.ROWS)
    weight: float | None = setting(None, "share of the examples, relative to the other weights", gt=0)
    task: str | None = setting(None, "label of its rows, for recipes that keep tasks apart and in the output")

    @property
    def label(self) -> str:
        """What it is called in the output."""
        return self.task or self.name or str(self.path)

    @property
    def adapter(self) -> str:
        """The name of its adapter in recipe router: its own, or its task's without options."""
        return self.name or str(self.task).partition("?")[0]


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    source: Literal["embedded", "text", "jsonl", "parquet", "hf", "tokens"] = setting(
        "embedded", "where documents come from; recipes that read rows need only `path` or `name`"
    )
    sources: tuple[SourceSettings, ...] = setting(
        (),
        "sft, dpo: several sources instead of one, see docs/data.md; router: one for each adapter, see docs/router.md",
    )
    path: str | None = setting(None, "file, folder or glob to read", path=True)
    name: str | None = setting(None, "Hugging Face dataset", path=True)
    subset: str | None = setting(None, "configuration of the Hugging Face dataset")
    split: str = setting("train", "split of the dataset; rows can be sliced: train[:8000], train[10%:]")
    format: RowFormat | None = setting(None, "sft, dpo: format of the rows (default: recognised by their keys)")
    field: str = setting("text", "field that holds the text (jsonl, parquet, hf)")
    separator: str = setting("<|endoftext|>", "in text files: the separator between documents")
    tokenizer: str = setting(
        "byte", "byte, bpe:SIZE (trained on this data), a folder, a tokenizer.json or a Hugging Face name", path=True
    )
    sequence_length: int = setting(1024, "tokens in one training sequence", gt=1, le=limits.POSITIONS)
    packing: Literal["concat", "documents"] = setting(
        "concat", "concat: plain concatenation; documents: no attention across document boundaries"
    )
    shuffle: bool = setting(True, "shuffle the sequences with the seed, in a new order each epoch")
    valid_path: str | None = setting(
        None, "separate validation data of the same kind (default: a share of the training data)", path=True
    )
    valid_name: str | None = setting(None, "sft, dpo: Hugging Face dataset to validate with", path=True)
    valid_split: str | None = setting(None, "sft, dpo: split to validate with, such as test or train[90%:]")
    valid_share: float = setting(0.01, "share of the documents held out for validation", gt=0, lt=0.5)
    prompt_field: str = setting("prompt", "sft: field that holds the prompt, as text or as messages")
    completion_field: str = setting("completion", "sft: field that holds the completion")
    messages_field: str = setting("messages", "sft: field that holds a whole conversation as messages")
    template: str | None = setting(
        None, "sft: Jinja template that builds the prompt from a row's fields; the answer is in `completion_field`"
    )
    as_chat: bool | None = setting(
        None, "sft: format rows with the chat template (default: if there is one, except prompt and completion texts)"
    )
    system: str | None = setting(None, "sft, dpo: system message for conversations without one")
    train_on: Literal["completion", "all"] = setting("completion", "sft: tokens the loss covers: the answers, or all")
    too_long: Literal["drop", "truncate", "stop"] = setting(
        "drop", "sft: drop, truncate or stop at an example longer than data.sequence_length"
    )
    on_bad_row: Literal["skip", "stop"] = setting("skip", "a row that cannot be read: skip and count it, or stop")
    max_bad_share: float = setting(0.01, "stop when more than this share of rows is bad", ge=0, le=1)
    embedded_mb: float = setting(8.0, "megabytes of text to generate for `source: embedded`", gt=0, le=1024)
    cache: str | None = setting(None, "folder for prepared shards (default: the user's cache folder)", path=True)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    batch_tokens: int = setting(
        65536, "tokens of one optimizer step, over all ranks and micro-batches", gt=0, le=limits.BATCH_TOKENS
    )
    steps: int | None = setting(None, "length of the run in optimizer steps", gt=0, le=limits.STEPS)
    epochs: float | None = setting(None, "length of the run in passes over the data", gt=0, le=limits.EPOCHS)
    tokens: float | None = setting(None, "length of the run in tokens", gt=0, le=limits.TOKENS)
    lr: float = setting(6e-4, "peak learning rate", gt=0)
    min_lr_ratio: float = setting(0.1, "the final learning rate as a share of the peak", ge=0, le=1)
    warmup_steps: int = setting(0, "steps of linear warm-up", ge=0, le=limits.STEPS)
    schedule: Literal["cosine", "wsd", "constant"] = setting("cosine", "shape of the learning rate after warm-up")
    decay_share: float = setting(
        0.2, "wsd: share of the run over which the learning rate decays at the end", gt=0, le=1
    )
    weight_decay: float = setting(0.1, "decoupled weight decay, on matrices only", ge=0)
    beta1: float = setting(0.9, "decay rate of AdamW's first moment", ge=0, lt=1)
    beta2: float = setting(0.95, "decay rate of AdamW's second moment", ge=0, lt=1)
    eps: float = setting(1e-8, "AdamW's epsilon", gt=0)
    clip: float | None = setting(1.0, "largest gradient norm; null for no clipping", gt=0)
    objective: str | None = setting(
        None, "MODULE:FUNCTION of your own that gives the loss (default: cross-entropy of the next token)"
    )
    hang_s: float | None = setting(
        1800.0,
        "seconds without progress after which the run ends and names the rank and its phase; null: never",
        gt=0,
        le=limits.SECONDS,
    )
    deterministic: bool = setting(False, "bit-identical results from run to run, at some cost in speed")


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    rank: int | None = setting(None, "rank of the adapters; null trains all weights", gt=0, le=limits.RANK)
    alpha: float | None = setting(None, "scaling of the adapters (default: twice the rank)", gt=0)
    targets: str = setting("all-linear", "all-linear, or a comma-separated list from q, k, v, o, gate, up, down")
    dropout: float = setting(0.0, "dropout rate on an adapter's inputs during training", ge=0, lt=1)
    rslora: bool = setting(False, "scale by alpha / sqrt(rank) instead of alpha / rank")
    base: Literal["16-bit", "4-bit"] = setting("16-bit", "storage of the frozen weights; 4-bit is QLoRA (NF4)")
    adapter: str | None = setting(None, "folder with a PEFT adapter to start from", path=True)


@dataclass(frozen=True, kw_only=True)
class DpoSettings:
    loss: Literal["sigmoid", "ipo", "simpo"] = setting(
        "sigmoid", "sigmoid: DPO; ipo: squared, per token; simpo: per token, without a reference"
    )
    beta: float = setting(
        0.1, "scale of the log-probability difference; with a reference, larger stays closer to the initial model", gt=0
    )
    margin: float = setting(0.0, "simpo: by how much the chosen answer should score above the rejected one", ge=0)


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    preset: Literal["quality", "balanced", "speed"] = setting(
        "balanced", "sets rft.oversample and sample.temperature to 50 and 0.5, 30 and 0.7, or 20 and 0.9"
    )
    temperature: float = setting(0.7, "sampling temperature; 0 always takes the most likely token", ge=0)
    top_p: float = setting(1.0, "sample from the most likely tokens up to this total probability", gt=0, le=1)
    top_k: int = setting(0, "sample from this many of the most likely tokens; 0: all", ge=0, le=limits.VOCAB)
    min_tokens: int = setting(0, "shortest completion, in tokens", ge=0, le=limits.ANSWER_TOKENS)
    max_tokens: int = setting(120, "longest completion, in tokens", gt=0, le=limits.ANSWER_TOKENS)
    rows: int | None = setting(
        None, "concurrent sequences while sampling (default: planned to fit in memory)", gt=0, le=limits.SEQUENCES
    )


@dataclass(frozen=True, kw_only=True)
class RftSettings:
    task: str | None = setting(
        None, "task whose questions are sampled, as in `flatout eval`: units:train, jsonl:FILE …"
    )
    valid: str | None = setting(None, "task scored before and after training (default: the held-out split of `task`)")
    questions: int | None = setting(
        None, "use at most this many questions of the task (default: all)", gt=0, le=limits.QUESTIONS
    )
    valid_questions: int | None = setting(
        None, "score at most this many questions (default: all)", gt=0, le=limits.QUESTIONS
    )
    prompt: str | None = setting(
        None, "prompt for sampling: a YAML file, or bare (default: the task's own examples)", path=True
    )
    student_prompt: str | None = setting(
        None, "prompt for training and scoring: a YAML file, or bare (default: the sampling prompt)", path=True
    )
    generator: str | None = setting(
        None, "model to sample from in the first round (default: the student itself)", path=True
    )
    oversample: int = setting(30, "samples per question, at most", gt=0, le=limits.SAMPLES)
    adaptive: bool = setting(True, "stop early on solved questions; false: take all samples of every question")
    first: int = setting(
        4,
        "adaptive: samples per question before the first check; each later check doubles them",
        gt=0,
        le=limits.SAMPLES,
    )
    keep: int = setting(1, "correct completions kept per question; more than 1 must differ", gt=0, le=limits.SAMPLES)
    chunk: int = setting(
        512, "questions sampled together, and saved before the next chunk starts", gt=0, le=limits.QUESTIONS
    )
    rounds: int = setting(
        1,
        "rounds of sampling and training; later rounds sample from the previous round's student",
        gt=0,
        le=limits.ROUNDS,
    )
    teach: str | None = setting(
        None, "task whose worked solutions the model is first fine-tuned on: sums:shown, units:train, gsm8k:FILE"
    )
    teach_steps: int = setting(300, "steps of this first fine-tuning", gt=0, le=limits.STEPS)
    teach_lr: float | None = setting(None, "peak learning rate of this first fine-tuning (default: train.lr)", gt=0)


Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
Algorithm = Literal["grpo", "dr_grpo", "dapo", "gspo", "rloo", "ppo"]
KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True)
class RlSettings:
    """Values that are None follow from `algorithm`, see `policy.ALGORITHMS`."""

    tasks: tuple[str, ...] = setting((), "tasks whose questions are the prompts, named as in `flatout eval`")
    prompts: int = setting(32, "prompts of a rollout phase, over all tasks and ranks", gt=0, le=limits.SEQUENCES)
    samples: int = setting(8, "completions of each prompt", gt=0, le=limits.SAMPLES)
    updates: int = setting(1, "optimizer steps (mini-batches) per epoch of a phase", gt=0, le=limits.SEQUENCES)
    epochs: int = setting(1, "passes over the completions of a phase", gt=0, le=limits.EPOCHS)
    algorithm: Algorithm = setting("grpo", "how completions are compared, and the loss")
    clip_low: float | None = setting(
        None, "how far the ratio of new to old probability may fall below 1 (default: by algorithm)", gt=0, lt=1
    )
    clip_high: float | None = setting(None, "how far that ratio may rise above 1 (default: by algorithm)", gt=0)
    dual_clip: float | None = setting(None, "bound of the ratio where the advantage is negative", gt=1)
    aggregation: Aggregation | None = setting(None, "how token losses become one loss (default: by algorithm)")
    kl: float = setting(0.0, "weight of the KL divergence from the initial model", ge=0)
    kl_estimator: KlEstimator = setting("k3", "estimator of that divergence")
    overlong_buffer: int = setting(
        0, "tokens before sample.max_tokens over which the reward falls by 1", ge=0, le=limits.ANSWER_TOKENS
    )
    mask_truncated: bool = setting(False, "leave completions that reach sample.max_tokens out of the loss")
    dynamic_sampling: int = setting(
        0,
        "rounds in which prompts whose completions all got the same reward are replaced by new ones",
        ge=0,
        le=limits.ROUNDS,
    )
    ahead: int = setting(
        0,
        "phases generated ahead of training, so that slow grading overlaps with it; off-policy by as many phases",
        ge=0,
        le=limits.AHEAD,
    )
    graders: int | None = setting(
        None,
        "processes that grade the completions of a task (default: one fewer than the cores, at most 8)",
        gt=0,
        le=limits.PROCESSES,
    )
    sampler: Literal["flatout", "vllm"] = setting(
        "flatout", "what generates completions: flatout's own sampler, or vLLM in the same process, if installed"
    )
    vllm_memory: float = setting(0.3, "vllm: share of the GPU's memory that vLLM may take", gt=0, lt=1)
    curriculum: bool = setting(False, "choose the level of each task by the accuracy of earlier phases")
    old_logprobs: Literal["auto", "sampler", "trainer"] = setting(
        "auto",
        "which log-probabilities the ratio is taken against; auto: the sampler's if they agree with the trainer's",
    )
    correction: float | None = setting(
        2.0, "upper limit of the importance weight trainer / sampler; null: no correction", gt=0
    )
    critic: Literal["shared", "own"] = setting(
        "shared", "ppo: a value head on the policy's trunk, or a model of its own"
    )
    value_weight: float = setting(0.5, "ppo: weight of the value loss", gt=0)
    value_clip: float | None = setting(
        0.2, "ppo: how far a value may move from its value at rollout time; null: no limit", gt=0
    )
    gamma: float = setting(1.0, "ppo: discount per token", gt=0, le=1)
    gae_lambda: float = setting(0.95, "ppo: decay of generalised advantage estimation", ge=0, le=1)
    critic_warmup: int = setting(0, "ppo: number of first phases that train only the critic", ge=0, le=limits.PHASES)
    teach: int = setting(
        0,
        "number of first phases that train on worked solutions, for weights that solve nothing yet; those of jsonl: "
        "files are in the field that the task names: jsonl:FILE?solution=FIELD",
        ge=0,
        le=limits.PHASES,
    )
    teach_lr: float | None = setting(
        None, "peak learning rate of these first phases, with a cosine decay of its own (default: train.lr)", gt=0
    )

    @property
    def steps_in_phase(self) -> int:
        return self.updates * self.epochs

    @property
    def taught_first(self) -> tuple[int, float] | None:
        """The steps on worked solutions and their learning rate, if it is another."""
        return (self.teach * self.steps_in_phase, self.teach_lr) if self.teach and self.teach_lr else None


@dataclass(frozen=True, kw_only=True)
class MtlSettings:
    method: Literal["mixed", "equal", "pcgrad", "cagrad", "mgda"] = setting(
        "mixed",
        "mixed: tasks shuffled together; equal: as many prompts of each per step; others: equal, gradients combined",
    )


Phase = Literal["all", "1", "2", "3"]
Temperature = Literal["annealed", "learned", "fixed"]


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Phase 1 has the length and learning rate of `train`; 2 and 3 have their own here."""

    phase: Phase = setting("all", "1: the adapters; 2: the router; 3: both together; all: one after the other")
    start: str | None = setting(
        None,
        "phase 2 or 3 alone: the run of the previous phase, or a folder with a PEFT adapter for each source",
        path=True,
    )
    teach_steps: int | None = setting(
        None, "first steps, which train all weights on all sources; for random weights", gt=0, le=limits.STEPS
    )
    teach_lr: float | None = setting(None, "peak learning rate of these first steps (default: train.lr)", gt=0)
    teach_answers: Literal["own", "shuffled"] = setting(
        "own", "answers in these steps; shuffled: each question gets another's answer, which teaches only their form"
    )
    router_steps: int | None = setting(None, "steps of phase 2 (default: same as phase 1)", gt=0, le=limits.STEPS)
    router_lr: float = setting(1e-3, "peak learning rate of phase 2", gt=0)
    joint_steps: int | None = setting(None, "steps of phase 3 (default: same as phase 1)", gt=0, le=limits.STEPS)
    joint_lr: float = setting(2e-4, "peak learning rate of phase 3", gt=0)
    hidden: int = setting(256, "width of the router's hidden layer", gt=0, le=65536)
    mode: Literal["soft", "hard"] = setting(
        "soft", "in training, a prompt uses all adapters, weighted, or only one (Gumbel, straight-through)"
    )
    temperature: float = setting(1.0, "temperature of the router's softmax, at the start of phase 2", gt=0)
    temperature_end: float = setting(
        0.1, "annealed: the temperature at the end of phase 2 and in phase 3; learned: the lowest", gt=0
    )
    temperature_mode: Temperature = setting(
        "annealed", "the temperature falls over phase 2, is learned, or stays fixed"
    )
    balance: float = setting(0.1, "weight of the load-balance loss: all adapters are used", ge=0)
    sparsity: float = setting(0.05, "weight of the sparsity loss: a prompt uses few adapters", ge=0)
    consistency: float = setting(0.1, "weight of the consistency loss: prompts of a task are routed the same way", ge=0)
    entropy: float = setting(0.01, "weight of the entropy bonus: the router does not decide too early", ge=0)
    single_first: float = setting(0.8, "phase 3: share of the steps with a single task, at the start", ge=0, le=1)
    single_last: float = setting(0.2, "phase 3: the same at the end; the other steps mix all tasks", ge=0, le=1)
    questions: int = setting(
        100, "held-out questions of each task that are scored after a phase, at most", gt=0, le=limits.QUESTIONS
    )
    answer_tokens: int = setting(128, "longest answer to such a question, in tokens", gt=0, le=limits.ANSWER_TOKENS)


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The plan decisions that a user can pin; None leaves the decision to the plan."""

    precision: Precision | None = setting(None, "compute type of the forward and backward pass")
    micro_batch: int | None = setting(None, "sequences in one forward pass on one rank", gt=0, le=limits.SEQUENCES)
    accumulation: int | None = setting(None, "micro-batches in one optimizer step", gt=0, le=limits.SEQUENCES)
    sharding: Sharding | None = setting(
        None, "several ranks: a copy of the weights on each (none), or rows of each matrix (full, FSDP2)"
    )
    recompute: Recompute | None = setting(None, "activations recomputed in the backward pass")
    compile: Compile | None = setting(None, "torch.compile per block")
    attention: Attention | None = setting(None, "attention backend; short: flatout's own, for short packed documents")
    fused_qkv: bool | None = setting(None, "one kernel each for norm and rotary embeddings around the qkv matmul")
    fused_mlp: bool | None = setting(None, "one kernel each for norm and SwiGLU around the MLP's matmuls")
    fused_loss: bool | None = setting(None, "one kernel for the cross-entropy of a chunk of logits")
    fp8: bool | None = setting(None, "8-bit matmuls in the fused segments")
    loss_chunk: int | None = setting(None, "rows of logits held at a time by the loss", gt=0, le=limits.BATCH_TOKENS)
    tf32: bool | None = setting(None, "TF32 for the matmuls that stay in fp32")
    graphs: bool | None = setting(None, "run the forward and backward pass as CUDA graphs")
    fused_optimizer: bool | None = setting(None, "fused AdamW")
    workers: int | None = setting(None, "data loader workers", ge=0, le=limits.PROCESSES)
    prefetch: int | None = setting(None, "steps of data loaded ahead of the device", gt=0, le=limits.AHEAD)
    pin_memory: bool | None = setting(None, "page-locked staging buffers for the copy to the device")
    expandable_segments: bool | None = setting(None, "allocator: expandable segments, against fragmentation")
    memory_fraction: float | None = setting(None, "allocator: share of the device's memory it may use", gt=0, le=1)
    manual_gc: bool | None = setting(None, "collect Python garbage at chosen steps only")
    threads: int | None = setting(None, "CPU threads per rank", gt=0, le=limits.THREADS)
    preset: Preset = setting("balanced", "how aggressively to optimise for speed")
    # The decisions above that the preset has set, and not the user.
    implied: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    every: int | None = setting(None, "steps between evaluations (default: only at the end)", gt=0, le=limits.STEPS)
    tokens: int = setting(262144, "validation tokens of one evaluation, at most", gt=0, le=limits.TOKENS)
    patience: int | None = setting(None, "stop after this many evaluations without improvement", gt=0, le=limits.STEPS)
    min_delta: float = setting(0.0, "smallest change that counts as an improvement", ge=0)
    tasks: tuple[str, ...] = setting((), "tasks to evaluate during the run, named as in `flatout eval`")
    tasks_every: int | None = setting(
        None, "steps between task evaluations (default: eval.every)", gt=0, le=limits.STEPS
    )
    task_limit: int = setting(
        100, "questions of each task, at most; the same ones every time", gt=0, le=limits.QUESTIONS
    )
    task_tokens: int = setting(256, "longest answer to a task question, in tokens", gt=0, le=limits.ANSWER_TOKENS)
    criterion: Literal["loss", "tasks"] = setting(
        "loss", "metric for patience and save.best: the validation loss, or the mean task score"
    )


@dataclass(frozen=True, kw_only=True)
class SaveSettings:
    every: int | Literal["epoch"] | None = setting(
        None,
        "steps between checkpoints, or epoch: at the end of each pass over the data (default: only at the end)",
        gt=0,
        le=limits.STEPS,
    )
    keep: int = setting(2, "checkpoints kept; never fewer than two verified ones", ge=2, le=limits.STEPS)
    asynchronous: bool = setting(True, "write a copy of the state in the background; false: training waits")
    best: bool = setting(False, "also keep the best checkpoint, by eval.criterion")
    weights_only: bool = setting(False, "save without the optimizer state: smaller, but the run cannot be resumed")


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    every: int = setting(10, "steps between printed lines if the output is not a terminal", gt=0, le=limits.STEPS)
    tensorboard: bool = setting(False, "also write TensorBoard event files into the run folder")
    wandb: Literal["off", "offline", "online"] = setting("off", "also write to Weights & Biases")
    trackio: bool = setting(False, "also write to Trackio, on this machine")
    mlflow: bool = setting(False, "also write to MLflow: MLFLOW_TRACKING_URI, or files in the run folder")
    project: str = setting("flatout", "project name for trackers")
    name: str | None = setting(None, "run name for trackers (default: recipe and time)")


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    val_loss: float | None = setting(
        None, "stop when the validation loss is this low, and report how long it took", gt=0
    )


@dataclass(frozen=True, kw_only=True)
class CriteriaSettings:
    tokens_per_s: float | None = setting(
        None, "at least this many tokens a second on all devices together, without padding", gt=0
    )
    tokens_per_s_per_device: float | None = setting(
        None, "at least this many tokens a second on each device, without padding", gt=0
    )
    mfu: float | None = setting(None, "at least this MFU, common convention (6N + 12LHT)", gt=0, le=1)
    utilisation: float | None = setting(None, "at least this share of time with a kernel running", gt=0, le=1)
    memory_share: float | None = setting(None, "peak memory no more than this share of the device", gt=0, le=1)
    hours: float | None = setting(None, "finish within this many hours", gt=0)
    loss_falling: bool | None = setting(None, "the training loss of the last tenth is below the first tenth's")
    validation_improving: bool | None = setting(
        None, "the last validation loss is below the first; with eval.tasks alone: the last score is above the first"
    )
    saves: int | None = setting(None, "at least this many checkpoints were saved", gt=0, le=limits.STEPS)
    actor_mfu: float | None = setting(
        None, "recipe rl: at least this MFU of the policy, in the time of its update", gt=0, le=1
    )
    critic_mfu: float | None = setting(
        None, "recipe rl: at least this MFU of a critic with a model of its own, in the time of its update", gt=0, le=1
    )
    reward: float | None = setting(None, "recipe rl: at least this mean reward in the last tenth of the phases")
    task_score: float | None = setting(None, "at least this mean score in the last evaluation of tasks", gt=0, le=1)


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    steps: tuple[int, int] | None = setting(
        None, "first and last step to trace into the run folder", each={"ge": 0, "le": limits.STEPS}
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    recipe: RecipeName = setting("pretrain", "kind of training")
    run: str | None = setting(None, "run folder, same as --run (default: runs/CONFIG-TIME)", path=True)
    seed: int = setting(0, "random seed for weights, data order and sampling", ge=0, le=limits.SEED)
    model: ModelSettings = section(ModelSettings, "the model")
    data: DataSettings = section(DataSettings, "the training data")
    train: TrainSettings = section(TrainSettings, "batch, length, learning rate and optimizer")
    lora: LoraSettings = section(LoraSettings, "train adapters instead of all weights")
    dpo: DpoSettings = section(DpoSettings, "preference optimisation on pairs of answers")
    rft: RftSettings = section(RftSettings, "rejection-sampling fine-tuning: questions and kept samples")
    rl: RlSettings = section(RlSettings, "reinforcement learning: prompts, completions and the policy's loss")
    mtl: MtlSettings = section(MtlSettings, "reinforcement learning on several tasks")
    router: RouterSettings = section(RouterSettings, "many adapters, one router: the three phases")
    sample: SampleSettings = section(SampleSettings, "how completions are sampled")
    plan: PlanSettings = section(PlanSettings, "decisions of the plan; any of them can be pinned")
    eval: EvalSettings = section(EvalSettings, "validation")
    save: SaveSettings = section(SaveSettings, "checkpoints")
    log: LogSettings = section(LogSettings, "printed lines and trackers")
    target: TargetSettings = section(TargetSettings, "the goal at which the run stops early")
    criteria: CriteriaSettings = section(CriteriaSettings, "criteria the finished run must meet")
    profile: ProfileSettings = section(ProfileSettings, "profiler traces")


Source = Literal["default", "preset", "file", "environment", "command line"]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A validated configuration and where each value came from (dotted key to source)."""

    settings: Settings
    sources: Mapping[str, Source]
    labels: Mapping[str, str] = field(default_factory=dict)  # what implies a value: `preset max`, `recipe rft`
