"""One optimizer step on one rank or many, measured; with checkpoints and fault handling."""
