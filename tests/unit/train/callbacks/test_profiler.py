"""Traces of torch's profiler, as a callback writes them."""

from raysgd.train.callbacks import TorchTensorboardProfilerCallback
from raysgd.train.constants import PYTORCH_PROFILER_KEY


def test_traces_are_written_into_their_folder_alone(tmp_path):
    callback = TorchTensorboardProfilerCallback()
    callback.start_training(logdir=tmp_path, config={})
    callback.process_results([{PYTORCH_PROFILER_KEY: [("../worker_0.json", "{}")]}, {}])
    assert [p.name for p in (tmp_path / "pytorch_profiler").iterdir()] == ["worker_0.json"]
    assert not (tmp_path / "worker_0.json").exists()
