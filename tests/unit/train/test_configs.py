"""Configs of a run, raysgd's and Ray's."""

import pytest
import ray.train

from raysgd import train
from raysgd.train import CheckpointConfig, FailureConfig
from raysgd.train.configs import as_run_config, as_scaling_config


@pytest.mark.parametrize("module", [train, ray.train])
def test_configs_of_raysgd_and_of_ray_are_taken(module):
    checkpoint = {"num_to_keep": 2, "checkpoint_score_attribute": "loss"}
    config = as_run_config(
        module.RunConfig(
            name="mine",
            failure_config=module.FailureConfig(max_failures=3),
            checkpoint_config=module.CheckpointConfig(**checkpoint),
        )
    )
    assert (config.name, config.failure_config) == ("mine", FailureConfig(3))
    assert config.checkpoint_config == CheckpointConfig(**checkpoint)
    config = module.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 3})
    scaling = as_scaling_config(config)
    assert (scaling.num_workers, scaling.resources_per_worker) == (2, {"CPU": 3})
    assert as_scaling_config(module.ScalingConfig()).num_workers == 1
    config = module.RunConfig()
    config.checkpoint_config = module.CheckpointConfig()
    config.checkpoint_config.num_to_keep = 2
    assert as_run_config(config).checkpoint_config.num_to_keep == 2
    assert as_run_config(config).failure_config == FailureConfig(max_failures=0)
    config.checkpoint_config.num_to_keep = -1
    with pytest.raises(ValueError, match=r"^CheckpointConfig\(num_to_keep=-1\): must be"):
        as_run_config(config)
