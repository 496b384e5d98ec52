"""litgpt's own pretraining loop on random tokens, its step counted from outside."""

import os
import tempfile
from pathlib import Path

import torch
from counted import saw, stepped
from litgpt import Config, pretrain
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule

torch.manual_seed(0)


class Rows(DataModule):
    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):
        self.batch_size = batch_size

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randint(0, 512, (2000, 129)), batch_size=self.batch_size)

    val_dataloader = train_dataloader


plain = torch.optim.AdamW.step


def step(self, *args, **kwargs):
    done = plain(self, *args, **kwargs)
    saw(16 * 128)
    stepped()
    return done


torch.optim.AdamW.step = step
config = Config(
    name="small", block_size=128, vocab_size=512, padded_vocab_size=512, n_layer=2, n_head=4, n_embd=128,
    intermediate_size=256, mlp_class_name="LLaMAMLP", norm_class_name="RMSNorm",
)  # fmt: skip
pretrain.setup(
    "small",
    model_config=config,
    out_dir=Path(tempfile.mkdtemp()),
    precision="32-true",
    data=Rows(),
    train=TrainArgs(
        save_interval=None, log_interval=1000, global_batch_size=16, micro_batch_size=8, max_tokens=60 * 16 * 128,
        max_seq_length=128, max_norm=1.0, lr_warmup_steps=2,
    ),
    eval=EvalArgs(interval=1000, max_iters=1, initial_validation=False, final_validation=False),
    devices=1,
    logger_name="csv",
)  # fmt: skip
os._exit(0)
