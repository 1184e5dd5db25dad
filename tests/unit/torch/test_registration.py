"""Registering, committed buffers, and the place in the data."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd._internal.context import WorkerContext
from raysgd.data import Dataset
from raysgd.torch import collectives, registration
from raysgd.torch.options import TorchOptions
from raysgd.torch.train_state import OperatorSettings, TorchTrainState


def linear():
    return torch.nn.Linear(2, 2)


CPU = torch.device("cpu")


def sgd(*models):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


def step_lr(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def make_registration(device=CPU, context=None, batch_share=None, **options):
    place = {"context": context or WorkerContext(), "device": device, "batch_share": batch_share}
    return TorchTrainState(OperatorSettings(options=TorchOptions(**options), **place))


def register(
    train_state, models=None, optimizers=None, criterion=None, schedulers=None, ddp_args=None
):
    models = linear() if models is None else models
    if optimizers is None:
        first = models[0] if isinstance(models, list | tuple) and models else models
        optimizers = sgd(first if isinstance(first, torch.nn.Module) else linear())
    return registration.register(train_state, models, optimizers, criterion, schedulers, ddp_args)


# ---- register gives back what it was given, in the same shape


def test_a_single_one_comes_back_single():
    train_state, model = make_registration(), linear()
    optimizer = sgd(model)
    assert register(train_state, model, optimizer) == (model, optimizer)
    assert (train_state.models, train_state.optimizers) == ([model], [optimizer])


@pytest.mark.parametrize("shape", [list, tuple])
def test_several_come_back_in_their_shape(shape):
    models = shape([linear(), linear()])
    optimizers = shape([sgd(models[0]), sgd(models[1])])
    schedulers = shape(map(step_lr, optimizers))
    criterion = torch.nn.MSELoss()
    train_state = make_registration(scheduler_step_freq="manual")
    given = register(train_state, models, optimizers, criterion, schedulers)
    assert given == (models, optimizers, criterion, schedulers)
    assert [type(item) for item in given] == [shape, shape, torch.nn.MSELoss, shape]


def test_a_list_of_one_stays_a_list():
    model = linear()
    assert register(make_registration(), [model], [sgd(model)])[0] == [model]


def test_an_iterable_model_is_one_model():
    model = torch.nn.Sequential(linear(), linear())
    train_state = make_registration()
    assert register(train_state, model, sgd(model))[0] is model
    assert train_state.models == [model]


def test_criterion_and_schedulers_come_back_only_where_they_were_given():
    model = linear()
    optimizer = sgd(model)
    scheduler = step_lr(optimizer)
    train_state = make_registration(scheduler_step_freq="batch")
    assert register(train_state, model, optimizer, schedulers=scheduler)[2:] == (scheduler,)
    assert len(register(make_registration())) == 2


def test_a_criterion_may_be_any_function():
    assert register(make_registration(), criterion=torch.nn.functional.mse_loss)[2] is (
        torch.nn.functional.mse_loss
    )


def test_models_and_criterion_go_to_the_device():
    train_state = make_registration(device=torch.device("meta"))
    model, _, criterion = register(train_state, criterion=torch.nn.CrossEntropyLoss(torch.ones(2)))
    assert model.weight.device.type == "meta"
    assert criterion.weight.device.type == "meta"


def test_a_model_is_not_wrapped_without_a_process_group():
    model = linear()
    assert register(make_registration(wrap_ddp=True), model)[0] is model


# ---- what register refuses


def test_an_optimizer_of_something_else_is_warned_of():
    with pytest.warns(RuntimeWarning, match="SGD updates no parameter of the registered models"):
        register(make_registration(), linear(), sgd(linear()))
    # one for the criterion alone is fine
    criterion, model = linear(), linear()
    register(make_registration(), model, [sgd(model), sgd(criterion)], criterion)


def test_a_criterion_that_is_trained_is_a_model_besides():
    model, criterion = linear(), linear()
    train_state = make_registration()
    given = register(train_state, model, sgd(model, criterion), criterion)
    assert (given[0], given[2]) == (model, criterion)
    assert (train_state.models, train_state.given_models) == ([model, criterion], [model])
    assert len(train_state.training_state()["models"]) == 2
    older = train_state.training_state()
    older["models"].pop()
    train_state.check_training_state(older)
    train_state.load_training_state(older)
    frozen = linear().requires_grad_(False)
    train_state = make_registration()
    register(train_state, model, sgd(model, frozen), frozen)
    assert train_state.models == train_state.given_models == [model]
    train_state = make_registration()
    register(train_state, [model, criterion], sgd(model, criterion), criterion)
    assert train_state.models == train_state.given_models == [model, criterion]


def test_what_is_refused_is_shown_without_the_networks_in_it():
    with pytest.raises(TypeError, match=r"but got \{'g': a Linear, 'd': \[a Linear\]\}\.$"):
        register(make_registration(), {"g": linear(), "d": [linear()]})
    with pytest.raises(TypeError, match=r"but got a Linear\.$"):
        register(make_registration(), linear(), linear())


def test_a_class_is_no_criterion():
    with pytest.raises(TypeError, match=r"not a class: CrossEntropyLoss\(\)"):
        register(make_registration(), criterion=torch.nn.CrossEntropyLoss)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"models": "model"}, "models"),
        ({"models": [linear(), 7]}, "models"),
        ({"models": torch.nn.Linear}, "models"),
        ({"optimizers": "sgd"}, "optimizers"),
        ({"optimizers": {"a": sgd(linear())}}, "optimizers"),
        ({"schedulers": "cosine"}, "schedulers"),
        ({"ddp_args": [1]}, "ddp_args"),
    ],
)
def test_what_is_not_of_the_right_kind_is_refused_by_name(arguments, name):
    with pytest.raises(TypeError, match=rf"register\({name}="):
        register(make_registration(scheduler_step_freq="batch"), **arguments)


@pytest.mark.parametrize("name", ["models", "optimizers"])
def test_an_empty_list_is_refused(name):
    with pytest.raises(ValueError, match=rf"register\({name}=...\) is empty"):
        register(make_registration(), **{name: []})


def test_schedulers_need_to_be_told_when_to_step():
    with pytest.raises(ValueError, match='scheduler_step_freq="batch", "epoch" or "manual"'):
        register(make_registration(), schedulers=step_lr(sgd(linear())))


def test_registering_twice_is_refused():
    train_state = make_registration()
    register(train_state)
    with pytest.raises(RuntimeError, match=r"register.. was called twice"):
        register(train_state)


def test_a_loader_that_cannot_be_iterated_is_refused_by_name():
    with pytest.raises(TypeError, match=r"register_data\(validation_loader="):
        make_registration().data.register([1], 7)


def test_a_missing_loader_is_named_with_the_way_to_set_it():
    train_state = make_registration()
    train_state.data.register([1], None)
    assert list(train_state.data.source("train").batches(0, 0)) == [1]
    with pytest.raises(
        RuntimeError, match=r"no validation loader.*register_data\(validation_loader="
    ):
        train_state.data.source("validation")


# ---- committed buffers


class Averaging(torch.nn.Module):
    """Keeps a running mean as many users write it: by assigning the buffer anew."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, inputs):
        self.mean = 0.9 * self.mean + 0.1 * inputs.mean().detach()
        return inputs * self.weight


