"""Names of older scripts: values of ``scheduler_step_freq``, and keys of a loop's ``info``."""

__all__ = [
    "NUM_STEPS",
    "SCHEDULER_STEP",
    "SCHEDULER_STEP_BATCH",
    "SCHEDULER_STEP_EPOCH",
    "SCHEDULER_STEP_MANUAL",
    "USE_FP16",
    "VALID_SCHEDULER_STEP",
]

NUM_STEPS = "__num_steps__"
"""How many batches were asked for; None for the whole epoch."""
SCHEDULER_STEP = "scheduler_step"
"""The trainer's ``scheduler_step_freq``."""
USE_FP16 = "__use_fp16__"
"""Whether training runs in mixed precision."""

SCHEDULER_STEP_BATCH = "batch"
SCHEDULER_STEP_EPOCH = "epoch"
SCHEDULER_STEP_MANUAL = "manual"
VALID_SCHEDULER_STEP = {SCHEDULER_STEP_BATCH, SCHEDULER_STEP_EPOCH, SCHEDULER_STEP_MANUAL}
