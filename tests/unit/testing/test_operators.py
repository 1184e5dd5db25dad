"""run_operator: an operator in this process."""

import pytest
import torch

from raysgd.testing import run_operator
from tests.operators import Classifier


def test_an_operator_can_be_driven_by_hand():
    operator = run_operator(Classifier, {"num_samples": 40, "batch_size": 8})
    batch = next(iter(operator.train_loader))
    before = [p.clone() for p in operator.model.parameters()]
    result = operator.train_batch(batch, {"batch_idx": 0})
    assert result["num_samples"] == 8
    assert any(
        not torch.equal(a, b) for a, b in zip(before, operator.model.parameters(), strict=True)
    )
    assert operator.validate(iter(operator.validation_loader))["num_samples"] == 40
    assert operator.train_epoch(iter(operator.train_loader))["num_samples"] == 40


def test_run_operator_uses_the_cpu_and_one_worker():
    operator = run_operator(Classifier)
    assert operator.device == torch.device("cpu")
    assert (operator.world_rank, operator.local_rank, operator.world_size) == (0, 0, 1)
    assert not torch.distributed.is_initialized()


def test_the_config_is_not_changed():
    class Changing(Classifier):
        def setup(self, config):
            config["mine"] = 1
            super().setup(config)

    config = {"num_samples": 16}
    run_operator(Changing, config)
    assert config == {"num_samples": 16}


def test_an_operator_of_tensorflow_runs_as_well():
    pytest.importorskip("tensorflow")
    from tests.tf_operators import Digits

    operator = run_operator(Digits, {"num_samples": 64})
    batch = next(iter(operator.train_loader))
    assert operator.train_batch(batch, {"batch_idx": 0})["num_samples"] == 32
    assert operator.validate(iter(operator.validation_loader))["num_samples"] == 357
