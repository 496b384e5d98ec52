"""detect_anomaly=True in Lightning, from the day on which the loss was NaN."""

import lightning as L
import torch
from gpt import GPT
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GPT(layers=4, length=64)

    def training_step(self, batch, index):
        (rows,) = batch
        return self.model(rows[:, :-1], rows[:, 1:])[1]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


rows = TensorDataset(torch.randint(0, 512, (2000, 65)))
trainer = L.Trainer(
    max_steps=100,
    accelerator="cpu",
    detect_anomaly=True,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Module(), DataLoader(rows, batch_size=8, shuffle=True))
