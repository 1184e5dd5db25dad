"""Copies of states, and checks whether a state fits the objects that load it."""

import copy
import pickle
import threading
from dataclasses import field, make_dataclass

import cloudpickle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd._internal.nested import map_leaves
from raysgd.errors import CheckpointError
from raysgd.loop.state_access import check_objects
from raysgd.torch.object_states import state_problem
from raysgd.torch.tensors import copy_leaf, copy_to_cpu
from tests.unit.recorder import Recorder


def test_copy_does_not_change_with_the_original():
    tensor, lock = torch.ones(2, requires_grad=True), threading.Lock()
    tree = {"a": [tensor, (tensor, "text")], "n": {1}, "lock": lock, "view": tensor[:1]}
    copied = map_leaves(tree, lambda leaf: copy_leaf(leaf, on_host=True))
    with torch.no_grad():
        tensor.zero_()
    tree["n"].add(2)
    first, (second, text) = copied["a"]
    assert first.tolist() == second.tolist() == [1, 1]
    assert not first.requires_grad
    assert (text, copied["n"]) == ("text", {1})
    assert copied["lock"] is lock  # a lock cannot be copied or saved
    # Pickles and files have the whole memory of a tensor.
    assert copied["view"].untyped_storage().nbytes() == 4


def test_copied_model_is_independent():
    model = torch.nn.Sequential(*network(2, 2), torch.nn.BatchNorm1d(2), *network(2, 2))
    model[0].bias.requires_grad_(False)
    model[2].weight = model[0].weight
    model(torch.ones(3, 2)).sum().backward()
    model.eval().kept = {"outputs": [next(model.parameters()) * 2]}  # of a pass, with its graph
    model.settings = make_dataclass("Unset", [("later", int, field(init=False))])()
    twin = copy_to_cpu(model)
    assert not twin.training
    assert twin.kept["outputs"][0].is_leaf
    assert torch.equal(twin.kept["outputs"][0], model.kept["outputs"][0])
    assert not twin[0].bias.requires_grad
    assert twin[2].weight is twin[0].weight
    for own, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(own, other)
        assert own.data_ptr() != other.data_ptr()


def test_copied_model_with_parametrizations_can_be_pickled():
    model = torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)))
    twin = pickle.loads(cloudpickle.dumps(copy_to_cpu(model)))
    twin[0].parametrizations["weight"].original0.data *= 2
    assert torch.equal(twin[0].weight, 2 * model[0].weight)


def test_error_names_the_hook_that_cannot_be_copied():
    model = network(2, 2)
    model[0].register_forward_hook(threading.Event().set)
    with pytest.raises(TypeError, match=r"in model._modules\['0'\]._forward_hooks\[\d+\]\. Use"):
        copy_to_cpu(model)


# ---- whether a state fits

Optim, Lr = torch.optim, torch.optim.lr_scheduler


def check_fits(name, held, saved):
    check_objects(name, held, saved, state_problem)


def network(*sizes):
    return torch.nn.Sequential(*map(torch.nn.Linear, sizes, sizes[1:]))


SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=4)


@given(SIZES, SIZES)
def test_state_fits_if_the_model_can_load_it(mine, others):
    model, state = network(*mine), network(*others).state_dict()
    try:
        copy.deepcopy(model).load_state_dict(state)
    except RuntimeError:
        with pytest.raises(CheckpointError, match="does not fit the registered Sequential: "):
            check_fits("models", [model], [state])
    else:
        check_fits("models", [model], [state])


def optimizer(kind=Optim.Adam, groups=(2,)):
    made = [[torch.nn.Parameter(torch.ones(2)) for _ in range(size)] for size in groups]
    return kind([{"params": parameters} for parameters in made], lr=0.1)


def options(**changes):
    """Return the state of Adam with changed options."""
    state = copy.deepcopy(optimizer().state_dict())
    state["param_groups"][0].update(changes)
    return state


def entries(number=0, **changes):
    """Return the state of Adam after a step, with changed entries of a parameter."""
    adam = optimizer()
    for parameter in adam.param_groups[0]["params"]:
        parameter.grad = torch.ones(2)
    adam.step()
    state = copy.deepcopy(adam.state_dict())
    of_parameter = {**state["state"][number], **changes}
    state["state"][number] = {k: each for k, each in of_parameter.items() if each is not None}
    return state


def scheduler():
    adam = optimizer()
    return Lr.SequentialLR(adam, [Lr.ConstantLR(adam), Lr.MultiStepLR(adam, [2, 4])], [2])


def fields(**changes):
    """Return the state of a SequentialLR with changed fields in its second scheduler."""
    state = scheduler().state_dict()
    state["_schedulers"][1].update(changes)
    return state


def without_rate():
    state = options()
    del state["param_groups"][0]["lr"]
    return state


