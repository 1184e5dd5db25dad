"""Checkpoints and run folders of earlier versions, which each later version must read."""
