"""The order of phases with every strategy: of register, an optimizer's step, and an update."""

import itertools
import random
import re
import sys

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset

from raysgd import BadSteps, TrainingOperator
from raysgd._internal.runner import WorkerContext
from raysgd.loop.requests import TrainRequest
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner

REGISTER = ["strategy_name", "_move_models", "prepare", "wrap", "features_of", "register_hooks"]
REGISTER += ["begin_sharding", "_move_criteria"]
# The hooks of user code come first, because they may reject a step, and shards come last.
STEP = ["complete_gradients", "before_of_user", "_step_pre_hook", "_begin_step"]
STEP += ["after_of_user", "_end_step", "_finish_step"]
STRATEGIES = {
    "one worker": ({}, {}),
    "independent models": ({"wrap_ddp": False}, {}),
    "replicated": ({}, {}),
    "equal bits": ({"exact": "bits"}, {}),
    "optimizer": ({}, {"sharding": "optimizer"}),
    "full": ({}, {"sharding": "full"}),
}

ORDERS = (
    # first            later            the hook that needs the order, and why
    ("placement", "Rollback", "roll_back: a step that changed no parameters is no damage"),
    ("placement", "BufferBackup", "receive: shards come last, as they are valid from then on"),
    ("exchange", "Optimization", "begin_micro_batch: it may discard gradients that others keep"),
    ("Optimization", "StepChecks", "begin_micro_batch: kept gradients are no error"),
    ("exchange", "BufferBackup", "commit: it may restore buffers"),
    ("StepChecks", "WeightAveraging", "commit: an update may keep gradients for the next one"),
    ("BadStepFilter", "GradientClipping", "before_optimizer_step: it judges unclipped gradients"),
    ("BadStepFilter", "Rollback", "before_optimizer_step: it says what to restore"),
    ("exchange", "ReplicaGuard", "sync_initial_state, sync_buffers: all have equal buffers first"),
    ("BufferBackup", "ReplicaGuard", "receive: all have equal buffers first"),
)
"""The pairs of features whose order matters."""


def before_of_user(*_):
    pass


def after_of_user(*_):
    pass


class Small(TrainingOperator):
    def setup(self, config):
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(before_of_user)
        optimizer.register_step_post_hook(after_of_user)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.MSELoss(), **config
        )
        x = torch.tensor([[0.0, 1.0], [2.0, 3.0], [torch.nan, 4.0], [5.0, 6.0]])
        data = TensorDataset(x, torch.ones(4, 1))
        self.register_data(train_loader=DataLoader(data, batch_size=2))


def calls_of(names, function):
    """Return the functions of raysgd and of this file among `names` that a call runs, in order."""
    found = []

    def note(frame, event, _):
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        is_own = re.search(r"/raysgd/(loop|torch/(?!input))", file) or file == __file__
        if event == "call" and is_own and name in names:
            found.append(name)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return [name for name, _ in itertools.groupby(found)]


def start(strategy):
    options, register = STRATEGIES[strategy]
    if strategy == "full" and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("this PyTorch cannot shard models")
    given = {"training_operator_cls": Small, "config": register, "bad_steps": BadSteps(), **options}
    runner = TorchRunner(TorchOptions(**given))
    context = WorkerContext(has_process_group=strategy != "one worker")
    assert calls_of(REGISTER, lambda: runner.setup(context)) == REGISTER
    return runner


def names_of(registered):
    ports = dict.fromkeys(map(id, registered.placement.features), "placement")
    ports[id(registered.exchange)] = "exchange"
    return [ports.get(id(each), type(each).__name__) for each in registered.features]


def is_in_order(names):
    pairs = [(names.index(a), names.index(b)) for a, b, _ in ORDERS if {a, b} <= {*names}]
    return all(first < second for first, second in pairs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_phases_have_the_same_order_with_every_strategy(process_group, strategy):
    runner = start(strategy)
    found = calls_of(STEP, lambda: runner.handle(TrainRequest(call_number=0, until_step=1)))
    skipped = set() if "sharding" in STRATEGIES[strategy][1] else {"_begin_step", "_end_step"}
    assert found == [name for name in STEP if name not in skipped]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_features_train_alike_in_every_order_that_their_pairs_allow(process_group, strategy):
    """A bad step and an error within a step restore what the other features have changed."""
    results = set()
    for seed in range(4):
        torch.manual_seed(0)
        runner, draw = start(strategy), random.Random(seed)
        state, operator = runner.operator._train_state, runner.operator
        features, is_shuffled = [*state.features], seed == 0
        assert is_in_order(names_of(state))
        while not is_shuffled:
            draw.shuffle(features)
            state.set_features(features)
            is_shuffled = is_in_order(names_of(state))
        runner.handle(TrainRequest(call_number=0, until_step=2))
        operator.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.handle(TrainRequest(call_number=1, until_step=3))
        found = f"{state.is_damaged} {operator.model.state_dict()}"
        results.add(re.sub(r"workers_\d+", "", found))  # the name of a generation
    assert len(results) == 1
