"""A state that is not as it was saved is refused, and leaves the trainer as it is."""

import copy
import operator
import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from raysgd import TFTrainer, TorchTrainer
from raysgd.callbacks import EarlyStopping
from raysgd.errors import CheckpointError
from tests.unit.recorder import Recorder

DELETED = object()
JUNK = ["junk", ["junk"], {"junk": 0}]
ENOUGH = settings(max_examples=max(200, settings.default.max_examples))
FREE = ("config", "monitor", "of_validation", "validation_due", "initial_lr")
"""What may be anything: it is compared with what there is, or only shown."""


class Best:
    """State of an operator's own."""

    best = 0.5

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state):
        self.best = float(state["best"])


class Scheduled(Best, Recorder):
    pass


class Counted(torch.optim.lr_scheduler.StepLR):
    """A scheduler that loads in a way of its own."""

    def state_dict(self):
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict):
        self.last_epoch = operator.index(state_dict["last_epoch"])


def two_schedulers(optimizer):
    return [torch.optim.lr_scheduler.StepLR(optimizer, 1), Counted(optimizer, 1)]


@contextmanager
def torch_trainer():
    config = {"num_samples": 40, "batch_size": 8, "batch_norm": True, "scheduler": two_schedulers}
    with TorchTrainer(
        training_operator_cls=Scheduled,
        config=config,
        callbacks=[EarlyStopping()],
        use_local=True,
        use_gpu=False,
        scheduler_step_freq="epoch",
    ) as trainer:
        yield trainer


@contextmanager
def tf_trainer():
    pytest.importorskip("tensorflow")
    from tests.tf_operators import Digits

    class BestDigits(Best, Digits):
        pass

    config = {"batch_norm": True, "num_samples": 160}
    with TFTrainer(
        training_operator_cls=BestDigits,
        config=config,
        callbacks=[EarlyStopping()],
        use_local=True,
    ) as trainer:
        yield trainer


def trained(make):
    with make() as trainer:
        trainer.fit(1)
        trainer.train(num_steps=2)
        state = trainer.state_dict()
        trainer.train(num_steps=1)
        trainer.apply_all_operators(lambda operator: vars(operator).update(best=0.25))
        yield trainer, state


@pytest.fixture(scope="module")
def of_torch():
    """A trainer, and a state of it from before."""
    yield from trained(torch_trainer)


@pytest.fixture(scope="module")
def of_tf():
    """A trainer, and a state of it from before."""
    yield from trained(tf_trainer)


def items_of(tree):
    if isinstance(tree, dict):
        return list(tree.items())
    return list(enumerate(tree)) if isinstance(tree, list | tuple) else []


def may_go(path):
    """Whether a state without this is one as well: an older one, or of one that has not stepped."""
    first, *rest = path
    if first == "data":
        return rest not in (["epoch"], ["offset"]) and len(rest) < 3
    if first == "optimizers":
        return len(path) == 4 and path[2] == "state"
    return first in ("operator", "global_step", "callbacks", "loss_scales") and len(rest) <= (
        first == "callbacks"
    )


def changed(tree, path, new):
    """The tree with something else at a path, or nothing."""
    if not path:
        return new
    key, *rest = path
    made = copy.copy(tree) if isinstance(tree, dict) else list(tree)
    if rest or new is not DELETED:
        made[key] = changed(made[key], rest, new)
    else:
        del made[key]
    return tuple(made) if isinstance(tree, tuple) else made


def malformed(chance, state):
    """A state with one thing in it replaced by what it cannot be, or taken away."""
    path, here = (), state
    while items := {k: v for k, v in items_of(here) if k not in FREE and not is_free(v)}:
        key = chance.choice([*items])
        path, here = (*path, key), items[key]
        if chance.random() < 0.25:
            break
    choices = [junk for junk in JUNK if not isinstance(here, type(junk))]
    if isinstance(here, list | tuple):
        choices = [junk for junk in choices if not isinstance(junk, list)]
    if isinstance(here, torch.Tensor | np.ndarray):
        choices.append(here.reshape(-1)[:-1])
    if not may_go(path) and path[0] != "schedulers":
        choices.append(DELETED)
    return path, changed(state, path, chance.choice(choices))


def is_free(value):
    """Whether it is a flag, or empty."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return False
    return value is None or isinstance(value, bool) or value in ((), [], {})


def same(left, right):
    if isinstance(left, torch.Tensor | np.ndarray):
        return np.array_equal(np.asarray(left), np.asarray(right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def check_refused(made, seed, unchecked=()):
    trainer, state = made
    before, metrics = trainer.state_dict(), trainer.latest_metrics
    path, other = malformed(random.Random(seed), state)
    assume(path[0] not in unchecked or len(path) < 3)
    with pytest.raises(CheckpointError) as caught:
        trainer.load_state_dict(other)
    assert str(caught.value), path
    assert same(trainer.state_dict(), before)
    assert same(trainer.latest_metrics, metrics)


@ENOUGH
@given(seed=st.integers(0, 2**32))
def test_a_malformed_state_is_refused_and_changes_nothing(of_torch, seed):
    # PyTorch loads optimizers and schedulers without checks
    check_refused(of_torch, seed, unchecked=("optimizers", "schedulers"))


@ENOUGH
@given(seed=st.integers(0, 2**32))
def test_a_malformed_state_of_keras_is_refused_and_changes_nothing(of_tf, seed):
    check_refused(of_tf, seed)


@pytest.mark.parametrize("name", ["of_torch", "of_tf"])
def test_the_state_itself_is_taken(request, name):
    trainer, state = request.getfixturevalue(name)
    now = trainer.state_dict()
    trainer.load_state_dict(state)
    assert same(trainer.state_dict(), state)
    trainer.train(num_steps=1)
    trainer.load_state_dict(now)
