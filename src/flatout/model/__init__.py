"""The decoder and its weights, in and out of Hugging Face format."""

from flatout.model.attention import Attend, Masked, Rectangular, Varlen
from flatout.model.decoder import Block, Decoder

__all__ = ["Attend", "Block", "Decoder", "Masked", "Rectangular", "Varlen"]
