"""What may be registered, and in which shape it comes back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from raysgd.loop.registration import shaped_like
from raysgd.torch.checks import check_static_graphs, check_step_freq, checked

MEMBERS = st.lists(st.integers(), min_size=1, max_size=4)


@given(st.one_of(MEMBERS, MEMBERS.map(tuple), st.integers()))
def test_what_was_registered_comes_back_in_its_shape(given):
    members = checked("models", given, int)
    assert members == (list(given) if isinstance(given, list | tuple) else [given])
    assert members is not given
    back = shaped_like(given, members)
    assert (back, type(back)) == (given, type(given))


def test_what_is_not_of_the_kind_is_shown():
    with pytest.raises(TypeError, match=r"models=...\) must be .* torch Module objects, .*got 7"):
        checked("models", [torch.nn.Identity(), 7], torch.nn.Module)
    with pytest.raises(TypeError, match=r"schedulers=.* learning-rate schedulers, but got 'cos'"):
        checked("schedulers", "cos", None)


def test_whatever_steps_is_a_scheduler():
    class Mine:
        def step(self):
            """Not called."""

    mine = Mine()
    assert checked("schedulers", mine, None) == [mine]


@pytest.mark.parametrize("empty", [[], ()])
def test_at_least_one_is_needed(empty):
    with pytest.raises(ValueError, match=r"register\(models=...\) is empty; at least one"):
        checked("models", empty, torch.nn.Module)


def test_a_scheduler_of_plateaus_steps_with_a_metric_alone():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer)
    check_step_freq([constant, plateau], "manual")
    check_step_freq([constant], "epoch")
    check_step_freq([constant, plateau], "epoch", "val_loss")
    with pytest.raises(ValueError, match=r"scheduler_step_freq='epoch'.*update_scheduler\(metric"):
        check_step_freq([constant, plateau], "epoch")


def test_a_wrapper_with_a_static_graph_cannot_accumulate(process_group):
    model = torch.nn.Linear(1, 1)
    check_static_graphs([model, DistributedDataParallel(torch.nn.Linear(1, 1))])
    with pytest.raises(ValueError, match=r"Leave static_graph out, or do not accumulate"):
        check_static_graphs([model, DistributedDataParallel(model, static_graph=True)])
