"""A state that does not fit is refused, and leaves the trainer unchanged."""

import copy
import random

import numpy as np
import pytest
import torch

from raysgd import TFTrainer
from raysgd.callbacks import EarlyStopping
from raysgd.errors import CheckpointError
from raysgd.torch.tensors import state_digest
from tests.operators import local
from tests.unit.recorder import Recorder


class Best:
    """An operator with its own state."""

    best = 0.5

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state):
        self.best = float(state["best"])


class BestRecorder(Best, Recorder):
    pass


def make_torch():
    config = {"num_samples": 40, "batch_size": 8, "batch_norm": True}
    config["scheduler"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)
    given = {"callbacks": [EarlyStopping()], "scheduler_step_freq": "epoch"}
    return local(BestRecorder, config, **given)


def make_tf():
    pytest.importorskip("tensorflow")
    from tests.tf_operators import Digits

    return TFTrainer(
        training_operator_cls=type("BestDigits", (Best, Digits), {}),
        config={"batch_norm": True, "num_samples": 160},
        callbacks=[EarlyStopping()],
        use_local=True,
    )


@pytest.fixture(scope="module", params=[make_torch, make_tf], ids=["torch", "tf"])
def trained(request):
    """A trainer, and an earlier state of it."""
    with request.param() as trainer:
        trainer.fit(1)
        trainer.train(num_steps=2)
        state = trainer.state_dict()
        trainer.train(num_steps=1)
        trainer.apply_all_operators(lambda operator: vars(operator).update(best=0.25))
        random.random()
        yield trainer, state


def without_last_row(arrays):
    name = next(name for name, array in arrays.items() if np.ndim(array))
    return {**arrays, name: arrays[name][:-1]}


WRONG = {
    "shape of a model": lambda s: s.update(models=[without_last_row(s["models"][0])]),
    "no models": lambda s: s.pop("models"),
    "no list of models": lambda s: s.update(models=3),
    "too many models": lambda s: s.update(models=s["models"] * 2),
    "no optimizers": lambda s: s.update(optimizers=[]),
    "operator": lambda s: s.update(operator={"best": "high"}),
    "callback": lambda s: s["callbacks"].update(EarlyStopping={}),
    "step": lambda s: s.update(global_step=-1),
    "offset": lambda s: s["data"].pop("offset"),
    "seeds of loaders": lambda s: s["data"].update(loader_seeds=3),
    "seed of a loader": lambda s: s["data"].update(loader_seeds={"train": "x"}),
    "parts of a batch": lambda s: s["data"].update(split=0),
    "random numbers": lambda s: s["data"]["rng"][0].update(numpy="x"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(trained, what):
    trainer, state = trained
    wrong, before = copy.deepcopy(state), trainer.state_dict()
    WRONG[what](wrong)
    with pytest.raises(CheckpointError):
        trainer.load_state_dict(wrong)
    assert state_digest(trainer.state_dict()) == state_digest(before)


def test_the_state_itself_can_be_loaded(trained):
    trainer, state = trained
    now = trainer.state_dict()
    trainer.load_state_dict(state)
    assert state_digest(trainer.state_dict()) == state_digest(state)
    trainer.train(num_steps=1)
    trainer.load_state_dict(now)
