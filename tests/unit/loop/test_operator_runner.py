"""Requests to a runner that change no state: warm-ups, states for restarts, and descriptions."""

import copy
import io
import random
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from raysgd import ElasticConfig
from raysgd._internal.runner import WorkerContext
from raysgd._internal.worker_status import StateStatus
from raysgd.data import Dataset
from raysgd.elastic.call import RestartStateRequest
from raysgd.errors import CheckpointError
from raysgd.loop.feature import UpdateFeature
from raysgd.loop.requests import (
    LeavingMetricsRequest,
    PredictRequest,
    SaveRequest,
    StateRequest,
    TrainRequest,
    ValidateRequest,
)
from raysgd.loop.train_state import RandomGenerators
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner
from tests.unit import recorder
from tests.unit.recorder import Recorder, Streaming

EPOCH = list(range(40))
SANITY_CHECK = ValidateRequest(call_number=-1, num_steps=1, is_sanity_check=True)


def make_runner(operator_cls=Recorder, **options):
    return recorder.make_runner(operator_cls, {"batch_norm": True}, **options)


# ---- warm-ups of a worker that joins


class WarmedUp(UpdateFeature):
    needs_warm_up = True


class Counting(Recorder):
    """Counts batches that it has only begun, and draws random numbers."""

    begun: list[int]

    def setup(self, config):
        super().setup(config)
        type(self).begun = []

    def train_batch(self, batch, batch_info):
        self.begun.append(len(batch[0]))
        random.random()
        np.random.random()
        torch.rand(1)
        return super().train_batch(batch, batch_info)


def state_of(runner):
    state = copy.deepcopy(runner.state_dict())
    del state["data"]["loaders"]  # texts, which `assert_close` does not compare
    return state


def drawn():
    return random.random(), np.random.random(), torch.rand(1).item()


@pytest.mark.parametrize(("shares", "num_batches"), [("even", 1), ("measured", 2)])
def test_warm_up_computes_gradients_and_changes_nothing(shares, num_batches):
    elastic = ElasticConfig(shares=shares)
    runner = make_runner(Counting, num_workers=2, elastic=elastic)
    train_state = runner.operator._train_state
    if shares == "even":  # no feature needs it
        runner.warm_up()
        assert runner.operator.begun == []
    train_state.set_features([*train_state.features, WarmedUp()])
    before = state_of(runner)
    numbers, generators = RandomGenerators().state(), torch.get_rng_state()
    expected = drawn()
    RandomGenerators().set(numbers)
    torch.set_rng_state(generators)
    runner.warm_up()
    assert drawn() == expected
    assert runner.operator.begun == [8] * num_batches
    torch.testing.assert_close(state_of(runner), before, rtol=0, atol=0)
    assert runner.operator.trained == []
    assert {p.grad for p in runner.operator.model.parameters()} == {None}
    runner.handle(TrainRequest(call_number=0, until_epoch=1))
    assert runner.operator.trained == EPOCH


def test_warm_up_that_fails_is_a_warning(caplog):
    runner = make_runner()
    train_state = runner.operator._train_state
    train_state.set_features([*train_state.features, WarmedUp()])
    runner.operator.fail = Mock(side_effect=ValueError("bad batch"))
    runner.warm_up()
    assert "The warm-up of a replacement worker failed: ValueError('bad batch')" in caplog.text
    runner.operator.fail = lambda *arguments: None
    runner.handle(TrainRequest(call_number=0, until_epoch=1))
    assert runner.operator.trained == EPOCH


def test_warm_up_that_changes_parameters_damages_the_state():
    class Changing(Recorder):
        def train_batch(self, batch, batch_info):
            with torch.no_grad():
                self.model[0].weight.add_(1)
            return super().train_batch(batch, batch_info)

    runner = make_runner(Changing)
    train_state = runner.operator._train_state
    train_state.set_features([*train_state.features, WarmedUp()])
    runner.warm_up()
    assert train_state.state_status.condition == "damaged"


class Once(Streaming):
    """Iterators that can be read only once."""

    def make_loaders(self, config):
        return {name: iter(loader) for name, loader in super().make_loaders(config).items()}


def test_iterators_are_not_read_before_the_first_step():
    runner = make_runner(Once)
    train_state = runner.operator._train_state
    train_state.set_features([*train_state.features, WarmedUp()])
    runner.warm_up()
    assert runner.handle(SANITY_CHECK) is None
    runner.handle(TrainRequest(call_number=0, until_epoch=1))
    runner.handle(ValidateRequest(call_number=1))
    assert runner.operator.trained == runner.operator.validated == EPOCH


@pytest.mark.parametrize("num_workers", [1, 2])
def test_warning_about_a_loader_that_every_worker_trains_on(num_workers, caplog):
    make_runner(Once, num_workers=num_workers)
    told = [record.message for record in caplog.records if "cannot partition" in record.message]
    assert len(told) == (2 if num_workers == 2 else 0)
    for text in told:
        assert "raysgd cannot partition this list_iterator, because an iterator " in text


def test_a_sanity_check_returns_metrics_and_changes_nothing():
    runner = make_runner()
    runner.handle(TrainRequest(call_number=0, until_step=3))
    runner.handle(ValidateRequest(call_number=1, num_steps=2))
    runner.operator.model[2].running_mean.fill_(7)
    before = state_of(runner)
    assert runner.handle(SANITY_CHECK)["num_samples"] == 8
    assert runner.handle(LeavingMetricsRequest(call_number=1))["num_samples"] == 16
    torch.testing.assert_close(state_of(runner), before, rtol=0, atol=0)
    runner.handle(ValidateRequest(call_number=2, offset=16))
    assert runner.operator.validated == EPOCH


