"""Names of metrics, environment variables and files that older scripts import."""

from pathlib import Path

TIMESTAMP = "_timestamp"
TIME_THIS_ITER_S = "_time_this_iter_s"
TRAINING_ITERATION = "_training_iteration"
BASIC_AUTOFILLED_KEYS = {TIMESTAMP, TIME_THIS_ITER_S, TRAINING_ITERATION}
"""Names that raysgd adds to every report."""

PYTORCH_PROFILER_KEY = "_train_torch_profiler"
"""Name of reported profiler traces: pairs of file name and content."""
ALL_RESERVED_KEYS = {PYTORCH_PROFILER_KEY}
"""Names that callbacks do not receive."""

DEFAULT_RESULTS_DIR = Path("~/ray_results").expanduser()
RESULT_FILE_JSON = "results.json"
TRAIN_CHECKPOINT_SUBDIR = "checkpoints"
TUNE_CHECKPOINT_FILE_NAME = "checkpoint"

ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV = "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES"
TRAIN_ENABLE_WORKER_SPREAD_ENV = "TRAIN_ENABLE_WORKER_SPREAD"
WORKER_CONTEXT_ENV = "RAYSGD_WORKER_CONTEXT"
TRAIN_PLACEMENT_GROUP_TIMEOUT_S_ENV = "TRAIN_PLACEMENT_GROUP_TIMEOUT_S"
