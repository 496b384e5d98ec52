"""A GPT training loop with one planted cause of slowness: `python benchmarks/doctor_job.py CAUSE [STEPS] [DEVICE]`.

`benchmarks.doctor_gpu` runs it under the doctor. It trains on random tokens; every planted cause is a common mistake.
On a CPU the model is tiny: that only shows that a job runs.
"""

import contextlib
import gc
import os
import random
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

# Where the cause needs another job than 8 layers of 768, 16 rows of 1,024 tokens and 32,000 ids.
SIZES = {
    "small-batch": {"rows": 1, "length": 256},
    "launch-bound": {"width": 128, "layers": 32, "heads": 4, "rows": 8, "length": 512, "vocab": 2_000},
    "wrong-dtype": {"layers": 4, "rows": 8},
    "slow-optimizer": {"rows": 4},
    "recompiles": {"width": 384, "layers": 2, "rows": 8, "length": 512},
    "checkpointing": {"layers": 2, "vocab": 8_000},
}
TINY = {"width": 32, "layers": 2, "heads": 2, "rows": 2, "length": 32, "vocab": 64}


class Block(nn.Module):
    def __init__(self, width, heads, written_out):
        super().__init__()
        self.heads, self.written_out = heads, written_out
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(w, dim=2))
        if self.written_out:
            mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
            scores = (q @ k.transpose(-2, -1)) * (w // self.heads) ** -0.5
            y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, cause, width, layers, heads, length, vocab):
        super().__init__()
        self.recompute = cause == "needless-recompute"
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, cause == "written-out-attention") for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.ln(x))


class Rows(Dataset):
    def __init__(self, cause, length, vocab):
        self.cause, self.length, self.vocab = cause, length, vocab

    def __len__(self):
        return 1_000_000

    def __getitem__(self, i):
        if self.cause == "data-starvation":
            time.sleep(0.006)  # reading and decoding a file
        ids = torch.randint(1, self.vocab, (self.length + 1,), generator=torch.Generator().manual_seed(i))
        if self.cause == "padding":
            ids[self.length // 4 + i % 32 :] = 0
        return ids


def train(cause, steps=400, device="cuda"):
    torch.manual_seed(0)
    size = {"width": 768, "layers": 8, "heads": 12, "rows": 16, "length": 1024, "vocab": 32_000}
    size.update(SIZES.get(cause, {}) if device == "cuda" else TINY)
    rows, length = size.pop("rows"), size["length"]
    if cause == "math-attention":
        for name in ("flash", "mem_efficient", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{name}_sdp", lambda _: None)(False)
    if cause == "anomaly-mode":
        torch.autograd.set_detect_anomaly(True)
    model = GPT(cause, **size).to(device)
    if cause == "wrong-dtype":
        model = model.double()
    run = model
    if cause == "recompiles":
        torch._dynamo.config.automatic_dynamic_shapes = False
        torch._dynamo.config.cache_size_limit = 256
        run = torch.compile(model, backend="aot_eager")
    slow = {"fused": False, "foreach": False} if cause == "slow-optimizer" else {"fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, **slow)
    full = device == "cpu" or cause in ("fp32-matmul", "precision-inactive")
    if not full:
        torch.set_float32_matmul_precision("high")
    scaler = torch.amp.GradScaler(device) if cause == "precision-inactive" else None
    workers = 0 if cause == "data-starvation" or device == "cpu" else 6
    loader = DataLoader(
        Rows(cause, length, size["vocab"]),
        batch_size=rows,
        num_workers=workers,
        pin_memory=device == "cuda",
        persistent_workers=workers > 0,
    )
    lengths = random.Random(0).sample(range(length // 2, length), min(length // 2 - 1, 200))
    history = []
    with tempfile.TemporaryDirectory() as folder:
        for step, ids in enumerate(loader):
            if step >= steps:
                break
            ids = ids.to(device, non_blocking=True)
            if cause == "recompiles":
                ids = ids[:, : lengths[step % len(lengths)]]
            mixed = contextlib.nullcontext() if full else torch.autocast(device, dtype=torch.bfloat16)
            with mixed:
                logits = run(ids[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
            if scaler is not None:
                with torch.autocast(device, dtype=torch.bfloat16):  # too late: the products are done
                    loss = loss * 1.0
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
            if cause == "host-sync":
                norms = {name: p.grad.norm().item() for name, p in model.named_parameters()}
                means = {name: p.grad.abs().mean().item() for name, p in model.named_parameters()}
                history.append((norms, means))
            optimizer.zero_grad(set_to_none=True)
            if cause == "empty-cache":
                gc.collect()
                torch.cuda.empty_cache()
            if cause == "checkpointing" and step % 3 == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, os.path.join(folder, "last.pt"))
    return loss.item()


if __name__ == "__main__":
    train(
        sys.argv[1] if len(sys.argv) > 1 else "healthy",
        steps=int(sys.argv[2]) if len(sys.argv) > 2 else 400,
        device=sys.argv[3] if len(sys.argv) > 3 else "cuda",
    )
