"""Shards of parameters and of optimizer state."""
