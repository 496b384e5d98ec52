"""A reward model in TRL."""

from small import arguments, classifier, pairs, train
from trl import RewardConfig, RewardTrainer

train(RewardTrainer, classifier(), args=arguments(RewardConfig, max_length=128), train_dataset=pairs())
