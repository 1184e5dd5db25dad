"""Errors in the ``fit_config`` of the oldest scripts."""

import pytest

from raysgd.tf.creators import fit_plan


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"fit_config": 3}, TypeError, r"config\(fit_config=3\): must be a dict"),
        ({"fit_config": {"epochs": 0}}, ValueError, r"fit_config\(epochs=0\): must be at least 1"),
        ({"fit_config": {"batch_size": 3}}, ValueError, r"'batch_size'\. It can have 'epochs'"),
        (
            {"fit_config": {"callbacks": []}},
            ValueError,
            "TFTrainer.callbacks=",
        ),
    ],
)
def test_wrong_fit_configs_are_errors(config, error, text):
    with pytest.raises(error, match=text):
        fit_plan(config)
