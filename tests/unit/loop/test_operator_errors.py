"""Errors for operators that use raysgd in a wrong way: what they name, and when they are raised."""

import pytest
import torch

from raysgd import TrainingOperator
from raysgd.loop.operator_base import in_shape_of
from tests.operators import Adversaries, Classifier
from tests.unit.recorder import Recorder, Streaming


class Returning(Recorder):
    def train_batch(self, batch, batch_info):
        super().train_batch(batch, batch_info)
        return self.config["returned"]


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        ({1: 2.0}, TypeError, "named a metric 1. The name must be a string"),
        ({"num_samples": "8"}, TypeError, r"returned \(num_samples='8'\): must be a number"),
        ({"num_samples": -1}, ValueError, r"returned \(num_samples=-1\): must be at least 0"),
        ({"num_samples": float("inf")}, ValueError, r"returned \(num_samples=inf\): .* and finite"),
        ({"num_samples": float("nan")}, ValueError, r"returned \(num_samples=nan"),
    ],
)
def test_result_of_train_batch_that_is_no_dict_of_metrics(make_trainer, returned, error, message):
    trainer = make_trainer(Returning, {"returned": returned})
    with pytest.raises(error, match=rf"Returning\.train_batch {message}"):
        trainer.train()


def test_training_continues_after_a_metric_without_a_mean(make_trainer):
    trainer = make_trainer(Returning, {"returned": {"grades": [1, 2]}})
    with pytest.raises(TypeError, match=r"'grades' is .* cannot be averaged"):
        trainer.train()
    trainer.get_local_operator().config["returned"] = {}
    assert trainer.train()["batch_count"] == 4


@pytest.mark.parametrize("num_samples", [0, 0.5, 8, True])
def test_train_batch_may_return_any_number_of_samples(make_trainer, num_samples):
    trainer = make_trainer(Returning, {"returned": {"num_samples": num_samples}})
    assert trainer.train()["num_samples"] == 5 * num_samples


class Default(Adversaries):
    """Two models, with methods that are for one model."""

    train_batch = TrainingOperator.train_batch


class TwoOptimizers(Classifier):
    def setup(self, config):
        model = torch.nn.Linear(2, 2)
        several = [torch.optim.SGD([each], lr=0.1) for each in model.parameters()]
        self.model, _ = self.register(models=model, optimizers=several)
        self.register_data(train_loader=[torch.ones(4, 2)])


class Incomplete(Classifier):
    def setup(self, config):
        super().setup(config)
        self.optimizer = None


class Listed(Classifier):
    def setup(self, config):
        super().setup(config)
        self.model = [self.model]


@pytest.mark.parametrize(
    ("operator_cls", "message"),
    [
        (Default, "Default registered 2 models, and the default train_batch trains one model"),
        (TwoOptimizers, "TwoOptimizers registered 2 optimizers, .* Override train_batch"),
        (Incomplete, r"Incomplete has no self\.optimizer, .* Or override train_batch in"),
        (Listed, r"Listed has 1 objects in self\.model, but .* uses a single model"),
    ],
)
def test_default_methods_are_for_one_model(make_trainer, operator_cls, message):
    trainer = make_trainer(operator_cls, {"batch_size": 4})
    with pytest.raises(RuntimeError, match=message):
        trainer.train()


def test_registered_objects_come_back_in_the_shape_in_which_they_were_given():
    assert [in_shape_of(given, [1]) for given in ([0], (0,), 0)] == [[1], (1,), 1]
    assert in_shape_of((0, 0), [1, 2]) == (1, 2)


# ---- loaders


class Loading(Recorder):
    def make_loaders(self, config):
        return config["loaders"]


def test_function_is_called_in_each_epoch(make_trainer):
    calls = []

    def batches():
        calls.append(len(calls))
        for number in range(3):
            yield torch.full((2, 1), float(number)), torch.zeros(2, 1)

    loaders = {"train_loader": batches, "validation_loader": batches}
    trainer = make_trainer(Loading, {"loaders": loaders})
    assert [trainer.train()["num_samples"] for _ in range(2)] == [6, 6]
    assert trainer.validate()["num_samples"] == 6
    assert calls == [0, 1, 2]
    assert trainer.get_local_operator().trained == [0, 0, 1, 1, 2, 2] * 2


class NoLoader(Loading):
    """Has its own batches, but reads a loader that it did not register."""

    def train_epoch(self, iterator, info):
        return self.config["loop"](self, iterator)


@pytest.mark.parametrize(
    "loop",
    [
        lambda operator, iterator: next(iterator),
        lambda operator, iterator: operator.train_loader,
        lambda operator, iterator: operator.steps_per_epoch,
    ],
)
def test_loader_that_is_missing_is_an_error_when_it_is_read(make_trainer, loop):
    loaders = {"train_loader": None, "validation_loader": None}
    trainer = make_trainer(NoLoader, {"loaders": loaders, "loop": loop})
    with pytest.raises(RuntimeError, match=r"no train loader\. Call .*train_loader=\.\.\.\)"):
        trainer.train()
    with pytest.raises(RuntimeError, match="no validation loader"):
        trainer.validate()


def test_steps_per_epoch_needs_a_length(make_trainer):
    assert make_trainer(Recorder).get_local_operator().steps_per_epoch == 5
    operator = make_trainer(Streaming, {"wrap": list}).get_local_operator()
    assert operator.steps_per_epoch == len(operator.train_loader) == 5
    operator = make_trainer(Streaming).get_local_operator()
    with pytest.raises(RuntimeError, match="steps_per_epoch: the train loader, a Unsized, has no"):
        _ = operator.steps_per_epoch
    with pytest.raises(AttributeError, match="'Streaming' object has no attribute 'absent'"):
        _ = operator.absent
    type(operator).misspelled = property(lambda self: self.absnt)
    with pytest.raises(AttributeError, match="no attribute 'absnt'"):
        _ = operator.misspelled


# ---- loops with their own batches


class Counting(Recorder):
    def train_epoch(self, iterator, info):
        self.global_step += self.config["steps"]
        return {}


@pytest.mark.parametrize(("steps", "expected"), [(3, 3), (-1, 0)])
def test_a_loop_counts_its_own_steps_which_never_decrease(make_trainer, steps, expected):
    trainer = make_trainer(Counting, {"steps": steps})
    trainer.train()
    assert trainer.global_step == expected
