"""One optimizer step, measured, on one rank or many; and the checkpoints and faults around it."""
