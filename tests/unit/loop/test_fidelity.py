"""Steps and parameters stay the same if workers are lost, join, or load a state.

The workers are threads that communicate through a barrier instead of gloo.
"""

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import event, example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from raysgd import ElasticConfig
from raysgd._internal.runner import RetrySplitError, WorkerContext
from raysgd.loop.feature import UpdateFeature
from raysgd.loop.requests import TrainRequest
from raysgd.metrics import merge_worker_metrics
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner
from raysgd.utils import BATCH_SIZE
from tests.conftest import examples
from tests.fidelity import Exact, Meeting, flat, plain_run
from tests.unit.recorder import Recorder


class DiedError(Exception):
    """Simulates the loss of a worker."""


class Mortal(Exact):
    """Raises `error` once, at the step and the moment that `death` names.

    The moments are before the update, after it, and between micro-batches. With ``tells`` in the
    config, all workers exchange a value at the end of each batch.
    """

    death = step = None
    part = 0
    error = DiedError

    def train_batch(self, batch, batch_info):
        step = batch_info["global_step"]
        self.part = self.part + 1 if step == self.step else 0
        self.step = step
        if self.death == (step, "before") or (self.death == (step, "between") and self.part):
            self.end()
        result = super().train_batch(batch, batch_info)
        if self.death == (step, "after") and self._train_state.update.in_last_micro_batch:
            self.end()
        if self.config.get("tells", False):
            gather(self, None)
        return result

    def end(self):
        self.death = None
        raise self.error


def gather(operator, value):
    """Return the values that the operators of all workers pass, by rank."""
    return operator._train_state.features[0].worker.gather(value)


class Exchange(UpdateFeature):
    """Averages gradients over workers with equal weights, like DistributedDataParallel."""

    def __init__(self, worker):
        self.worker = worker

    def before_optimizer_step(self, update, optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        told = self.worker.gather([parameter.grad.clone() for parameter in parameters])
        for parameter, gradients in zip(parameters, zip(*told, strict=True), strict=True):
            parameter.grad = sum(gradients) / len(gradients)


class Worker:
    """A runner that exchanges values with other workers through a `Meeting`."""

    def __init__(self, config, num_workers, operator_cls=Mortal, frequency="batch", **elastic):
        self.runner = TorchRunner(
            TorchOptions(
                training_operator_cls=operator_cls,
                config=config,
                num_workers=num_workers,
                scheduler_step_freq=frequency,
                elastic=ElasticConfig(**elastic),
            )
        )
        self.runner.setup(WorkerContext(is_in_driver=True))
        self.registration = train_state = self.operator._train_state
        train_state.collectives.broadcast = lambda make, rank: copy.deepcopy(
            self.gather(make() if rank == self.rank else None)[rank]
        )
        self.state_access = self.runner._hosted_loop.state_access
        self.state_access.copy_from = self.copy_state
        train_state.exchange.all_reduce_sum = self.total
        train_state.set_features([Exchange(self), *train_state.features])
        self.is_new = True

    @property
    def operator(self):
        return self.runner.operator

    def gather(self, value):
        return self.meeting.gather(self.rank, value)

    def total(self, value):
        return sum(self.gather(value))

    def copy_state(self, leader_rank, follows):
        broadcast = self.registration.collectives.broadcast
        state = broadcast(self.state_access.read, leader_rank)
        if follows:
            self.state_access.load(state)

    def rejoin(self, meeting, rank, size, leader_rank):
        self.meeting, self.rank = meeting, rank
        context = WorkerContext(
            world_rank=rank, world_size=size, has_process_group=size > 1, is_in_driver=True
        )
        self.runner.rejoin(context, leader_rank)
        self.is_new = False

    def train(self, until_step, split):
        try:
            self.runner.handle(TrainRequest(call_number=0, until_step=until_step, min_splits=split))
        except (DiedError, MemoryError, RetrySplitError, threading.BrokenBarrierError) as error:
            self.meeting.barrier.abort()
            return error
        return None


class Workers:
    """A group of workers that can shrink and grow."""

    def __init__(self, size, *arguments, **options):
        self.arguments, self.options = arguments, options
        self.members = [Worker(*arguments, **options) for _ in range(size)]
        self.enter()

    def __len__(self):
        return len(self.members)

    def each(self, call):
        with ThreadPoolExecutor(len(self.members)) as pool:
            return list(pool.map(call, range(len(self.members)), self.members))

    def enter(self):
        reached = [-1 if m.is_new else m.registration.position.global_step for m in self.members]
        size, leader_rank = len(self.members), reached.index(max(reached))
        meeting = Meeting(size)
        self.each(lambda rank, member: member.rejoin(meeting, rank, size, leader_rank))

    def train(self, until_step, split=0):
        ends = self.each(lambda rank, member: member.train(until_step, split))
        left = [
            member
            for member, end in zip(self.members, ends, strict=True)
            if not isinstance(end, DiedError)
        ]
        if len(left) < len(self.members) or any(ends):
            self.members = left
            self.enter()
            splits = [end.args[0] for end in ends if isinstance(end, RetrySplitError)]
            self.train(until_step, max(splits, default=0))

    def grow(self, size):
        self.members += [Worker(*self.arguments, **self.options) for _ in range(size)]
        self.enter()

    def loaded(self, size, num_workers):
        """Return a new group that continues with the state of this one."""
        state = self.members[0].runner.state_dict()
        config, _, *others = self.arguments
        other = Workers(size, config, num_workers, *others, **self.options)
        for member in other.members:
            member.runner.load_state_dict(copy.deepcopy(state))
        return other

    @property
    def step(self):
        return self.members[0].registration.position.global_step

    def check(self, expected, num_steps):
        """Check the step and the parameters of every worker."""
        for member in self.members:
            assert member.registration.position.global_step == num_steps
            torch.testing.assert_close(flat(member.operator.model), expected, rtol=0.0, atol=1e-10)


happenings = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 9)),
        st.tuples(
            st.sampled_from(["lose", "run out"]),
            st.integers(0, 4),
            st.integers(0, 4),
            st.sampled_from(["before", "between", "after"]),
        ),
        st.tuples(st.just("join"), st.integers(1, 3)),
        st.tuples(st.just("load"), st.integers(1, 5)),
    ),
    max_size=7,
)