@pytest.mark.parametrize("model", [torch.nn.BatchNorm1d(1), Averaging()], ids=["inplace", "anew"])
def test_rolling_back_gives_the_buffers_of_the_last_commit(model):
    train_state = make_registration()
    register(train_state, model, sgd(model))
    model(torch.ones(3, 1))
    train_state.commit()
    held = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.full((3, 1), 100.0))
    train_state.roll_back()
    assert all(torch.equal(held[name], buffer) for name, buffer in model.named_buffers())


def test_rolling_back_before_the_first_step_gives_the_buffers_of_the_setup():
    model = torch.nn.BatchNorm1d(1)
    train_state = make_registration()
    register(train_state, model, sgd(model))
    model(torch.full((3, 1), 100.0))
    train_state.roll_back()
    assert model.running_mean.item() == 0
    assert model.num_batches_tracked.item() == 0


def test_loaded_buffers_are_what_a_later_failure_rolls_back_to():
    model = torch.nn.BatchNorm1d(1)
    train_state = make_registration()
    register(train_state, model, sgd(model))
    state = train_state.training_state()
    state["models"][0] = {**state["models"][0], "running_mean": torch.tensor([5.0])}
    train_state.load_training_state(state)
    model(torch.full((3, 1), 100.0))
    train_state.roll_back()
    assert model.running_mean.item() == 5


# ---- the place in the data


def test_a_place_can_be_left_and_come_back_to():
    train_state = make_registration()
    register(train_state)
    train_state.epoch, train_state.offset, train_state.validation_offset = 2, 8, 3
    position = train_state.position()
    other = make_registration()
    register(other)
    other.move_to(position, global_step=11)
    assert other.position() == position
    assert other.global_step == 11


def test_places_of_old_states_lack_some_entries():
    train_state = make_registration()
    seed = train_state.seed
    train_state.move_to({"epoch": 1, "offset": 4}, global_step=3)
    assert (
        train_state.epoch,
        train_state.offset,
        train_state.validation_offset,
        train_state.seed,
    ) == (1, 4, 0, seed)


