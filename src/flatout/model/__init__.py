"""The decoder and its weights, in and out of Hugging Face format; foreign models as transformers builds them."""

from flatout.model.attention import Attend, Masked, Padded, Rectangular, Short, Sliding, Varlen
from flatout.model.critic import Critic
from flatout.model.decoder import Block, Decoder
from flatout.model.foreign import Foreign
from flatout.model.loading import Model, load_adapted, load_model
from flatout.model.router import Routed, Router

__all__ = [
    "Attend",
    "Block",
    "Critic",
    "Decoder",
    "Foreign",
    "Masked",
    "Model",
    "Padded",
    "Rectangular",
    "Routed",
    "Router",
    "Short",
    "Sliding",
    "Varlen",
    "load_adapted",
    "load_model",
]
