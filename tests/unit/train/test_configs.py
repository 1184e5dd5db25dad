"""What a run is like, in our words and in Ray's."""

import pytest
import ray.train

from raysgd.train import CheckpointConfig, CheckpointStrategy, FailureConfig, RunConfig
from raysgd.train.configs import ScalingConfig, strategy_of


def test_the_newest_are_the_best_unless_a_number_says_so():
    assert CheckpointConfig().strategy() == CheckpointStrategy()
    assert CheckpointConfig(2, "loss", "min").strategy() == CheckpointStrategy(2, "loss", "min")


def test_a_config_of_ray_says_the_same():
    rays = ray.train.CheckpointConfig(
        num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"
    )
    assert strategy_of(rays) == CheckpointStrategy(2, "loss", "min")
    assert strategy_of(ray.train.CheckpointConfig()) == strategy_of(None) == CheckpointStrategy()


def test_none_may_be_kept():
    """0 is not taken for "not said", which would be all of them."""
    assert CheckpointConfig(num_to_keep=0).strategy().num_to_keep == 0


@pytest.mark.parametrize(
    "wrong", [{"num_to_keep": -1}, {"num_to_keep": True}, {"checkpoint_score_order": "largest"}]
)
def test_a_wrong_checkpoint_config_is_an_error_where_it_is_made(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises((TypeError, ValueError), match=rf"{name}={value!r}"):
        CheckpointConfig(**wrong)


def test_without_a_word_one_worker_trains_once_and_all_checkpoints_stay():
    config = RunConfig()
    assert (config.name, config.storage_path, config.callbacks) == (None, None, None)
    assert config.failure_config == FailureConfig(max_failures=0, elastic=None)
    assert config.checkpoint_config == CheckpointConfig()
    assert RunConfig().failure_config is not config.failure_config
    scaling = ScalingConfig()
    assert (scaling.num_workers, scaling.use_gpu, scaling.resources_per_worker) == (1, False, None)
