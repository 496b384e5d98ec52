"""A LightningModule and its Trainer."""

import lightning
import torch
from counted import saw, stepped
from gpt import GPT

torch.manual_seed(0)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.gpt = GPT()

    def training_step(self, batch, _):
        (ids,) = batch
        saw(ids[:, 1:].numel())
        return self.gpt(ids[:, :-1], ids[:, 1:])[1]

    def on_train_batch_end(self, *_):
        stepped()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


rows = torch.utils.data.TensorDataset(torch.randint(0, 512, (2000, 129)))
trainer = lightning.Trainer(
    max_steps=60, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=8))
