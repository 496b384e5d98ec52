"""A typical Lightning loop: default precision, rows created when they are requested.

python -m benchmarks.doctor_gpu --causes none --script 'lightning=python benchmarks/doctor_lightning.py'
"""

try:
    import lightning as L
except ModuleNotFoundError:  # the same by its older name
    import pytorch_lightning as L
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from doctor_job import GPT

on_gpu = torch.cuda.is_available()
layers, width, length = (12, 768, 512) if on_gpu else (2, 32, 64)
text = "".join(chr(32 + (i * 7919) % 95) for i in range(100_000))


class Lines(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, i):
        start = (i * 31) % (len(text) - length - 1)
        return torch.tensor([ord(c) for c in text[start : start + length + 1]])


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.gpt = GPT("healthy", width=width, layers=layers, heads=12 if on_gpu else 2, length=length, vocab=32_000)

    def training_step(self, batch, index):
        loss = cross_entropy(self.gpt(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False)
trainer.fit(Module(), DataLoader(Lines(), batch_size=8, shuffle=True))
