"""Checkpoints and run folders as an earlier version wrote them, which every later one reads."""
