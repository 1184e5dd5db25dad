"""Averages of the weights: their values, their use in validation, and how they are saved."""

import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
from cloudpickle import dumps
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from raysgd.callbacks import EMA, SWA, Callback, CheckpointCallback
from raysgd.errors import CheckpointError
from raysgd.loop.update import Update
from raysgd.torch.features.averaging import WeightAveraging
from tests.fidelity import flat
from tests.unit.recorder import Recorder

CONFIG = {"batch_norm": True, "dropout": 0.5, "shuffle": True}


class Reference(Callback):
    """A callback that updates an ``AveragedModel`` after each step or each epoch."""

    def __init__(self, every, **arguments):
        self._every, self._arguments, self.model = every, arguments, None

    def on_train_start(self, trainer):
        self.operator = trainer.get_local_operator()
        self.model = self.model or AveragedModel(self.operator.model, **self._arguments)

    def next_pause(self, global_step):
        return global_step + 1 if self._every == "step" else None

    def on_pause(self, trainer):
        self.model.update_parameters(self.operator.model)

    def on_epoch_end(self, trainer, metrics):
        if self._every != "step" and trainer.epoch >= self._every:
            self.on_pause(trainer)


@pytest.mark.parametrize(
    ("averaging", "reference"),
    [
        (lambda: EMA(0.7), lambda: Reference("step", multi_avg_fn=get_ema_multi_avg_fn(0.7))),
        (lambda: SWA(2), lambda: Reference(2)),
    ],
    ids=["EMA", "SWA"],
)
def test_the_average_is_that_of_torch_and_is_what_is_validated(make_trainer, averaging, reference):
    by_hand = reference()
    trainer = make_trainer(Recorder, CONFIG, callbacks=[averaging(), by_hand])
    history = trainer.fit(3)
    operator = trainer.get_local_operator()
    trained = flat(operator.model).clone()
    expected = flat(by_hand.model.module)
    assert not torch.equal(trained, expected)
    torch.testing.assert_close(flat(trainer.get_model()), expected)
    (data,) = {loader.dataset for loader in [operator.validation_loader]}
    with torch.no_grad():
        output = trainer.get_model().eval()(data.tensors[0])
    torch.testing.assert_close(trainer.predict(operator.validation_loader.loader), output)
    loss = torch.nn.functional.mse_loss(output, data.tensors[1]).item()
    assert history[-1]["val_loss"] == pytest.approx(loss, rel=1e-5)
    assert torch.equal(flat(operator.model), trained), "training continues with the weights"


def test_weights_are_validated_before_there_is_an_average(make_trainer):
    plain = make_trainer(Recorder, CONFIG).fit(3)
    averaged = make_trainer(Recorder, CONFIG, callbacks=[SWA(2)]).fit(3)
    losses = [[entry["val_loss"] for entry in history] for history in (plain, averaged)]
    # the first average contains only one epoch
    assert losses[0][:2] == losses[1][:2]
    assert losses[0][2] != losses[1][2]


def test_a_validation_that_fails_gives_the_weights_back(make_trainer):
    trainer = make_trainer(Recorder, CONFIG, callbacks=[EMA(0.9)])
    trainer.train()
    operator = trainer.get_local_operator()
    before = flat(operator.model).clone()

    def fail(batch_info, when):
        assert not torch.equal(flat(operator.model), before)
        raise ValueError("bad validation")

    operator.fail = fail
    with pytest.raises(ValueError, match="bad validation"):
        trainer.validate()
    assert torch.equal(flat(operator.model), before)


def test_interrupted_run_resumes_with_its_averages(make_trainer, tmp_path):
    """Averages can load before the callback starts. A state without averages resets them."""
    whole = make_trainer(Recorder, CONFIG, callbacks=[EMA(0.9)])
    expected = whole.fit(3)
    first = make_trainer(Recorder, CONFIG, callbacks=[EMA(0.9), CheckpointCallback(tmp_path)])
    first.fit(2)
    path = first.save(tmp_path / "state.pt")
    resumed = make_trainer(Recorder, CONFIG, callbacks=[EMA(0.9), CheckpointCallback(tmp_path)])
    assert resumed.fit(3)[-1] == expected[-1]
    loaded = make_trainer(Recorder, CONFIG)
    loaded.load(path)
    assert loaded.fit(3, callbacks=[EMA(0.9)])[-1] == expected[-1]
    state = loaded.state_dict()
    del state["averages"]
    loaded.load_state_dict(state)
    assert torch.equal(flat(loaded.get_model()), flat(loaded.get_local_operator().model))


@pytest.mark.parametrize(
    "change",
    [
        lambda averages: averages.update(decay=3),
        lambda averages: averages["models"][0].popitem(),
        lambda averages: averages["models"][0].update(
            {name: held.to_sparse() for name, held in averages["models"][0].items()}
        ),
    ],
)
def test_averages_that_do_not_fit_are_refused(make_trainer, change):
    trainer = make_trainer(Recorder, callbacks=[EMA()])
    trainer.train(num_steps=1)
    state = trainer.state_dict()
    change(state["averages"])
    with pytest.raises(CheckpointError, match="Cannot load 'averages'"):
        trainer.load_state_dict(state)


@pytest.mark.parametrize(
    ("kind", "value"), [(EMA, 1.0), (EMA, 0), (EMA, "0.9"), (SWA, 0), (SWA, 1.5)]
)
def test_arguments_out_of_range_are_refused(kind, value):
    with pytest.raises((TypeError, ValueError), match="must be"):
        kind(value)


def test_a_change_of_the_averages_outdates_snapshots(make_trainer):
    trainer = make_trainer(Recorder, CONFIG)
    operator = trainer.get_local_operator()
    settings = trainer._controller.members[0].worker.runner._loop.state_access.user_settings
    seen = [settings()]
    seen += [operator._start_averaging(*each) or settings() for each in ((0.9, 2), (0.9, 1))]
    assert seen[0] != seen[1] != seen[2]
    operator._start_averaging(0.9, 1)  # as each call of fit() does
    assert settings() == seen[2]


def test_averages_of_shared_16_bit_and_integer_parameters():
    shared = torch.nn.Linear(2, 2).bfloat16()
    shared.table = torch.nn.Parameter(torch.arange(2), requires_grad=False)
    models = [shared, torch.nn.Sequential(shared, torch.nn.Linear(2, 1))]
    state = SimpleNamespace(models=models, optimizers=[], has_all_parameters=True)
    averages = WeightAveraging(state)
    averages.start(0.999, 1)
    update = Update()
    update.optimizer_steps.counts[0] = 1
    averages.commit(update)
    average = shared.weight.detach().float() + 0.001
    shared.weight.data += 1
    before = shared.weight.detach().clone()
    averages.load_state_dict(averages.state_dict())
    averages.commit(update)
    averages.commit(Update())  # without a step, nothing changes
    kept = averages.averages[1]["0.weight"]
    torch.testing.assert_close(kept, average, rtol=0, atol=1e-4)
    with averages.evaluating():
        assert torch.equal(shared.weight, kept.bfloat16())
    assert torch.equal(shared.weight, before)


def test_a_subclass_may_keep_what_cannot_be_sent_to_workers():
    averaging, sent = EMA(0.5), []
    averaging.lock = threading.Lock()
    averaging.on_train_start(SimpleNamespace(apply_all_operators=lambda f: sent.append(dumps(f))))
    begun = []
    operator = SimpleNamespace(_start_averaging=lambda *arguments: begun.append(arguments))
    pickle.loads(sent[0])(operator)
    assert begun == [(0.5, 1)]
