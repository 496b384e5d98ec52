"""flatout makes LLM training run at the limit of the hardware, and proves it with measurements."""

__version__ = "0.1.0"
