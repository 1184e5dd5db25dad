"""Names of older scripts: values of ``scheduler_step_freq``, keys of ``info``, and timeouts."""

from raysgd._internal.config import env_seconds
from raysgd.loop.operator_base import NUM_STEPS as NUM_STEPS
from raysgd.loop.operator_base import SCHEDULER_STEP as SCHEDULER_STEP
from raysgd.loop.operator_base import USE_FP16 as USE_FP16

SCHEDULER_STEP_BATCH = "batch"
SCHEDULER_STEP_EPOCH = "epoch"
SCHEDULER_STEP_MANUAL = "manual"
VALID_SCHEDULER_STEP = {SCHEDULER_STEP_BATCH, SCHEDULER_STEP_EPOCH, SCHEDULER_STEP_MANUAL}

NCCL_TIMEOUT_S = env_seconds("NCCL_TIMEOUT_S", 1800)
SGD_PLACEMENT_GROUP_TIMEOUT_S = env_seconds("SGD_PLACEMENT_GROUP_TIMEOUT_S", 100)
"""Timeouts in seconds. To change one, set the environment variable of its name before import."""

# Export every constant above.
__all__ = sorted(name for name in globals() if name.isupper())
