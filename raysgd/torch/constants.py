"""Names of older scripts: values of ``scheduler_step_freq``, keys of ``info``, and timeouts."""

from raysgd._internal.config import env_seconds
from raysgd.loop.operator_base import NUM_STEPS, SCHEDULER_STEP, USE_FP16

__all__ = [
    "NCCL_TIMEOUT_S",
    "NUM_STEPS",
    "SCHEDULER_STEP",
    "SCHEDULER_STEP_BATCH",
    "SCHEDULER_STEP_EPOCH",
    "SCHEDULER_STEP_MANUAL",
    "SGD_PLACEMENT_GROUP_TIMEOUT_S",
    "USE_FP16",
    "VALID_SCHEDULER_STEP",
]

SCHEDULER_STEP_BATCH = "batch"
SCHEDULER_STEP_EPOCH = "epoch"
SCHEDULER_STEP_MANUAL = "manual"
VALID_SCHEDULER_STEP = {SCHEDULER_STEP_BATCH, SCHEDULER_STEP_EPOCH, SCHEDULER_STEP_MANUAL}

NCCL_TIMEOUT_S = env_seconds("NCCL_TIMEOUT_S", 1800)
SGD_PLACEMENT_GROUP_TIMEOUT_S = env_seconds("SGD_PLACEMENT_GROUP_TIMEOUT_S", 100)
"""Timeouts in seconds. To change one, set the environment variable of its name before import."""
