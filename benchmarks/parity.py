"""Do the fast paths train equally well? Validation loss after the same steps on the same data, in pairs by seed.

    python -m benchmarks.parity --tokens FOLDER --steps 500 --seeds 3

Every run is `flatout train examples/pretrain-124m.yaml` with 65,536 tokens a step and overrides. Runs of one seed share
the initial weights and the order of the data. Validation is always in bf16, so it depends on the weights alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.results import FOLDER, Call, Result, git_commit, write
from flatout.config.load import load
from flatout.recipes import pretrain

PLAIN = ["plan.fused_qkv=false", "plan.fused_mlp=false", "plan.fused_loss=false", "plan.fp8=false"]
VARIANTS = {
    "plain": [*PLAIN, "plan.compile=default"],
    "plain-eager": [*PLAIN, "plan.compile=none"],  # no kernel of ours either: how far apart two right ones end
    "kernels": ["plan.fp8=false"],
    "kernels-fp8": ["plan.fp8=true"],
}


def final_loss(overrides: list[str], *, folder: Path) -> float:
    settings = load("examples/pretrain-124m.yaml", overrides=overrides, environ={}).settings
    outcome = pretrain.run(settings, folder=folder)
    if not outcome.val_losses:
        raise SystemExit("stopped before the run's last evaluation; what had ended is recorded")
    return outcome.val_losses[-1]


def compared(call: Call, losses: dict[str, list[float]]) -> list[Result]:
    """Losses by variant, each compared with the plain path of the same seed, where both have ended."""
    results = []
    for name, values in losses.items():
        if not values:
            continue
        results.append(call.result(variant=name, metric="val_loss", unit="nats a token", values=values))
        if name != "plain":
            shares = [value / plain - 1 for value, plain in zip(values, losses["plain"], strict=False)]
            results.append(call.result(variant=name, metric="against_plain", unit="relative, by seed", values=shares))
            print(f"{name}: {statistics.mean(shares):+.3%} of plain ({min(shares):+.3%} to {max(shares):+.3%})")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", required=True, help="folder of prepared shards")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", default="kernels,kernels-fp8", help=f"besides plain: {', '.join(VARIANTS)}")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "parity.jsonl")
    options = parser.parse_args()
    common = [
        "data.source=tokens", f"data.path={options.tokens}", "data.tokenizer=byte", "train.batch_tokens=65536",
        f"train.steps={options.steps}", f"train.warmup_steps={options.steps // 10}", "plan.micro_batch=64",
        "eval.every=null", "save.every=null", "save.weights_only=true", *options.override,
    ]  # fmt: skip
    variants = {name: VARIANTS[name] for name in ("plain", *options.variants.split(","))}
    losses: dict[str, list[float]] = {name: [] for name in variants}
    call = Call(benchmark="parity", commit=options.commit or git_commit())
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for seed in range(options.seeds):
                for name, overrides in variants.items():
                    began = time.time()
                    folder = Path(scratch) / f"{name}-{seed}"
                    losses[name].append(final_loss([*common, *overrides, f"seed={seed}"], folder=folder))
                    print(f"{name} seed {seed}: {losses[name][-1]:.5f} ({time.time() - began:.0f} s)", flush=True)
    finally:
        write(compared(call, losses), options.to)


if __name__ == "__main__":
    main()
