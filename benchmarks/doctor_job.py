"""A GPT training loop on one GPU, healthy but for one planted cause: `python benchmarks/doctor_job.py CAUSE`.

Read by `benchmarks.doctor_gpu`, run by the doctor. Random tokens; every plant is one that people do make.
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

cause = sys.argv[1] if len(sys.argv) > 1 else "healthy"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 400
torch.manual_seed(0)
vocab = 32_000
width, layers, heads, rows, length = 768, 8, 12, 16, 1024
if cause == "small-batch":
    rows, length = 1, 256
if cause == "launch-bound":
    width, layers, heads, rows, length, vocab = 128, 32, 4, 8, 512, 2_000
if cause == "wrong-dtype":
    width, layers, rows, length, vocab = 384, 4, 4, 512, 4_000
if cause == "slow-optimizer":
    rows = 4
if cause == "recompiles":
    width, layers, length, rows = 384, 4, 512, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = (y.view(b, t, heads, w // heads).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(w, dim=2))
        if cause == "written-out-attention":
            mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
            y = ((q @ k.transpose(-2, -1)) * (w // heads) ** -0.5).masked_fill(~mask, float("-inf")).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if cause == "needless-recompute" else block(x)
        return self.head(self.ln(x))


class Rows(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, i):
        if cause == "data-starvation":
            time.sleep(0.006)  # reading and decoding a file
        ids = torch.randint(1, vocab, (length + 1,), generator=torch.Generator().manual_seed(i))
        if cause == "padding":
            ids[length // 4 + i % 32 :] = 0
        return ids


if cause == "math-attention":
    for name in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp", lambda _: None)(False)
if cause == "anomaly-mode":
    torch.autograd.set_detect_anomaly(True)
if cause == "debug-flags":
    torch.use_deterministic_algorithms(True, warn_only=True)

device = torch.device("cuda")
model = GPT().to(device)
if cause == "wrong-dtype":
    model = model.double()
run = model
if cause == "recompiles":
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.cache_size_limit = 256
    run = torch.compile(model, backend="aot_eager")
slow = {"fused": False, "foreach": False} if cause == "slow-optimizer" else {"fused": True}
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, **slow)
full = cause in ("fp32-matmul", "precision-inactive", "wrong-dtype")
if not full:
    torch.set_float32_matmul_precision("high")
scaler = torch.amp.GradScaler("cuda") if cause == "precision-inactive" else None
workers = 0 if cause == "data-starvation" else 6
loader = DataLoader(Rows(), batch_size=rows, num_workers=workers, pin_memory=True, persistent_workers=workers > 0)
lengths = random.Random(0).sample(range(length // 2, length), min(length // 2 - 1, 200))
folder = tempfile.mkdtemp()

for step, ids in enumerate(loader):
    if step >= steps:
        break
    ids = ids.to(device, non_blocking=True)
    if cause == "recompiles":
        ids = ids[:, : lengths[step % len(lengths)]]
    mixed = contextlib.nullcontext() if full else torch.autocast("cuda", dtype=torch.bfloat16)
    with mixed:
        logits = run(ids[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
    if cause == "precision-inactive":
        with torch.autocast("cuda", dtype=torch.bfloat16):  # too late: the products are done
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
    optimizer.zero_grad(set_to_none=True)
    if cause == "empty-cache":
        gc.collect()
        torch.cuda.empty_cache()
    if cause == "checkpointing" and step % 3 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, os.path.join(folder, "last.pt"))
