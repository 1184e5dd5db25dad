"""Registration of models and data, and warnings about unregistered objects."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler, TensorDataset

from raysgd import ElasticConfig, EqualBits, TrainingOperator
from raysgd._internal.runner import WorkerContext
from raysgd.data import Dataset, Stream, text
from raysgd.data.partition import MicroBatchPlan
from raysgd.errors import CheckpointError
from raysgd.testing import run_operator
from raysgd.torch import registration
from raysgd.torch.feature_list import OperatorFeatures
from raysgd.torch.options import TorchOptions, TorchSettings
from raysgd.torch.runner import build_operator
from raysgd.torch.state_access import TorchStateAccess
from raysgd.torch.train_state import TorchTrainState
from tests.conftest import assert_names
from tests.operators import Classifier


def linear():
    return torch.nn.Linear(2, 2)


CPU, Lr = torch.device("cpu"), torch.optim.lr_scheduler


def sgd(*models):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


def make_registration(device=CPU, context=None, worker_batch_size=None, **options):
    place = {
        "context": context or WorkerContext(),
        "device": device,
        "worker_batch_size": worker_batch_size,
    }
    return TorchTrainState(TorchSettings(options=TorchOptions(**options), **place))


def register(train_state, models=None, optimizers=None, *more, **others):
    features, models = OperatorFeatures(train_state), models or linear()
    optimizers = optimizers or sgd(models)
    return registration.register(train_state, features, models, optimizers, *more, **others)


def test_models_and_criterion_move_to_the_device():
    train_state = make_registration(device=torch.device("meta"))
    model, _, criterion = register(train_state, criterion=torch.nn.CrossEntropyLoss(torch.ones(2)))
    assert model.weight.device.type == "meta"
    assert criterion.weight.device.type == "meta"


def test_trained_criterion_is_also_a_model():
    model, criterion, frozen = linear(), linear(), linear().requires_grad_(False)
    optimizer, both = sgd(model, criterion), [model, criterion]
    losses = [torch.nn.MSELoss(), criterion, lambda *_: 0]
    for given, optimized, loss, models in (
        (model, sgd(model, frozen), frozen, [model]),
        (both, optimizer, criterion, both),
        (model, optimizer, losses, both),
        (model, optimizer, criterion, both),
    ):
        train_state = make_registration()
        results = register(train_state, given, optimized, loss)
        assert (results[0], results[2], train_state.models) == (given, loss, models)
        assert train_state.registered_models == (both if given is both else [model])
    state_access = TorchStateAccess(train_state)
    older = state_access.read()
    assert len(older["models"]) == 2
    older["models"].pop()
    state_access.check(older)
    state_access.load(older)


def test_optimizer_state_names_its_parameters():
    def state_of(*order):
        model, train_state = torch.nn.Sequential(linear(), linear()), make_registration()
        parameters = [[*model[part].parameters()][which] for part, which in order]
        register(train_state, model, torch.optim.SGD(parameters, lr=0.1))
        return TorchStateAccess(train_state)

    saved = state_of((0, 0), (1, 0)).read()
    said = r"optimizers\[0\] .* SGD: its next parameter was \('models\[0\].0.weight', \[2, 2\]\)"
    for order in ([(1, 0), (0, 0)], [(0, 1), (1, 0)], [(1, 0)]):
        other = state_of(*order)
        with pytest.raises(CheckpointError, match="groups have" if len(order) == 1 else said):
            other.check(saved)
    older = {name: value for name, value in saved.items() if name != "parameters"}
    state_of((1, 0), (0, 0)).check(older)
    state_of((0, 0), (1, 0)).check(saved)


def test_groups_that_share_a_learning_rate_follow_their_schedulers():
    model = linear()
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.5))
    schedule = Lr.LambdaLR(optimizer, [lambda n: 1.0, lambda n: 1 / (1 + n)])
    state = make_registration(scheduler_step_freq="manual")
    register(state, model, optimizer, schedulers=schedule)
    optimizer.step()
    schedule.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.25]


# ---- batch shares


def test_data_set_of_a_call_keeps_its_batch_size():
    """A worker that joins later has another batch share when it receives the data set."""
    sizes = []
    for share in (4, 2):
        train_state = make_registration(worker_batch_size=share)
        source = train_state.data.select_training(Dataset(range(8), batch_size=4))
        train_state.settings.worker_batch_size = 2
        train_state.begin_generation(WorkerContext(world_rank=1, world_size=2))
        sizes.append(source.batch_size)
    assert sizes == [4, 4]


# ---- models that are frozen when they are registered


def distributed(world_size=2, **settings):
    return make_registration(
        context=WorkerContext(has_process_group=True, world_size=world_size), **settings
    )


def registered(train_state, models, *optimized):
    register(train_state, models, sgd(*optimized))
    train_state.exchange.use_wrappers([])
    return train_state


def test_model_frozen_after_register_is_averaged_later(process_group):
    model, train_state = linear(), distributed(world_size=1)
    wrapped = register(train_state, model)[0]
    model.requires_grad_(False)
    train_state.exchange.use_wrappers([])
    train_state.begin_generation(train_state.context)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert wrapped._get_ddp_logging_data()["num_parameter_tensors"] == 2
    model.requires_grad_(True)
    train_state.exchange.check_parameters()


def test_gradients_are_averaged_again_after_an_interrupted_group(process_group):
    model, train_state = linear(), distributed()
    wrapped = register(train_state, model, sgd(model), gradient_accumulation_steps=2)[0]
    train_state.exchange.use_wrappers([])
    train_state.begin_micro_batch(MicroBatchPlan(), is_last=False)
    assert not wrapped.require_backward_grad_sync
    train_state.roll_back()
    assert wrapped.require_backward_grad_sync


def test_buffers_of_frozen_models_may_differ_in_size(process_group):
    student, teacher = linear(), linear().requires_grad_(False)
    teacher.register_buffer("seen", torch.zeros(3))
    norm = torch.nn.BatchNorm1d(2).requires_grad_(False)
    sent = []
    train_state = registered(distributed(), [student, teacher, norm], student)
    with pytest.MonkeyPatch.context() as patch:
        group = train_state.collectives
        patch.setattr(group, "broadcast_tensors", lambda tensors, src: sent.extend(tensors))
        train_state.exchange.sync_buffers()
    assert {id(t) for t in sent} == {id(t) for t in norm.buffers()}
    with pytest.MonkeyPatch.context() as patch:
        teachers = [*teacher.parameters(), torch.zeros(5), *norm.parameters(), *norm.buffers()]
        held = [*student.parameters(), *teachers]
        patch.setattr(group, "broadcast", lambda *_: [torch.ones_like(t) for t in held])
        patch.setattr(group, "all_ranks_equal", lambda digest: False)
        train_state.exchange.sync_initial_state()
    # the student too, because setup may have changed it after DistributedDataParallel sent it
    parameters = [*student.parameters(), *teacher.parameters()]
    assert all(bool((p == 1).all()) for p in [*parameters, *norm.buffers()])
    assert teacher.seen.tolist() == [0, 0, 0]


def test_survivors_keep_their_models_unless_some_are_replicated(process_group):
    for wrap_ddp, wraps, follows in (
        (True, False, True),
        (False, False, False),
        (False, True, True),
    ):
        model, train_state = linear(), distributed(wrap_ddp=wrap_ddp)
        register(train_state, model)
        wrappers = [torch.nn.parallel.DistributedDataParallel(model)] if wraps else []
        train_state.exchange.use_wrappers(wrappers)
        assert train_state.placement.replicates == follows
        assert train_state.exchange.num_averaging_workers == 1 + follows


def test_static_graph_with_accumulation_is_an_error(process_group):
    train_state, model, static = distributed(), linear(), {"static_graph": True}
    with pytest.raises(ValueError, match="cannot accumulate gradients"):
        register(train_state, model, ddp_args=static, gradient_accumulation_steps=2)


# ---- training data


@pytest.mark.parametrize("given", ["stream", "batch_sampler"])
def test_shares_are_an_error_for_batches_that_raysgd_does_not_make(given):
    data = TensorDataset(torch.zeros(8, 1))
    loader = [data[:4], data[4:]]
    if given == "batch_sampler":
        loader = DataLoader(data, batch_sampler=[[0, 1], [2, 3, 4]])
    elastic = ElasticConfig(shares="measured")
    train_state = make_registration(num_workers=2, elastic=elastic)
    train_state.data.register(DataLoader(data, shuffle=True), loader)
    with pytest.raises(ValueError, match=r"shares.*batch_size"):
        train_state.data.register(loader, None)


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
def test_unshuffled_training_data_cause_one_warning(
    rank, generation, num_workers, shuffle, warned, caplog
):
    context = WorkerContext(world_rank=rank, world_size=num_workers, generation=generation)
    train_state = make_registration(context=context, num_workers=num_workers)
    data = TensorDataset(torch.zeros(8, 1))
    train_state.data.register(DataLoader(data, shuffle=shuffle), DataLoader(data))
    assert ("Write DataLoader(..., shuffle=True)" in caplog.text) == warned
    train_state.data.wrap(Dataset(range(8)), training=True)
    assert caplog.text.count("does not shuffle") == warned


def test_a_sampler_does_not_begin_an_epoch_before_training():
    unread = type("Unread", (SequentialSampler,), {"__iter__": lambda self: pytest.fail("begins")})
    train_state = make_registration(num_workers=2, context=WorkerContext(world_size=2))
    train_state.data.register(DataLoader(range(8), sampler=unread(range(8))), None)


def test_loader_that_cannot_be_divided_into_shards_is_an_error_without_other_advice(caplog):
    train_state = make_registration(num_workers=2, exact=EqualBits(2))
    with pytest.raises(ValueError, match=r'exact="bits" needs a DataLoader'):
        train_state.data.register([torch.zeros(2)], None)
    assert not caplog.text


def test_warnings_about_a_stream_name_its_arguments(tmp_path, caplog):
    (tmp_path / "data.txt").write_text("1\n2\n")
    lines = text(tmp_path / "data.txt", cache_dir=tmp_path)
    for stream in (Stream(lines, transform=float), Stream(lines, group_size=2)):
        data = DataLoader(stream)
        make_registration(num_workers=2).data.register(data, data)
    assert "Write Stream(..., shuffle=10_000)" in caplog.text
    assert caplog.text.count("use the Stream without group_size and skip_broken") == 1
    assert "register_data(train_loader=...): a stream, Stream of 1 files" in caplog.text
    assert caplog.text.count("every worker reads all samples") == 1  # for both loaders


# ---- objects that setup does not register


class WithBase(torch.optim.SGD):
    def __init__(self, parameters):
        parameters = [*parameters]
        super().__init__(parameters, lr=0.1)
        self.base = torch.optim.SGD(parameters, lr=0.1)


def set_up(add, caplog, frequency=None):
    """Add attributes in an operator's `setup`. Return the warnings about unregistered ones."""

    class Custom(TrainingOperator):
        def setup(self, config):
            model = torch.nn.Sequential(torch.nn.Linear(2, 2))
            self.model, self.optimizer, self.criterion = self.register(
                models=model,
                optimizers=WithBase(model.parameters()),
                criterion=torch.nn.Linear(2, 1),
            )
            add(self)

    run_operator(Custom, {"network": linear()}, scheduler_step_freq=frequency)
    return [record.message for record in caplog.records if "did not register" in record.message]


