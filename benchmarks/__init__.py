"""Measurements with their provenance: rivals side by side in one call, recorded as JSON lines in `results/`."""
