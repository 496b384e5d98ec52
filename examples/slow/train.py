"""Trains a small decoder as a typical first script does: it works, and its speed was never measured.

`flatout demo` runs it under `flatout doctor`, and then the same job with `flatout train`. It needs torch and two files
in its folder: documents.jsonl, and the tokenizer.json of a byte-level BPE.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

HERE = Path(__file__).parent
LAYERS, HIDDEN, HEADS, INTERMEDIATE, VOCAB = 3, 128, 4, 384, 1024
MAX_LENGTH = 256
BATCH_SIZE, ACCUMULATION = 1, 3  # "so that it surely fits"
EPOCHS, LR = 1, 1e-3
device = "cuda" if torch.cuda.is_available() else "cpu"


# -- data


class Documents(Dataset):
    def __init__(self):
        bpe = json.loads((HERE / "tokenizer.json").read_text())["model"]
        self.vocab = bpe["vocab"]
        merges = [m.split() if isinstance(m, str) else m for m in bpe["merges"]]
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(merges)}
        self.rows = [json.loads(line)["text"] for line in (HERE / "documents.jsonl").open()]

    def encode(self, text):
        pieces = list(text.replace(" ", "Ġ").replace("\n", "Ċ"))
        while True:
            pairs = set(zip(pieces, pieces[1:]))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, float("inf")), default=None)
            if best not in self.ranks:
                return [self.vocab[piece] for piece in pieces]
            merged = []
            for piece in pieces:
                if merged and (merged[-1], piece) == best:
                    merged[-1] += piece
                else:
                    merged.append(piece)
            pieces = merged

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids = [*self.encode(self.rows[i]), 0][: MAX_LENGTH + 1]
        padding = MAX_LENGTH + 1 - len(ids)
        return torch.tensor(ids + [0] * padding), torch.tensor(ids[1:] + [-100] * padding)


# -- model


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        q = rotate(self.q_proj(x).view(B, T, HEADS, C // HEADS).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(B, T, HEADS, C // HEADS).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(B, T, HEADS, C // HEADS).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / (C // HEADS) ** 0.5
        mask = torch.tril(torch.ones(T, T, device=x.device)).view(1, 1, T, T)
        scores = scores.masked_fill(mask == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.o_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.gate = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids):
        x = self.embedding(ids)
        half = HIDDEN // HEADS // 2
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] / 10000 ** (
            torch.arange(half, device=ids.device) / half
        )
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False)  # saves memory
        return self.head(self.norm(x))


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


# -- training


def main():
    torch.manual_seed(0)
    torch.autograd.set_detect_anomaly(True)  # there was a NaN once
    model = Decoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loader = DataLoader(Documents(), batch_size=BATCH_SIZE, shuffle=True)
    step, running = 0, 0.0
    for _ in range(EPOCHS):
        for i, (ids, targets) in enumerate(loader):
            ids, targets = ids.to(device), targets.to(device)
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=-100)
            (loss / ACCUMULATION).backward()
            running += loss.item() / ACCUMULATION
            if (i + 1) % ACCUMULATION == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                print(f"step {step} loss {running:.4f}", flush=True)
                step, running = step + 1, 0.0


if __name__ == "__main__":
    main()
