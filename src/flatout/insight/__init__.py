"""Reads run folders and says what they mean; nothing here can slow or break training."""
