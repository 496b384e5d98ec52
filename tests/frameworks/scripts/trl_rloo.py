"""RLOO in TRL, with generation by transformers."""

from small import arguments, model, prompts, short, train
from trl import RLOOConfig, RLOOTrainer

settings = arguments(RLOOConfig, num_generations=4, max_completion_length=16, beta=0.0)
train(RLOOTrainer, model(), reward_funcs=short, args=settings, train_dataset=prompts())
