"""Lightning with a dataset that decodes its rows while the model waits."""

import json

import lightning as L
import torch
from gpt import GPT
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    document = json.dumps([i % 512 for i in range(200_000)])

    def __len__(self):
        return 10_000

    def __getitem__(self, i):
        return torch.tensor(json.loads(self.document)[i : i + 65])


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GPT()

    def training_step(self, batch, index):
        return self.model(batch[:, :-1], batch[:, 1:])[1]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


trainer = L.Trainer(
    max_steps=100, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Module(), DataLoader(Rows(), batch_size=8))
