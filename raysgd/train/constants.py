"""Names of metrics, environment variables and files that older scripts import."""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "ALL_RESERVED_KEYS",
    "BASIC_AUTOFILLED_KEYS",
    "DATE",
    "DEFAULT_RESULTS_DIR",
    "DETAILED_AUTOFILLED_KEYS",
    "ENABLE_DETAILED_AUTOFILLED_METRICS_ENV",
    "ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV",
    "HOSTNAME",
    "NODE_IP",
    "PID",
    "PYTORCH_PROFILER_KEY",
    "RESULT_FILE_JSON",
    "TIMESTAMP",
    "TIME_THIS_ITER_S",
    "TIME_TOTAL_S",
    "TRAINING_ITERATION",
    "TRAIN_CHECKPOINT_SUBDIR",
    "TRAIN_ENABLE_WORKER_SPREAD_ENV",
    "TRAIN_PLACEMENT_GROUP_TIMEOUT_S_ENV",
    "TUNE_CHECKPOINT_FILE_NAME",
]

TIMESTAMP = "_timestamp"
TIME_THIS_ITER_S = "_time_this_iter_s"
TRAINING_ITERATION = "_training_iteration"
BASIC_AUTOFILLED_KEYS = {TIMESTAMP, TIME_THIS_ITER_S, TRAINING_ITERATION}
"""Names that raysgd adds to every report."""

DATE = "_date"
HOSTNAME = "_hostname"
NODE_IP = "_node_ip"
PID = "_pid"
TIME_TOTAL_S = "_time_total_s"
DETAILED_AUTOFILLED_KEYS = {DATE, HOSTNAME, NODE_IP, PID, TIME_TOTAL_S}
"""Names that raysgd adds to reports if an environment variable enables them."""

PYTORCH_PROFILER_KEY = "_train_torch_profiler"
"""Name of reported profiler traces: pairs of file name and content."""
ALL_RESERVED_KEYS = {PYTORCH_PROFILER_KEY}
"""Names that callbacks do not receive."""

DEFAULT_RESULTS_DIR = Path("~/ray_results").expanduser()
RESULT_FILE_JSON = "results.json"
TRAIN_CHECKPOINT_SUBDIR = "checkpoints"
TUNE_CHECKPOINT_FILE_NAME = "checkpoint"

ENABLE_DETAILED_AUTOFILLED_METRICS_ENV = "TRAIN_RESULT_ENABLE_DETAILED_AUTOFILLED_METRICS"
ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV = "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES"
TRAIN_ENABLE_WORKER_SPREAD_ENV = "TRAIN_ENABLE_WORKER_SPREAD"
TRAIN_PLACEMENT_GROUP_TIMEOUT_S_ENV = "TRAIN_PLACEMENT_GROUP_TIMEOUT_S"
