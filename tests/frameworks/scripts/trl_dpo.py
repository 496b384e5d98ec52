"""DPO in TRL, with a reference model."""

from small import arguments, model, pairs, train
from trl import DPOConfig, DPOTrainer

train(DPOTrainer, model(), ref_model=model(), args=arguments(DPOConfig, max_length=128), train_dataset=pairs())