SGD_IN_ADAM = "Adam: a group lacks betas, eps, and has unknown dampening, momentum, nesterov"
MISFITS = [
    ("models", network(2, 2), {}, "it lacks 0.bias, 0.weight"),
    (
        "models",
        torch.nn.Linear(2, 2),
        network(2, 2, 2, 2, 2).state_dict(),
        "lacks bias, weight, and has unknown 0.bias, 0.weight, 1.bias, ….",
    ),
    ("models", network(2, 2), network(3, 2).state_dict(), "0.weight has shape (2, 3), not (2,"),
    ("optimizers", optimizer(), {}, "it is not the state of an optimizer"),
    ("optimizers", optimizer(), {"param_groups": [3], "state": {}}, "it is not the state of an"),
    ("optimizers", optimizer(groups=[1, 2]), optimizer().state_dict(), "groups have [2] param"),
    ("optimizers", optimizer(groups=[1, 2]), optimizer(groups=[2, 1]).state_dict(), "[2, 1] param"),
    ("optimizers", optimizer(), optimizer(groups=[2, 1]).state_dict(), "Create all groups"),
    ("optimizers", optimizer(), optimizer(Optim.SGD).state_dict(), SGD_IN_ADAM),
    ("optimizers", optimizer(Optim.SGD), optimizer().state_dict(), "has unknown amsgrad, betas, "),
    ("optimizers", optimizer(), options(lr="0.1"), "in a group, its 'lr' is '0.1'"),
    ("optimizers", optimizer(), options(lr=None), "its 'lr' is None"),
    ("optimizers", optimizer(), options(betas=0.9), "its 'betas' is 0.9"),
    ("optimizers", optimizer(), options(betas=[0.9, "x"]), "its 'betas' is [0.9, 'x']"),
    ("optimizers", optimizer(), without_rate(), "Adam: a group lacks lr."),
    ("optimizers", optimizer(), entries(exp_avg=None), "state of parameter 0 lacks exp_avg."),
    ("optimizers", optimizer(), entries(1, exp_avg=torch.ones(3)), "1 has shape (3,), not (2,)."),
    ("schedulers", scheduler(), fields(last_epoch="now"), "its 'last_epoch' is 'now', but the"),
    ("schedulers", scheduler(), fields(base_lrs=[]), "its 'base_lrs' is []"),
    ("schedulers", scheduler(), fields(milestones=None), "its 'milestones' is None"),
    ("schedulers", scheduler(), fields(milestones={"a": 1}), "its 'milestones' is {'a': 1}"),
    ("schedulers", scheduler(), fields(step_size=2), "it has unknown step_size"),
    ("schedulers", scheduler(), {**fields(), "_schedulers": None}, "does not have 2 inner"),
    ("schedulers", scheduler(), {**fields(), "_schedulers": [{}]}, "does not have 2 inner"),
]


@pytest.mark.parametrize(("name", "held", "saved", "said"), MISFITS)
def test_error_says_why_a_state_does_not_fit(name, held, saved, said):
    with pytest.raises(CheckpointError) as caught:
        check_fits(name, [held], [saved])
    assert f"{name}[0] does not fit the registered {type(held).__name__}: " in str(caught.value)
    assert said in str(caught.value)


def test_unknown_options_and_fields_fit():
    class Own(Lr.LambdaLR):
        pass

    held, saved = optimizer(), optimizer()
    adam = entries()
    del adam["state"][1]  # its parameter had no gradient
    check_fits("optimizers", [held], [adam])
    Lr.OneCycleLR(saved, max_lr=1.0, total_steps=5)
    saved.param_groups[0]["name"] = "head"
    check_fits("optimizers", [held], [saved.state_dict()])
    check_fits("optimizers", [saved], [held.state_dict()])
    check_fits("schedulers", [scheduler()], [fields(seen=3)])
    check_fits("schedulers", [Own(held, lambda epoch: 1), object()], [{"last_epoch": "x"}] * 2)


class Observer(torch.nn.Module):
    """A buffer that gets its shape from the first batch, as in quantization-aware training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, features):
        self.largest = features.detach().amax(0)
        return features

    def _load_from_state_dict(self, state, prefix, *arguments):
        self.largest = torch.zeros_like(state[f"{prefix}largest"])
        super()._load_from_state_dict(state, prefix, *arguments)


class Observed(Recorder):
    def register(self, *, models, **given):
        models.insert(1, Observer())
        return super().register(models=models, **given)


def test_modules_that_change_shapes_load_their_states(make_trainer, tmp_path):
    trainer = make_trainer(Observed)
    trainer.train()
    path = trainer.save(tmp_path / "state.pt")
    other = make_trainer(Observed)
    other.load(path)
    models = [each.get_model().state_dict() for each in (trainer, other)]
    assert len(models[0]["1.largest"]) == 4
    torch.testing.assert_close(*models, rtol=0, atol=0)
    state = trainer.state_dict()
    state["models"][0]["3.weight"] = torch.zeros(3, 3)
    with pytest.raises(CheckpointError, match=r"its 3.weight has shape \(3, 3\)"):
        other.load_state_dict(state)