YES, NO = (True, True), (False, True)


@pytest.mark.slow("tens of groups train, with several workers each")
@examples(20)
@given(
    full=st.integers(1, 5),
    first=st.integers(1, 5),
    batch_size=st.integers(1, 7),
    given_global=st.booleans(),
    num_samples=st.integers(20, 67),
    accumulated=st.sampled_from([1, 1, 2, 3]),
    drop_last=st.booleans(),
    says=st.tuples(st.booleans(), st.booleans()),
    course=happenings,
)
@example(4, 4, 5, True, 61, 1, False, YES, [("train", 2), ("load", 1), ("train", 2), ("load", 3)])
@example(4, 1, 5, False, 61, 1, False, NO, [("train", 1), ("join", 2), ("lose", 1, 2, "after")])
@example(3, 3, 7, True, 53, 2, False, YES, [("lose", 0, 1, "between"), ("lose", 1, 3, "before")])
@example(4, 3, 1, False, 22, 1, False, NO, [("lose", 0, 1, "after"), ("lose", 1, 2, "between")])
@example(
    3, 3, 5, True, 53, 2, False, YES, [("run out", 1, 1, "after"), ("run out", 0, 2, "between")]
)
@example(4, 3, 4, False, 50, 1, False, NO, [("run out", 1, 1, "before"), ("lose", 0, 2, "after")])
def test_failures_joins_and_loads_change_neither_steps_nor_parameters(
    full, first, batch_size, given_global, num_samples, accumulated, drop_last, says, course
):
    """`says`: whether a batch passes num_items to backward(), and ends with an exchange."""
    global_batch = full * batch_size
    config = {
        "num_samples": num_samples,
        "num_epochs": 2,
        "accumulated": accumulated,
        "drop_last": drop_last and num_samples >= global_batch,
        "counts": says[0],
        "tells": says[1],
        **({BATCH_SIZE: global_batch} if given_global else {"batch_size": batch_size}),
    }
    expected, num_steps = plain_run(config, global_batch)
    per_epoch = num_steps // 2

    def goal(step):
        """Return the end of the accumulation group of a step. A call that ends earlier cuts it."""
        epoch, within = divmod(step, per_epoch)
        whole = min(per_epoch, math.ceil(within / accumulated) * accumulated)
        return min(num_steps, epoch * per_epoch + whole)

    workers = Workers(min(first, full), config, full)
    for what, *details in course:
        event(what)
        if what == "train":
            workers.train(goal(workers.step + details[0]))
        elif what in ("lose", "run out") and workers.step < num_steps:
            rank, later, when = details
            if what == "lose" and len(workers) == 1:
                continue
            dying = workers.members[rank % len(workers)]
            dying.operator.error = DiedError if what == "lose" else MemoryError
            dying.operator.death = (workers.step + later, when)
            workers.train(goal(workers.step + later + 1))
            dying.operator.death = None
        elif what == "join" and len(workers) < full:
            workers.grow(min(details[0], full - len(workers)))
        elif what == "load":
            # a global batch in the config does not depend on the number of workers
            size = min(details[0], global_batch)
            full = max(size, full) if given_global else full
            workers = workers.loaded(min(size, full), full)
    workers.train(num_steps)
    workers.check(expected, num_steps)
    # no batch is larger than in the full group, but parts of one sample are avoided
    at_once = math.ceil(global_batch / full)
    largest = max(member.operator.largest for member in workers.members)
    assert largest <= (4 if at_once in (2, 3) else at_once)


