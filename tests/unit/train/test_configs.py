"""Configs of a run, raysgd's and Ray's."""

import pytest
import ray.train

from raysgd.train import CheckpointConfig, CheckpointStrategy, FailureConfig, RunConfig
from raysgd.train.configs import ScalingConfig, strategy_of


@pytest.mark.parametrize("kind", [CheckpointConfig, ray.train.CheckpointConfig])
@pytest.mark.parametrize("values", [{}, {"num_to_keep": 2, "checkpoint_score_attribute": "loss"}])
def test_a_checkpoint_config_selects_like_a_strategy(kind, values):
    assert strategy_of(kind(**values)) == CheckpointStrategy(**values)


def test_without_a_config_all_checkpoints_stay_and_with_0_none():
    assert strategy_of(None) == CheckpointStrategy()
    assert strategy_of(CheckpointConfig(num_to_keep=0)).num_to_keep == 0


def test_by_default_one_worker_trains_once():
    config = RunConfig()
    assert (config.name, config.storage_path, config.callbacks) == (None, None, None)
    assert config.failure_config == FailureConfig(max_failures=0, elastic=None)
    assert config.checkpoint_config == CheckpointConfig()
    scaling = ScalingConfig()
    assert (scaling.num_workers, scaling.use_gpu, scaling.resources_per_worker) == (1, False, None)
