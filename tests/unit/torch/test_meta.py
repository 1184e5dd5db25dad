"""Models on the meta device."""

import pytest
import torch

from raysgd.torch.meta import checked_init, make_whole, move_to_device, on_meta

CPU = torch.device("cpu")


def model():
    made = torch.nn.Sequential(
        torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(4)
    )
    made[0].weight = made[1].weight
    made[1].bias.requires_grad_(False)
    return made


def test_one_process_makes_a_model_as_it_would_be_and_the_parameters_stay():
    with torch.device("meta"):
        empty = model()
    optimizer = torch.optim.AdamW(empty.parameters())
    torch.manual_seed(0)
    make_whole([move_to_device(empty, CPU)], checked_init([empty], [optimizer], None, "full"), CPU)
    expected = model()
    torch.manual_seed(0)
    for module in expected.children():
        module.reset_parameters()
    assert not on_meta(empty)
    for name, value in expected.state_dict().items():
        assert torch.equal(empty.state_dict()[name], value), name
    assert empty[0].weight is empty[1].weight
    assert not empty[1].bias.requires_grad
    held = optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, empty.parameters(), strict=True))


def test_whole_parameters_are_there_for_one_module_at_a_time():
    with torch.device("meta"):
        empty = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    there = []

    def fill(module):
        there.append([not each.weight.is_meta for each in empty])
        module.reset_parameters()

    make_whole([empty], fill, CPU)
    assert there == [[n == m for m in range(3)] for n in range(3)]


class Position(torch.nn.Module):
    """Computes its buffers in the constructor, and has a parameter of integers."""

    def __init__(self, **values):
        super().__init__()
        for name, value in values.items():
            self.register_buffer(name, value, persistent=False)
        self.table = torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)


def replace_parameters(module):
    for name, parameter in [*module.named_parameters()]:
        setattr(module, name, torch.nn.Parameter(torch.ones(parameter.shape)))


def fill_table(module):
    module.table.copy_(torch.arange(2))


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", [1]), ("scales", [1.0]), ("mask", [True])],
)
def test_a_buffer_without_content_is_refused(name, value):
    with torch.device("meta"):
        empty = Position(**{name: torch.tensor(value)})
    with pytest.raises(ValueError, match=rf"Position\.{name} has no content"):
        make_whole([empty], fill_table, CPU)
    with pytest.raises(ValueError, match=r"Linear\.weight has no content.*in place"):
        make_whole([torch.nn.Linear(2, 2, device="meta")], replace_parameters, CPU)

    def fill(module):
        fill_table(module)
        setattr(module, name, torch.tensor(value))

    def fill_in_place(module):
        fill_table(module)
        getattr(module, name).zero_()

    for each, expected in ((fill, value), (fill_in_place, [0])):
        with torch.device("meta"):
            made = Position(**{name: torch.tensor(value)})
        make_whole([made], each, CPU)
        assert getattr(made, name).tolist() == expected
        assert made.table.tolist() == [0, 1]


def test_a_shared_parameter_has_the_content_from_its_last_module():
    def count(module):
        seen.append(module)
        module.weight.fill_(len(seen))

    seen = []
    with torch.device("meta"):
        tied = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(3)))
        tied[2].weight = tied[0].weight
    make_whole(list(tied), count, CPU)
    assert [each.weight[0, 0].item() for each in tied] == [3, 2, 3]
    assert tied[0].weight is tied[2].weight


def test_a_model_whose_buffers_alone_have_no_content_is_on_meta():
    with torch.device("meta"):
        found = Position(steps=torch.ones(1))
    found.table = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    assert on_meta(found)
