"""The order of phases in every mode: of register, an optimizer's step, and an update."""

import itertools
import re
import sys

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TrainingOperator
from raysgd._internal.context import WorkerContext
from raysgd.loop.feature import StepFeature
from raysgd.loop.requests import TrainRequest
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner

REGISTER = ["mode_of", "_move_models", "prepare", "wrap", "features_of", "register_hooks"]
REGISTER += ["wrap_steps", "_move_criteria"]
# The hooks of user code come first, because they may reject a step, and shards come last.
STEP = ["average", "before_of_user", "_step_pre_hook", "_begin_step"]
STEP += ["after_of_user", "_end_step", "_step_post_hook"]
# Shards roll back before `Rollback`, and the exchange commits before the buffers.
HOOKS = {
    "begin_update": "exchange Rollback TorchMicroBatching Schedules ReplicaGuard",
    "begin_micro_batch": "exchange Optimization StepChecks Schedules",
    "before_optimizer_step": "GradientNorms Rollback",
    "before_commit": "exchange StepChecks",
    "commit": "replication exchange Optimization StepChecks Rollback BufferCopies WeightAveraging "
    "ReplicaGuard",
    "roll_back": "replication exchange Optimization StepChecks Rollback BufferCopies",
}
MODES = {
    "one worker": ({}, {}, "exchange: begin_micro_batch commit roll_back"),
    "own models": ({"wrap_ddp": False}, {}, "exchange: begin_micro_batch commit roll_back"),
    "replicated": ({}, {}, "exchange: begin_micro_batch before_commit commit roll_back"),
    "equal bits": (
        {"exact": "bits"},
        {},
        "exchange: begin_update begin_micro_batch before_commit commit roll_back",
    ),
    "optimizer": (
        {},
        {"sharding": "optimizer"},
        "exchange: begin_micro_batch before_commit commit roll_back, replication: commit roll_back",
    ),
    "full": (
        {},
        {"sharding": "full"},
        "exchange: begin_micro_batch, replication: commit roll_back",
    ),
}


def before_of_user(*_):
    pass


def after_of_user(*_):
    pass


class Small(TrainingOperator):
    def setup(self, config):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(before_of_user)
        optimizer.register_step_post_hook(after_of_user)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.MSELoss(), **config
        )
        data = TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
        self.register_data(train_loader=DataLoader(data, batch_size=2, shuffle=True))


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


@pytest.mark.parametrize("mode", MODES)
def test_phases_have_the_same_order_in_every_mode(process_group, mode):
    options, register, own = MODES[mode]
    if mode == "full" and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("this PyTorch cannot shard models")
    runner = TorchRunner(TorchOptions(training_operator_cls=Small, config=register, **options))
    context = WorkerContext(distributed=mode != "one worker")
    assert calls_of(REGISTER, lambda: runner.setup(context)) == REGISTER
    state = runner.operator._train_state.registered
    request = TrainRequest(call_number=0, until_step=1)
    skipped = set() if "replication" in own else {"_begin_step", "_end_step"}
    found = calls_of(STEP, lambda: runner.handle(request))
    assert found == [name for name in STEP if name not in skipped]
    ports = dict.fromkeys(map(id, state.replication.features), "replication")
    ports[id(state.exchange)] = "exchange"
    takes_part = {"exchange": [], "replication": []}
    for hook, order in HOOKS.items():
        default = getattr(StepFeature, hook)
        features = [each for each in state.features if getattr(type(each), hook) is not default]
        names = [ports.get(id(each), type(each).__name__) for each in features]
        assert names == [name for name in order.split() if name in names]
        for port in takes_part.keys() & set(names):
            takes_part[port].append(hook)
    parts = [f"{port}: {' '.join(hooks)}" for port, hooks in takes_part.items() if hooks]
    assert ", ".join(parts) == own
