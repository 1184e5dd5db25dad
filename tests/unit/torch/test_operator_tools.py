"""What an operator offers to the methods that users write."""

import collections

import pytest
import torch

from raysgd._internal.context import WorkerContext
from raysgd.torch.options import TorchOptions
from raysgd.torch.train_state import OperatorSettings
from tests.operators import Classifier

META = torch.device("meta")


def test_properties_of_an_operator():
    context = WorkerContext(world_rank=3, world_size=4, local_rank=1)
    options = TorchOptions(scheduler_step_freq="batch", use_tqdm=True)
    settings = OperatorSettings(options=options, context=context)
    operator = Classifier({"a": 1}, settings)
    assert (operator.world_rank, operator.world_size, operator.local_rank) == (3, 4, 1)
    assert operator.config == {"a": 1}
    assert operator.scheduler_step_freq == "batch"
    assert operator.use_tqdm
    assert operator.global_step == 0
    assert not operator.use_gpu
    assert operator.device_ids is None
    assert operator.timers.stats() == {}


def test_nested_tensors_move_to_the_device():
    pair = collections.namedtuple("pair", "left right")
    operator = Classifier({}, OperatorSettings(device=torch.device("meta")))
    tensor = torch.ones(1)
    moved = operator.to_device([tensor, (tensor, "text"), {"k": [tensor]}, pair(tensor, 1), None])
    assert moved[0].is_meta
    assert moved[1][0].is_meta
    assert moved[1][1] == "text"
    assert moved[2]["k"][0].is_meta
    assert isinstance(moved[3], pair)
    assert moved[3].left.is_meta
    assert moved[3].right == 1
    assert moved[4] is None
    edge = collections.namedtuple("edge", "frm to")
    assert operator.to_device(edge(tensor, tensor)).to.is_meta
    assert not tensor.is_meta


def test_objects_with_to_move_themselves():
    """The sizes of a packed sequence have to stay on the CPU."""
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    moved, *_ = Classifier({}, OperatorSettings(device=META)).to_device([packed])
    assert isinstance(moved, torch.nn.utils.rnn.PackedSequence)
    assert moved.data.is_meta
    assert not moved.batch_sizes.is_meta


@pytest.mark.parametrize(
    ("use_fp16", "kinds"),
    [
        (False, (False, False, False)),
        (True, (True, True, False)),
        ("apex", (True, False, True)),
    ],
)
def test_properties_of_the_precision(use_fp16, kinds, monkeypatch):
    monkeypatch.setattr("raysgd.torch.train_state.create_precision", lambda *arguments: None)
    operator = Classifier({}, OperatorSettings(options=TorchOptions(use_fp16=use_fp16)))
    assert (operator.use_fp16, operator.use_fp16_native, operator.use_fp16_apex) == kinds