# ---- states for other workers


def test_state_for_a_restart_has_the_call_unless_a_failed_step_changed_it():
    runner = make_runner()
    assert TorchRunner(TorchOptions(training_operator_cls=Recorder)).restart_state() is None
    runner.handle(TrainRequest(call_number=7, until_step=3))
    runner.operator.model[0].eval()
    runner.handle(ValidateRequest(call_number=7))
    state = runner.handle(RestartStateRequest(num_workers=1))
    assert (state["global_step"], state["call"]["call_number"]) == (3, 7)
    other = make_runner()
    other.load_state_dict(state)
    assert other._loop.train_state.call.call_number == 7
    assert [layer.training for layer in other.operator.model] == [False, *[True] * 3]
    other.handle(TrainRequest(call_number=7, until_epoch=1))
    assert other.operator.trained == EPOCH[24:]
    runner._train_state.placement.state_status = StateStatus(is_complete=False)  # only its shard
    assert [runner.restart_state(number) is None for number in (1, 2)] == [False, True]
    runner._train_state.is_damaged = True
    assert runner.restart_state() is None
    requests = [TrainRequest(call_number=8, until_epoch=1), ValidateRequest(call_number=9)]
    requests += [PredictRequest(loader=[torch.ones(1, 1)]), StateRequest(frozen=True)]
    for request in requests:
        with pytest.raises(RuntimeError, match="The step after step 3 failed"):
            runner.handle(request)


def test_content_of_a_file_has_the_state_and_the_parts_of_the_driver():
    runner = make_runner()
    runner.handle(TrainRequest(call_number=0, until_step=3))
    parts, file = {"config": {"a": 1}, "provenance": {"b": 2}}, io.BytesIO()
    request = SaveRequest(driver_entries=parts, generator_states=[3], frozen=True, label="state.pt")
    content = runner.handle(request)
    content.write(file)
    written = torch.load(io.BytesIO(file.getvalue()))
    loaders, expected = written["data"].pop("loaders"), state_of(runner)
    facts = {"b": 2, "loaders": loaders, "seed": expected["data"]["seed"]}
    assert content.metadata == {"epoch": 1, "global_step": 3, "provenance": facts}
    expected["data"]["rng"] = [3]
    torch.testing.assert_close(written, {**expected, **parts}, rtol=0, atol=0)


@pytest.mark.parametrize(("with_items", "first"), [(True, 104), (False, 0)])
def test_state_within_a_data_set_continues_only_in_that_data_set(with_items, first):
    data = Dataset(range(100, 110), 4, transform=lambda i: (torch.full((1, 1), float(i)),) * 2)
    runner, other = make_runner(), make_runner()
    runner.handle(TrainRequest(call_number=0, until_step=1, dataset=data))
    other.load_state_dict(runner.state_dict())
    other.handle(TrainRequest(call_number=1, until_step=2, dataset=data if with_items else None))
    assert other.operator.trained[0] == first


def test_a_validation_begins_with_a_snapshot_and_the_next_epoch_too():
    """The validation may be long, and the operator may store its result."""
    runner = make_runner()
    runner.operator._train_state.settings.context = WorkerContext()
    runner.handle(TrainRequest(call_number=0, until_epoch=1))
    seen, before = [], runner.status().snapshot.num_invalidations
    runner.operator.fail = lambda info, when: seen.append(runner.status())
    runner.handle(ValidateRequest(call_number=1))
    assert [each.batches.num_samples for each in seen] == [0, 8, 16, 24, 32]
    assert (seen[0].snapshot.step, runner.status().snapshot.step) == (5, None)
    assert runner.status().snapshot.num_invalidations > before
    runner.operator.fail = lambda info, when: None
    runner.handle(TrainRequest(call_number=2, until_step=6))
    assert runner.status().snapshot.step == 5


# ---- random numbers


def test_generators_continue_from_lists():
    generators, numbers = RandomGenerators(), []
    state = generators.state()
    version, internal, gauss = state["python"]
    kind, keys, *rest = state["numpy"]
    lists = {"python": [version, list(internal), gauss], "numpy": [kind, keys.tolist(), *rest]}
    for given in (state, lists, state):
        generators.set(given)
        numbers.append((random.random(), np.random.random()))
    assert len(set(numbers)) == 1
    with generators.preserving_state():
        random.random()
    expected = random.random()
    generators.set(state)
    random.random()
    assert random.random() == expected


@pytest.mark.parametrize("place", [-1, 625])
def test_generators_with_a_wrong_position_are_refused(place):
    generators = RandomGenerators()
    state = generators.state()
    wrong = {**state, "numpy": (*state["numpy"][:2], place, *state["numpy"][3:])}
    with pytest.raises(CheckpointError, match=rf"position {place} must be from 0 to 624"):
        generators.loadable_states([state, wrong], 2)
    assert generators.loadable_states([state], 1) == [state]
    assert generators.loadable_states([state], 2) == ()
    assert generators.state()["python"] == state["python"]


# ---- how the workers read their loaders


@pytest.mark.parametrize(
    ("operator_cls", "partitions", "text"),
    [
        (Recorder, True, "40 samples, batch size 8 on each of 1 workers: each worker reads only"),
        (Recorder, False, "DataLoader of TensorDataset: your code selects the part of each worker"),
        (Once, True, "list_iterator: every worker reads and uses all of it"),
    ],
)
def test_description_of_the_data(operator_cls, partitions, text):
    found = make_runner(operator_cls, add_dist_sampler=partitions).operator.describe_data()
    assert list(found) == ["train", "validation"]
    assert all(each.startswith(text) for each in found.values())
