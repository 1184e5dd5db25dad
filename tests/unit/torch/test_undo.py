"""What optimizers change, remembered and taken back."""

import pytest
import torch

from raysgd.torch.undo import UndoLog


def stepped(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_a_parameter_of_two_optimizers_goes_back_to_where_it_was_first():
    shared = torch.nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SGD([shared], lr=0.1) for _ in range(2)]
    log = UndoLog()
    for optimizer in optimizers * 2:
        log.remember(optimizer)
        stepped(optimizer)
    log.roll_back()
    assert shared.tolist() == [1, 1]


def test_what_is_forgotten_stays():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    log = UndoLog()
    log.remember(optimizer)
    stepped(optimizer)
    log.forget()
    log.roll_back()
    assert parameter.tolist() == [0.5, 0.5]


class Odd(torch.optim.SGD):
    """Keeps what others than torch's keep: new tensors, nested ones, and keys of its own."""

    @torch.no_grad()
    def step(self):
        super().step()
        (parameter,) = self.param_groups[0]["params"]
        held = self.state[parameter]
        held["mean"] = held.get("mean", torch.zeros(2)) + parameter
        held.setdefault("nested", {"history": [torch.zeros(2)]})["history"][0].add_(parameter)
        held["nested"]["history"].append(parameter.clone())
        self.state["count"] = self.state.get("count", 0) + 1


class Learning(torch.optim.SGD):
    """Keeps what it has learnt of the step size among its options."""

    @torch.no_grad()
    def step(self):
        super().step()
        (group,) = self.param_groups
        group["k"] = group.get("k", 0) + 1
        group["d"] = group.get("d", torch.ones(1)).mul_(2)
        group["lr"] *= 0.5


@pytest.mark.parametrize("kind", [Odd, Learning])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_state_of_every_form_is_taken_back(num_steps, kind):
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    odd, twin = (kind([p], lr=0.5) for p in (parameter, torch.nn.Parameter(parameter.clone())))
    log = UndoLog()
    for _ in range(num_steps):
        stepped(odd)
        stepped(twin)
    log.remember(odd)
    stepped(odd)
    stepped(odd)
    log.roll_back()
    assert str(odd.state_dict()) == str(twin.state_dict())
    stepped(odd)
    stepped(twin)
    assert str([odd.state_dict(), odd.param_groups]) == str([twin.state_dict(), twin.param_groups])


def test_room_is_used_again():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    log = UndoLog()
    made = []
    for _ in range(4):
        with Counting(made):
            log.remember(optimizer)
        log.forget()
        stepped(optimizer)
    # anew only when there is state to remember, which the first step makes
    assert made == [1, 4, 0, 0]


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Adds to a list how many tensors were made while it was entered."""

    def __init__(self, made):
        super().__init__()
        self.made = made

    def __enter__(self):
        self.made.append(0)
        return super().__enter__()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.made[-1] += "empty_like" in str(function)
        return function(*arguments, **(keywords or {}))
