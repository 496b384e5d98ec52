"""Reads run folders and explains them; nothing here can slow or break training."""