@pytest.mark.parametrize("split", [0, 2])
def test_a_repeated_sample_counts_once(split):
    """The last step has one sample for three workers."""
    workers = Workers(3, {"num_samples": 25, "num_epochs": 1, "batch_size": 4}, 3)
    request = TrainRequest(call_number=0, until_step=3, min_splits=split)
    found = merge_worker_metrics(workers.each(lambda _, member: member.runner.handle(request)))
    assert (found["num_samples"], found["batch_count"]) == (25, 3)


class Raw(Exact):
    """Calls ``optimizer.step()`` itself."""

    def train_batch(self, batch, batch_info):
        features, ids, target = batch
        self.largest = max(self.largest, len(ids))
        (self.model(features, ids) - target).square().mean().backward()
        for optimizer in self.optimizers:
            self._train_state.features[0].before_optimizer_step(None, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return {"num_samples": len(ids)}


class SteppingSchedulers(Exact):
    """Changes a rate and steps its schedulers in each call of ``train_batch``."""

    def train_batch(self, batch, batch_info):
        result = super().train_batch(batch, batch_info)
        self.optimizers[2].param_groups[0]["lr"] *= 0.9
        for scheduler in self.schedulers:
            scheduler.step()
        return result

    def step_schedulers(self):
        pass


class Twofold(Exact):
    """Updates one optimizer before it computes the gradients for the next."""

    def train_batch(self, batch, batch_info):
        features, ids, target = batch
        self.largest = max(self.largest, len(ids))
        for optimizer in self.optimizers:
            loss = (self.model(features, ids) - target).square().mean()
            self.backward(loss)
            self.optimizer_step(optimizer)
            self.model.zero_grad()
        return {"num_samples": len(ids)}


class Changing(Exact):
    """Changes its gradients itself, between the backward pass and the update."""

    def optimizer_step(self, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        return super().optimizer_step(optimizer)


class Decaying(Exact):
    def train_batch(self, batch, batch_info):
        torch._foreach_mul_([each.detach() for each in self.model.parameters()], 0.9)
        return super().train_batch(batch, batch_info)


class Hooked(Exact):
    def register(self, **arguments):
        for each in arguments["models"].parameters():
            each.register_post_accumulate_grad_hook(lambda p: p.grad.__setitem__(..., p.grad / 2))
        return super().register(**arguments)


class Skipping(Exact):
    """Makes no update if any worker has sample 4 in its batch."""

    def train_batch(self, batch, batch_info):
        self.largest = max(self.largest, len(batch[1]))
        if any(gather(self, 4 in batch[1])):
            return {"num_samples": len(batch[1])}
        return super().train_batch(batch, batch_info)


class OwnLoop(Exact):
    """Overrides ``train_epoch``, but uses the default helpers."""

    def train_epoch(self, iterator, info):
        for batch in iterator:
            self.train_batch(batch, {})
            self.step_schedulers()
        return {"num_samples": 1}


WHOLE = {
    Raw: "train_batch calls optimizer.step()",
    Changing: "train_batch changes gradients before it steps an optimizer",
    Decaying: "train_batch changes parameters before the update",
    Hooked: "a hook of a parameter may change accumulated gradients",
    Skipping: "train_batch makes no update in the last batch of a group",
    Twofold: "train_batch computes gradients after it has stepped an optimizer",
    OwnLoop: "only the default train_epoch",
}


@pytest.mark.filterwarnings("ignore:Detected call of")  # in a micro-batch that is rolled back
@pytest.mark.parametrize("first", [1, 2], ids=["starts smaller", "becomes smaller"])
@pytest.mark.parametrize("operator_cls", WHOLE)
def test_batches_that_cannot_be_split_stay_whole_with_one_warning(operator_cls, first, caplog):
    """Some causes are detected only while the first micro-batch is trained."""
    config = {"num_samples": 36, "num_epochs": 2, "batch_size": 3}
    undisturbed = Workers(2, config, 2, operator_cls)
    undisturbed.train(12)
    workers = Workers(first, config, 2, operator_cls)
    workers.train(3)
    del workers.members[1:]
    workers.enter()
    workers.train(12)
    assert workers.members[0].operator.largest == 6
    told = [record.message for record in caplog.records if "It cannot be split" in record.message]
    assert len(told) == 1
    assert "With 1 of 2 workers" in told[0]
    assert WHOLE[operator_cls] in told[0]
    workers.check(flat(undisturbed.members[0].operator.model), 12)


@pytest.mark.filterwarnings("ignore:Detected call of")  # of the first micro-batch
def test_parts_of_a_step_change_its_schedules_once():
    config = {"num_samples": 36, "num_epochs": 2, "batch_size": 3}
    two, one = (Workers(size, config, 2, SteppingSchedulers) for size in (2, 1))
    group = one.members[0].operator.optimizers[2].param_groups[0]
    rate = group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    two.train(12)
    one.train(12)
    assert one.members[0].operator.largest == 3
    assert group["lr"] is rate
    one.check(flat(two.members[0].operator.model), 12)


class Plateau(Exact):
    """Registers only the scheduler that needs a metric."""

    def register(self, **given):
        return *super().register(**{**given, "schedulers": [self.plateau]})[:2], []


def test_schedulers_get_each_metric_once_despite_a_worker_failure():
    """When a worker is lost, only one worker has the metric: the leader, or another worker."""
    config = {"num_samples": 36, "num_epochs": 2, "batch_size": 3}
    workers = Workers(4, config, 4, Plateau, frequency="manual")
    for number, told in ((7, slice(0, 1)), (8, slice(1, 2))):
        for member in workers.members[told]:
            member.runner.update_schedulers(number, metric=1.0)
        del workers.members[-1]
        workers.enter()
        for member in workers.members:
            member.runner.update_schedulers(number, metric=1.0)
    assert [member.operator.plateau.last_epoch for member in workers.members] == [2, 2]


class Mixed(Mortal):
    """One batch of each epoch cannot be split."""

    def register_data(self, *, train_loader, **others):
        def collate(items):
            batch = torch.utils.data.default_collate(items)
            return [*batch, "text"] if 7 in batch[1] else batch

        loader = DataLoader(
            train_loader.dataset, batch_size=train_loader.batch_size, collate_fn=collate
        )
        super().register_data(train_loader=loader, **others)

    def train_batch(self, batch, batch_info):
        return super().train_batch(batch[:3], batch_info)


def test_all_workers_have_the_same_number_of_parts():
    config = {"num_samples": 36, "num_epochs": 2, "batch_size": 3, "tells": True}
    workers = Workers(2, config, 2, Mixed)
    dying = workers.members[0].operator
    dying.error, dying.death = MemoryError, (0, "before")
    workers.train(12)
    assert workers.members[1].registration.micro_batching.num_splits == 2
    workers.check(*plain_run(config, 6))


def test_a_part_of_another_number_of_batches_is_continued_with_a_warning(make_trainer, caplog):
    class Own(Recorder):
        def register_data(self, *, train_loader, **others):
            part = range(0, len(train_loader.dataset), self.config["parts"])
            loader = DataLoader(train_loader.dataset, batch_size=2, sampler=part)
            super().register_data(train_loader=loader, **others)

    given = [{"num_samples": 48, "parts": parts} for parts in (4, 4, 2)]
    saved, same, other = (make_trainer(Own, each, add_dist_sampler=False) for each in given)
    saved.train(num_steps=3)
    same.load_state_dict(saved.state_dict())
    assert "when the state was saved" not in caplog.text
    other.load_state_dict(saved.state_dict())
    assert "had 6 batches when the state was saved, and has 12 now" in caplog.text


def test_a_state_of_steps_of_another_size_is_loaded_with_a_warning(make_trainer, caplog):
    state = make_trainer(Recorder, {"batch_size": 8}).state_dict()
    other = make_trainer(Recorder, {"batch_size": 4})
    other.load_state_dict(state)
    assert "A step had 8 samples when the state was saved, and has 4 now" in caplog.text
    other.train()
    assert other.global_step == 10


def test_optimizer_step_returns_whether_it_made_the_update():
    """A running average of the model, for example, must know it."""
    updates = []

    class Averaging(Exact):
        def optimizer_step(self, optimizer):
            made = super().optimizer_step(optimizer)
            updates.append(made)
            return made

    config = {"num_samples": 36, "num_epochs": 1, "batch_size": 3}
    Workers(1, config, 2, Averaging).train(6)
    assert updates == ([False] * 3 + [True] * 3) * 6
