"""Loaders that are passed to a call: ``predict`` and ``test``."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from raysgd._internal.nested import cat_outputs
from raysgd.testing import run_operator
from raysgd.torch.input.sources import wrap_loader
from tests.operators import Classifier, make_data
from tests.unit.callbacks.spy import Spy
from tests.unit.recorder import Recorder


def numbers(first, last, batch_size=8, **settings):
    """Return a loader of the samples `first` to `last - 1` of `Recorder`."""
    data = torch.arange(float(first), float(last)).reshape(-1, 1)
    return DataLoader(TensorDataset(data, data / 40), batch_size=batch_size, **settings)


class Echo(Recorder):
    """Returns nested predictions: a dict of a tensor, a list, and a tuple."""

    def predict_batch(self, batch, batch_info):
        assert not torch.is_grad_enabled()
        assert not self.model.training
        return {"sample": batch[0], "name": [f"{int(x)}" for x in batch[0]], "both": (batch[1],)}


# ---- predict


@pytest.mark.parametrize("partitions", [True, False])
def test_a_prediction_is_the_output_for_each_sample_in_order(make_trainer, partitions):
    trainer = make_trainer(config={"batch_norm": True}, add_dist_sampler=partitions)
    trainer.train(num_steps=2)
    data = make_data(37)
    model = trainer.get_model().eval()
    with torch.no_grad():
        expected = model(data.tensors[0])
    unlabelled = TensorDataset(data.tensors[0])
    for each in (data, unlabelled, data.tensors[0]):
        found = trainer.predict(DataLoader(each, batch_size=5))
        torch.testing.assert_close(found, expected)
        assert not found.requires_grad
    found = trainer.predict(lambda config: DataLoader(data, batch_size=config["batch_size"]))
    torch.testing.assert_close(found, expected)
    assert trainer.global_step == 2


class Counted(Sampler):
    def __iter__(self):
        next(self.passes)
        return iter(range(40))

    def __len__(self):
        return 40


def test_nested_predictions_are_joined_entry_by_entry(make_trainer):
    base = numbers(0, 40).dataset
    base.__deepcopy__ = lambda memo: pytest.fail("large data is copied")
    sampler = Counted()
    sampler.data, base.dataset = [base], base
    sampler.passes = base.passes = iter(range(9))
    loader = DataLoader(Subset(ConcatDataset([base]), range(40)), batch_size=7, sampler=sampler)
    found = make_trainer(Echo).predict(loader)
    assert next(sampler.passes) == 1
    assert found["sample"].flatten().tolist() == list(range(40))
    assert found["name"] == [str(n) for n in range(40)]
    assert found["both"][0].shape == (40, 1)


@given(
    world_size=st.integers(1, 5), total=st.integers(1, 40), size=st.integers(1, 9), data=st.data()
)
def test_sorting_by_place_restores_the_order_of_the_loader(world_size, total, size, data):
    sampler = data.draw(st.permutations(range(total)))
    loader = DataLoader(list(range(total)), batch_size=size, sampler=sampler)
    found = []
    for rank in range(world_size):
        source = wrap_loader(
            loader, training=False, partitions=True, world_size=world_size, rank=rank, seed=rank
        )
        found += zip(itertools.count(rank, world_size), source.batches(0, 0), strict=False)
    found.sort(key=lambda pair: pair[0])
    assert [int(x) for _, batch in found for x in batch] == sampler


DATA = TensorDataset(torch.arange(16.0)[:, None])


class OwnShuffle(Sampler):
    def __iter__(self):
        return iter(torch.randperm(16).tolist())

    def __len__(self):
        return 16


class OwnBatches(BatchSampler):
    pass


SHUFFLES = ValueError, "the loader shuffles.*sampler"
WITHOUT_ORDER = {
    "shuffled": (numbers(0, 40, shuffle=True), ValueError, "the loader shuffles.*shuffle=False"),
    "subset": (DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(0, 16, 3))), *SHUFFLES),
    "own": (DataLoader(DATA, batch_sampler=BatchSampler(OwnShuffle(), 4, False)), *SHUFFLES),
    "own batches": (DataLoader(DATA, batch_sampler=OwnBatches(OwnShuffle(), 4, False)), *SHUFFLES),
    "empty": (numbers(0, 0), RuntimeError, "The given loader has no batches: 0 samples"),
    "several": ({"a": numbers(0, 9), "b": numbers(0, 9)}, TypeError, "call trainer.test"),
    "none": (3, TypeError, "The loader must be iterable, but it is 3"),
    "tensor": (torch.ones(4, 1), TypeError, "A Tensor yields samples, not batches"),
    "data set": (TensorDataset(torch.ones(4, 1)), TypeError, "A TensorDataset yields samples"),
}


@pytest.mark.parametrize("kind", WITHOUT_ORDER)
def test_predict_refuses_loaders_without_an_order(make_trainer, kind):
    loader, error, text = WITHOUT_ORDER[kind]
    trainer = make_trainer(Recorder)
    with pytest.raises(error, match=text):
        trainer.predict(loader)
    assert trainer.train()["num_samples"] == 40


def test_a_prediction_in_rows_of_other_things_is_refused(make_trainer):
    class TimeMajor(Recorder):
        def predict_batch(self, batch, batch_info):
            return {"scores": (batch[0].expand(-1, 5).T.unsqueeze(2), [0] * len(batch[0]))}

    with pytest.raises(ValueError, match=r"shape \(5, 4, 1\) for a batch of 4 samples.*transpose"):
        make_trainer(TimeMajor).predict(DataLoader(DATA, batch_size=4))


def test_rows_of_ready_made_batches_are_those_of_their_tensors(make_trainer):
    class Swapped(Recorder):
        def predict_batch(self, batch, batch_info):
            output = batch[0].transpose(0, 1)
            return list(output) if batch[0].shape[2] == 1 else output

    trainer = make_trainer(Swapped)
    with pytest.raises(ValueError, match=r"shape \(5, 8, 2\) for a batch of 8 samples"):
        trainer.predict(DataLoader([(torch.ones(8, 5, 2), torch.ones(8))], batch_size=None))
    time_major = DataLoader([(torch.ones(8, 5, 1), torch.ones(8, 5))], batch_size=None)
    assert len(trainer.predict(time_major)) == 5


def test_a_prediction_without_a_row_for_each_sample_is_refused(make_trainer):
    class Mean(Recorder):
        def predict_batch(self, batch, batch_info):
            return batch[0].mean()

    with pytest.raises(TypeError, match=r"predict_batch returned tensor.* one row per sample"):
        make_trainer(Mean).predict(numbers(0, 9))


def test_rows_of_different_shapes_become_a_list():
    parts = [np.zeros((2, 3)), np.zeros((1, 4))]
    assert [row.shape for row in cat_outputs(parts, np.concatenate)] == [(3,), (3,), (4,)]


def test_a_given_loader_that_cannot_be_partitioned_is_refused():
    operator = run_operator(Classifier, {"num_samples": 8})
    settings = operator._train_state.settings
    settings.context = dataclasses.replace(settings.context, world_size=2)
    with pytest.raises(TypeError, match="cannot partition this list_iterator"):
        operator._train_state.data.wrap_argument(iter([]))


# ---- test


def test_test_measures_like_validate_but_changes_no_state(make_trainer):
    spy = Spy()
    trainer = make_trainer(Recorder, callbacks=[spy])
    trainer.validate(num_steps=2)
    before, hooks = trainer.latest_metrics, list(spy.hooks)
    found = trainer.test(numbers(0, 40))
    assert trainer.latest_metrics == before
    assert spy.hooks == hooks
    trainer.get_local_operator().validated.clear()
    rest = trainer.validate()
    assert trainer.get_local_operator().validated == list(range(16, 40))
    whole = trainer.validate()
    assert found["test_loss"] == whole["val_loss"] != rest["val_loss"]
    assert (found["num_samples"], found["batch_count"]) == (40, 5)
    means = [name for name in whole if not name.startswith("last_")]
    assert set(found) == {name.replace("val_", "test_") for name in means}
