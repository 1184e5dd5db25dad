"""What TensorBoard shows of reports."""

import numpy as np
import pytest

from raysgd.train.callbacks import TBXLoggerCallback

events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def test_numbers_are_scalars_and_lists_of_them_histograms(tmp_path):
    callback = TBXLoggerCallback()
    callback.start_training(logdir=tmp_path, config={})
    own = {"_timestamp": 1.0, "_training_iteration": 7, "_time_this_iter_s": 0.5, "_pid": 3}
    lists = {"list": [1, 2], "array": np.ones((2, 3)), "empty": [], "texts": ["a"], "nan": [np.nan]}
    nested = {"val": {"loss": 0.25, "each": (0.5, np.inf)}}
    callback.process_results([{"loss": 0.5, "one": np.ones(1), **own, **lists, **nested}, {"b": 1}])
    callback.finish_training()
    found = events.EventAccumulator(str(tmp_path))
    found.Reload()
    scalars = {"loss", "one", "val/loss", "_time_this_iter_s"}
    assert set(found.Tags()["scalars"]) == {f"ray/train/{name}" for name in scalars}
    histograms = {"list", "array", "val/each"}
    assert set(found.Tags()["histograms"]) == {f"ray/train/{name}" for name in histograms}
    assert found.Scalars("ray/train/loss")[0].step == 7