def test_a_new_seed_reaches_the_loaders():
    train_state = make_registration()
    data = TensorDataset(torch.arange(30))
    train_state.data.register(DataLoader(data, batch_size=30, shuffle=True), None)
    orders = []
    for seed in (1, 2, 1):
        train_state.reseed(seed)
        orders.append(next(train_state.data.source("train").batches(0, 0))[0].tolist())
    assert orders[0] == orders[2] != orders[1]


def test_a_replacement_takes_over_how_batches_are_made_of_the_loaders_that_it_has():
    train_state, data = make_registration(batch_share=4), TensorDataset(torch.arange(8))
    train_state.data.register(DataLoader(data, batch_size=4), DataLoader(data, batch_size=8))
    assert train_state.data.batching() == {"train": (4, True), "validation": (8, False)}
    other = make_registration(batch_share=2)
    other.data.register([[torch.zeros(2)]], DataLoader(data, batch_size=2))
    other.data.set_batch_size(train_state.data.batching())
    assert other.data.batching() == {"validation": (8, False)}


def test_the_data_set_of_a_call_keeps_its_batch_size_where_it_equals_a_share():
    """A worker that joins later has another share as it is given the data set."""
    sizes = []
    for share in (4, 2):
        train_state, dataset = (
            make_registration(batch_share=share),
            Dataset(range(8), batch_size=4),
        )
        source, _ = train_state.data.training_source(dataset)
        train_state.enter(WorkerContext(world_rank=1, world_size=2), batch_share=2)
        sizes.append(source.batch_size)
    assert sizes == [4, 4]


def shuffling(seed):
    """TorchTrainState whose train loader shuffles by a generator of its own."""
    train_state, data = make_registration(), TensorDataset(torch.arange(30))
    generator = torch.Generator().manual_seed(seed)
    train_state.data.register(
        DataLoader(data, batch_size=30, shuffle=True, generator=generator),
        DataLoader(data, batch_size=30),
    )
    return train_state


def order_of(train_state):
    return next(train_state.data.source("train").batches(0, 0))[0].tolist()


def test_a_place_holds_the_seeds_of_generators_that_loaders_were_given():
    saved, train_state = shuffling(1), shuffling(2)
    own = order_of(train_state)
    assert order_of(saved) != own
    train_state.move_to(saved.position(), global_step=1)
    assert train_state.position() == saved.position()
    assert order_of(train_state) == order_of(saved)
    older = saved.position()
    del older["loader_seeds"]  # of a state that was saved without them
    train_state.move_to(older, global_step=1)
    assert order_of(train_state) == own


def test_seeds_of_loaders_that_are_not_there_are_passed_over():
    train_state = make_registration()
    assert "loader_seeds" not in train_state.position()
    train_state.move_to(shuffling(1).position(), global_step=1)
    assert train_state.position() == {**make_registration().position(), "seed": train_state.seed}


def test_entering_a_generation_shares_the_data_out_anew():
    train_state = make_registration(batch_share=4)
    train_state.data.register(DataLoader(TensorDataset(torch.arange(8)), batch_size=4), None)
    train_state.enter(WorkerContext(world_rank=1, world_size=2), batch_share=2)
    batches = [batch[0].tolist() for batch in train_state.data.source("train").batches(0, 0)]
    assert batches == [[2, 3], [6, 7]]
    assert train_state.settings.context.world_size == 2


def test_what_setup_freezes_after_registering_is_still_averaged_in_later_generations(
    process_group,
):
    context = WorkerContext(distributed=True)
    train_state, model = make_registration(context=context), linear()
    wrapped = register(train_state, model)[0]
    model.requires_grad_(False)
    registration.adopt_wrappers(train_state, [])
    train_state.enter(context, None)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert wrapped._get_ddp_logging_data()["num_parameter_tensors"] == 2


# ---- models that are frozen when they are registered


def distributed(world_size=2, **settings):
    return make_registration(
        context=WorkerContext(distributed=True, world_size=world_size), **settings
    )


def frozen_linear():
    return linear().requires_grad_(False)


def registered(train_state, models, *optimized):
    register(train_state, models, sgd(*optimized))
    registration.adopt_wrappers(train_state, [])
    return train_state


def test_what_was_frozen_at_register_cannot_be_trained_by_several_workers(process_group):
    student, teacher = linear(), frozen_linear()
    train_state = registered(distributed(), [student, teacher], student, teacher)
    train_state.check_trained()
    teacher.bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"Model 1 of those registered, a Linear, .*Register"):
        train_state.check_trained()


