"""Measurements with their provenance: flatout and its peers in one call, recorded as JSON lines in `results/`."""