def adam(module):
    return torch.optim.Adam(module.parameters())


@pytest.mark.parametrize(
    ("name", "make", "expected"),
    [
        ("head", lambda _: torch.nn.Linear(2, 1), "self.head (Linear)"),
        ("scale", lambda _: torch.nn.Parameter(torch.ones(1)), "self.scale (Parameter)"),
        ("parts", lambda _: {"a": torch.nn.Linear(2, 1)}, "self.parts['a'] (Linear)"),
        ("second", lambda op: adam(op.model), "self.second (Adam)"),
        ("decay", lambda op: Lr.StepLR(op.optimizer, 1), "self.decay (StepLR)"),
        ("optimizers", lambda op: [op.optimizer, adam(op.model)], "self.optimizers[1] (Adam)"),
        ("both", lambda op: torch.nn.Sequential(op.model, linear()), "self.both (Sequential)"),
    ],
)
def test_warning_names_unregistered_objects(name, make, expected, caplog):
    (message,) = set_up(lambda op: setattr(op, name, make(op)), caplog, "epoch")
    assert f"Custom.setup did not register {expected}." in message


def test_layer_that_was_replaced_after_its_optimizer_is_named(caplog):
    for is_trained in (False, True):  # parameters of no model are legal, such as those of losses
        assert not caplog.text
        optimizer = sgd(model := torch.nn.Sequential(linear(), linear()))
        model[1] = torch.nn.Linear(2, 1).requires_grad_(is_trained)
        register(make_registration(), model, optimizer)
    assert "2 parameters that are in no registered model, and none has 1.weight, 1." in caplog.text


