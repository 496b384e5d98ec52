"""GRPO in TRL, with generation by transformers."""

from small import arguments, model, prompts, short, train
from trl import GRPOConfig, GRPOTrainer

settings = arguments(GRPOConfig, num_generations=4, max_completion_length=16)
train(GRPOTrainer, model(), reward_funcs=short, args=settings, train_dataset=prompts())
