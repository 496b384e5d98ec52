"""Supervised fine-tuning in TRL."""

from small import arguments, model, texts, train
from trl import SFTConfig, SFTTrainer

train(SFTTrainer, model(), args=arguments(SFTConfig, max_length=128), train_dataset=texts())