def test_registered_or_frozen_objects_cause_no_warning(caplog):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Similarity(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.network = torch.nn.Linear(2, 1)

        def update(self):
            """Not called."""

        def compute(self):
            """Not called."""

    def add(operator):
        operator.network = operator.config["network"]
        operator.module = operator.unwrapped(operator.model)
        operator.layer, operator.models = operator.model[0], [operator.model]
        operator.weights = list(operator.model.parameters())
        operator.base = operator.optimizer.base
        operator.loss = torch.nn.CrossEntropyLoss()
        operator.teacher = copy.deepcopy(operator.model).requires_grad_(False)
        operator.average = torch.optim.swa_utils.AveragedModel(operator.model)
        operator.metrics = {"similarity": Similarity()}
        operator.decay = Lr.StepLR(operator.optimizer, 1)  # user code steps it

    assert not set_up(add, caplog)


class TwoLoaders(Classifier):
    def setup(self, config):
        super().setup(config)
        self.labelled, self.shared = (DataLoader(range(8)) for _ in "ab")
        self.register_data(train_loader=self.labelled)
        self.unlabelled = {"images": DataLoader(range(8), batch_size=2, shuffle=True)}
        self.own = DataLoader(range(8), sampler=DistributedSampler(range(8), 2, 0))
        self.config["loader"] = self.shared
        self.reading = iter(DataLoader(range(8)))


@pytest.mark.parametrize(("num_workers", "partitions"), [(1, True), (2, True), (2, False)])
def test_warning_names_loaders_that_every_worker_reads(num_workers, partitions, caplog):
    options = TorchOptions(num_workers=num_workers, add_dist_sampler=partitions)
    build_operator(TwoLoaders, {}, TorchSettings(options=options))
    found = [record.message for record in caplog.records if "Every worker reads" in record.message]
    assert len(found) == (num_workers == 2 and partitions)
    for message in found:
        assert "all of self.unlabelled['images'], self.reading, because" in message
        assert "DistributedSampler(data, self.world_size, self.world_rank)" in message


class Timm:
    """A scheduler of timm, which wants the number of the epoch."""

    state_dict = load_state_dict = dict

    def step(self, epoch, metric=None):
        pass


class OfLoss(Timm):
    def step(self, *, loss):
        pass


def zero_redundancy(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns that it is deprecated

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD)


def register_all(**given):
    given = {"optimizers": sgd(linear()), **given}
    return register(make_registration(scheduler_step_freq="epoch"), **given)


UNFIT = {
    "class": (lambda: {"criterion": torch.nn.MSELoss}, ["must be a function, or an object"]),
    "trace": (
        lambda: {"models": [torch.jit.trace(linear(), torch.ones(1, 2))]},
        ["TopLevelTracedModule", "torch.compile(module)"],
    ),
    "part": (
        lambda: {"models": torch.nn.Sequential(torch.jit.script(linear()))},
        ["RecursiveScriptModule"],
    ),
    "zero": (
        lambda: {"optimizers": zero_redundancy(linear())},
        ["ZeroRedundancyOptimizer", 'sharding="optimizer"'],
    ),
    "bare": (
        lambda: {"optimizers": torch.optim.SGD.__new__(torch.optim.SGD)},
        ["SGD", "super().__init__()", "that it wraps"],
    ),
    "timm": (
        lambda: {"schedulers": Timm()},
        ["Timm.step() needs epoch", 'scheduler_step_freq="manual"', "update_scheduler"],
    ),
    "plateau": (
        lambda: {"schedulers": [Lr.ConstantLR(sgd(linear())), Lr.ReduceLROnPlateau(sgd(linear()))]},
        ["ReduceLROnPlateau.step() needs metrics", "update_scheduler(value)"],
    ),
    "stateless": (lambda: {"schedulers": SimpleNamespace(step=list)}, ["Pass a scheduler with "]),
    "keyword": (lambda: {"schedulers": OfLoss()}, ["OfLoss.step() needs loss"]),
}


# PyTorch 2.15 raises a FutureWarning, and older versions a DeprecationWarning.
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("kind", UNFIT)
def test_objects_that_cannot_work_are_refused_with_the_way(process_group, kind):
    given, words = UNFIT[kind]
    with pytest.raises((ValueError, TypeError)) as caught:
        register_all(**given())
    assert_names(caught.value, words)
