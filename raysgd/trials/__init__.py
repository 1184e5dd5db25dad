"""Trials of Ray Tune. The class of the trainer is an argument. The other files import Ray Tune."""

CHECKPOINT = "checkpoint"
"""File of a checkpoint of a training function in the folder of a trial."""
