"""What an operator offers to the methods that users write."""

import collections

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd._internal.context import WorkerContext
from raysgd.testing import run_operator
from raysgd.torch.ddp import ReplicatedModel
from raysgd.torch.options import TorchOptions
from raysgd.torch.train_state import OperatorSettings
from tests.operators import Classifier, make_model

META = torch.device("meta")


def test_an_operator_knows_its_place():
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


def test_an_operator_knows_its_gpu():
    operator = Classifier({}, OperatorSettings(device=torch.device("cuda", 2)))
    assert operator.use_gpu
    assert operator.device_ids == [2]


def test_a_batch_stays_what_it_is_on_cpu():
    operator = run_operator(Classifier)
    batch = {"x": torch.ones(1)}
    assert operator.to_device(batch) is batch


def test_tensors_anywhere_in_a_batch_go_to_the_device():
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


def test_what_can_move_itself_does_so():
    """The sizes of a packed sequence have to stay on the CPU."""
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    moved, *_ = Classifier({}, OperatorSettings(device=META)).to_device([packed])
    assert isinstance(moved, torch.nn.utils.rnn.PackedSequence)
    assert moved.data.is_meta
    assert not moved.batch_sizes.is_meta


def test_train_mode_reaches_every_model():
    operator = run_operator(Classifier)
    other = torch.nn.Linear(1, 1)
    operator._train_state.models.append(other)
    for training in (False, True):
        operator.train_mode(training)
        assert operator.model.training == other.training == training


BATCHES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(), st.just(torch.ones(1))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=6,
)


@given(BATCHES)
def test_all_but_the_device_of_a_batch_stays(batch):
    def described(tree):
        if isinstance(tree, torch.Tensor):
            return tree.shape, tree.dtype
        if isinstance(tree, list | tuple):
            return type(tree), [described(each) for each in tree]
        if isinstance(tree, dict):
            return {key: described(value) for key, value in tree.items()}
        return tree

    moved = Classifier({}, OperatorSettings(device=META)).to_device(batch)
    assert described(moved) == described(batch)


@pytest.mark.parametrize(
    ("use_fp16", "kinds"),
    [
        (False, (False, False, False)),
        (True, (True, True, False)),
        ("apex", (True, False, True)),
    ],
)
def test_an_operator_knows_its_precision(use_fp16, kinds, monkeypatch):
    monkeypatch.setattr("raysgd.torch.train_state.create_precision", lambda *arguments: None)
    operator = Classifier({}, OperatorSettings(options=TorchOptions(use_fp16=use_fp16)))
    assert (operator.use_fp16, operator.use_fp16_native, operator.use_fp16_apex) == kinds


def test_a_loop_of_ones_own_is_one_step_down_the_gradient():
    features, target = torch.randn(4, 8), torch.tensor([0, 1, 0, 1])
    operator, twin = run_operator(Classifier), make_model()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    torch.nn.functional.cross_entropy(twin(features), target).backward()
    optimizer.step()
    operator.train_mode(True)
    with operator.autocast():
        loss = operator.criterion(operator.model(features), target)
    operator.backward(loss)
    operator.optimizer_step(operator.optimizer)
    pairs = zip(operator.model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_train_mode_reaches_a_model_inside_of_its_wrapper(process_group):
    """Whose own mode user code may have changed."""
    operator = run_operator(Classifier)
    wrapped = ReplicatedModel(torch.nn.Linear(1, 1))
    operator._train_state.models.append(wrapped)
    wrapped.module.eval()
    operator.train_mode(True)
    assert wrapped.module.training
