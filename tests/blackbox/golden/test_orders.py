"""Every sample goes to the same worker at the same step as in the recorded orders."""

import pytest
import torch

from raysgd.torch import TorchTrainer, TrainingOperator
from tests.blackbox.golden.cases import FAMILIES, LOADERS, kept


@pytest.mark.parametrize("family", FAMILIES)
def test_orders_are_those_that_were_written_down(family):
    if family == "keras":
        pytest.importorskip("tensorflow")
    golden = kept(family)
    for name, read in FAMILIES[family]():
        assert read() == golden.pop(name), (
            f"{name}: another order than before. Only if it shall change: "
            "python -m tests.blackbox.golden.cases"
        )
    assert not golden, "orders that nobody reads any more"


class Reader(TrainingOperator):
    """An operator that records the samples of its batches."""

    def setup(self, config):
        torch.manual_seed(12345)
        model = torch.nn.Linear(1, 1)
        self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))
        self.register_data(
            train_loader=LOADERS[config["kind"]](23, 4),
            validation_loader=LOADERS["in_order"](23, 4),
        )
        self.read = []

    def train_batch(self, batch, batch_info):
        values = batch[0] if isinstance(batch, list | tuple) else batch
        self.read.append(values.reshape(-1).int().tolist())
        return {}

    validate_batch = train_batch


@pytest.mark.parametrize("kind", [kind for kind in LOADERS if kind != "in_order"])
def test_a_trainer_orders_samples_by_the_seed_of_setup(kind):
    trainer = TorchTrainer(training_operator_cls=Reader, config={"kind": kind}, use_local=True)
    operator = trainer.get_local_operator()
    for _ in range(4):  # the last is epoch 3
        operator.read.clear()
        trainer.train()
    golden = kept("operator")
    assert [[operator.read]] == golden[f"operator, {kind} 23 by 4, seed 12345, epoch 3, 1"]
    operator.read.clear()
    trainer.validate()
    assert [[operator.read]] == golden["validation, in_order 23 by 4, 1"]
    trainer.shutdown()
