"""Lightning with a checkpoint after every step, as the machine may be taken away at any moment."""

import tempfile

import lightning as L
import torch
from gpt import GPT
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GPT(vocab=16384, length=64)

    def training_step(self, batch, index):
        (rows,) = batch
        return self.model(rows[:, :-1], rows[:, 1:])[1]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


rows = TensorDataset(torch.randint(0, 16384, (1000, 65)))
with tempfile.TemporaryDirectory() as folder:
    trainer = L.Trainer(
        max_steps=100,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=1)],
    )
    trainer.fit(Module(), DataLoader(rows, batch_size=4, shuffle=True))