def test_buffers_of_frozen_models_may_differ_in_size(process_group):
    student, teacher = linear(), frozen_linear()
    teacher.register_buffer("seen", torch.zeros(3))
    norm = torch.nn.BatchNorm1d(2).requires_grad_(False)
    sent = []

    def broadcast(tensors, source):
        sent.extend(tensors)

    train_state = registered(distributed(), [student, teacher, norm], student)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "broadcast_tensors", broadcast)
        for feature in train_state.features:
            feature.sync_buffers()
    assert {id(t) for t in sent} == {id(t) for t in norm.buffers()}
    with pytest.MonkeyPatch.context() as patch:
        held = [*teacher.parameters(), torch.zeros(5), *norm.parameters(), *norm.buffers()]
        patch.setattr(collectives, "broadcast_state", lambda *_: [torch.ones_like(t) for t in held])
        for feature in train_state.features:
            feature.start_together()
    assert all(bool((p == 1).all()) for p in [*teacher.parameters(), *norm.buffers()])
    assert teacher.seen.tolist() == [0, 0, 0]


def test_so_is_a_part_of_a_model_that_was_frozen_at_register(process_group):
    model = torch.nn.Sequential(frozen_linear(), linear())
    train_state = registered(distributed(), model, model)
    train_state.check_trained()
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match="Model 0 of those registered, a Sequential"):
        train_state.check_trained()


def test_what_was_frozen_at_register_may_be_trained_where_nothing_averages(process_group):
    student, teacher = linear(), frozen_linear()
    train_state = registered(distributed(wrap_ddp=False), [student, teacher], student, teacher)
    teacher.requires_grad_(True)
    train_state.check_trained()


def test_what_was_frozen_at_register_may_require_gradients_that_no_optimizer_uses(process_group):
    student, teacher = linear(), frozen_linear()
    train_state = registered(distributed(), [student, teacher], student)
    teacher.requires_grad_(True)
    train_state.check_trained()


def test_what_another_wrapper_averages_may_be_trained(process_group):
    shared = linear()
    whole = torch.nn.Sequential(shared, linear())
    train_state = distributed()
    wrapped = torch.nn.parallel.DistributedDataParallel(whole)
    shared.requires_grad_(False)
    registered(train_state, [shared, wrapped], whole)
    shared.requires_grad_(True)
    train_state.check_trained()


def test_models_that_freeze_after_register_may_thaw(process_group):
    model = linear()
    train_state = distributed()
    register(train_state, model)
    model.requires_grad_(False)
    registration.adopt_wrappers(train_state, [])
    model.requires_grad_(True)
    train_state.check_trained()


# ---- the order of training data


@pytest.mark.parametrize(
    ("rank", "generation", "num_workers", "shuffle", "warned"),
    [
        (0, 1, 2, False, True),
        (0, 1, 2, True, False),
        (0, 1, 1, False, False),
        (1, 1, 2, False, False),
        (0, 2, 2, False, False),
    ],
)
def test_training_data_that_nothing_shuffles_are_warned_of_once(
    rank, generation, num_workers, shuffle, warned, caplog
):
    context = WorkerContext(world_rank=rank, world_size=num_workers, generation=generation)
    train_state = make_registration(context=context, num_workers=num_workers)
    data = TensorDataset(torch.zeros(8, 1))
    train_state.data.register(DataLoader(data, shuffle=shuffle), DataLoader(data))
    assert ("Write DataLoader(..., shuffle=True)" in caplog.text) == warned
    train_state.data.wrap(Dataset(range(8)), training=True)
    assert caplog.text.count("RaySGD v1 shuffled") == warned


def replace_layer(model):
    model[0] = linear()


def add_layer(model):
    model.append(linear())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (replace_layer, "parameter 0.weight is new"),
        (add_layer, "parameter 2.weight is new"),
        (lambda model: model.double(), "was cast from torch.float32 to torch.float64"),
        (
            lambda model: model.load_state_dict({**model.state_dict()}, assign=True),
            "parameter 0.weight is new",
        ),
    ],
)
def test_parameters_that_change_after_register_are_refused(process_group, change, says):
    model = torch.nn.Sequential(linear(), linear())
    train_state = distributed()
    wrapped, _ = register(train_state, model)
    registration.adopt_wrappers(train_state, [])
    train_state.check_trained()
    change(wrapped)
    with pytest.raises(RuntimeError, match=says):
        train_state.check_trained()


def test_frozen_parameters_may_change_after_register(process_group):
    student, teacher = linear(), frozen_linear()
    train_state = registered(distributed(), [student, teacher], student)
    teacher.half()
    train_state.check_trained()
