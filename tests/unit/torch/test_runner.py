"""TorchRunner: settings, state, generations, and status for the driver."""

import contextlib
import copy
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig
from raysgd._internal.config import BATCH_SIZE
from raysgd._internal.runner import PausedError, WorkerContext
from raysgd._internal.worker_status import WorkerStatus
from raysgd.cluster import large_values
from raysgd.cluster.serialization import pack
from raysgd.cluster.worker import Worker
from raysgd.comm.network import LOOPBACK
from raysgd.elastic.call import LoadRequest
from raysgd.loop.metrics_recorder import MetricReader
from raysgd.loop.requests import CallbackPause, PredictRequest, TrainRequest, ValidateRequest
from raysgd.metrics import AverageMeterCollection
from raysgd.torch.collectives import TorchCollectives
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner, _choose_device
from tests.conftest import run_ranks, wait_until
from tests.unit.recorder import Recorder, Streaming, Unsized, batches_of, failure, make_runner

SMALL = {"num_samples": 40, "batch_size": 8}
EPOCH = list(range(40))


def same_parameters(*runners):
    left, right = (runner.operator.model.state_dict().values() for runner in runners)
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ---- before setup


def test_runner_without_operator_has_no_progress():
    runner = TorchRunner(TorchOptions(training_operator_cls=Recorder, config=SMALL))
    assert runner.status() == WorkerStatus()
    runner.set_interrupted(True)
    assert runner.pause_at(3) == 0
    assert runner.acquire_snapshot() is None
    with pytest.raises(RuntimeError, match="no operator"):
        runner.handle(TrainRequest(call_number=0, until_epoch=1))


def test_workers_set_their_threads_and_the_driver_keeps_its_own(monkeypatch):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    runner = TorchRunner(TorchOptions(training_operator_cls=Recorder, config=SMALL))
    runner.prepare(WorkerContext(num_cpus=3))
    runner.prepare(WorkerContext(num_cpus=0.5))
    runner.prepare(WorkerContext(num_cpus=3, is_in_driver=True))
    assert threads == [3, 1]


def gpu_runner(monkeypatch, is_available=True):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    return TorchRunner(TorchOptions(training_operator_cls=Recorder, config=SMALL, use_gpu=True))


def test_only_a_single_local_worker_may_lack_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    alone = WorkerContext(is_in_driver=True)
    gpu_runner(monkeypatch).prepare(alone)
    assert _choose_device(True, alone) == torch.device("cuda", 3)
    assert _choose_device(True, WorkerContext(gpu_index=1)) == torch.device("cuda", 1)
    for is_available, more in (False, {"gpu_index": 0}), (True, {"world_size": 2}):
        context = WorkerContext(is_in_driver=True, **more)
        with pytest.raises(RuntimeError, match=r"must use a GPU.*use_gpu=False"):
            gpu_runner(monkeypatch, is_available).prepare(context)


def test_worker_sees_all_gpus_of_its_node(monkeypatch):
    chosen = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    context = WorkerContext(visible_gpus=("2", "5"), gpu_index=1, is_in_driver=True)
    gpu_runner(monkeypatch).prepare(context)
    assert (os.environ["CUDA_VISIBLE_DEVICES"], chosen) == ("2,5", [1])


# ---- the state of the leader


@pytest.mark.parametrize("is_lost", [False, True])
def test_state_of_the_leader_is_loaded_whole_or_not_at_all(monkeypatch, is_lost):
    runner, leader = (make_runner(config={"seed": n, "batch_norm": True}) for n in range(2))
    leader.handle(TrainRequest(call_number=0, until_step=2))
    train_state, state = runner._train_state, leader._hosted_loop.state_access.read()
    before = copy.deepcopy(runner.operator.model.state_dict())
    sent = iter([b"another digest", [{}], state])

    def broadcast(make, rank, wanted=True):
        if make != train_state.buffer_backup.tensors:
            return next(sent)
        if is_lost:
            raise ConnectionError
        return leader._train_state.buffer_backup.tensors()

    train_state.collectives.broadcast = broadcast
    train_state.collectives.all_reduce_min = lambda *values: [*values]
    with pytest.raises(ConnectionError) if is_lost else contextlib.nullcontext():
        runner._hosted_loop.state_access.copy_from(0, follows=True)
    expected = before if is_lost else leader.operator.model.state_dict()
    torch.testing.assert_close(runner.operator.model.state_dict(), expected, rtol=0, atol=0)


def test_a_survivor_does_not_read_its_state_if_no_other_worker_has_one(monkeypatch):
    runner = make_runner()
    runner.handle(TrainRequest(call_number=0, until_step=1))
    runner._train_state.collectives.all_reduce_min = lambda *values: [*values]
    monkeypatch.setattr("raysgd.torch.state_access.state_digest", lambda state: pytest.fail("read"))
    runner._train_state.collectives.broadcast = lambda make, rank: make()
    runner._hosted_loop.state_access.copy_from(0, follows=False)


def test_copy_has_the_marks_and_modes_of_the_leader():
    runner = make_runner(context=WorkerContext(is_alone=True, is_in_driver=True))
    runner.operator.model.eval()
    modes = runner._hosted_loop.state_access.module_modes()
    runner.operator.model.train()
    sent = {"is_damaged": True, "why_not_split": "why", "module_modes": modes}
    runner._train_state.collectives.broadcast = lambda make, rank: {**make(), **sent}
    runner._hosted_loop.state_access.copy_from = lambda leader_rank, follows: None
    runner.rejoin(WorkerContext(world_rank=1, world_size=2, has_process_group=True), leader_rank=0)
    assert runner._train_state.is_damaged
    assert runner._train_state.micro_batching.why_not_split == "why"
    assert runner._hosted_loop.state_access.module_modes() == modes


# ---- repeated calls


def test_repeated_call_returns_its_metrics_and_no_others():
    runner = make_runner()
    with failure(runner.operator, 2, error=ConnectionError):
        runner.handle(TrainRequest(call_number=0, until_epoch=1))
    assert runner.status().position.global_step == 2
    assert (
        runner.status().process.is_blocked_on_driver
    )  # no other worker may wait for it any longer
    again = runner.handle(TrainRequest(call_number=0, until_epoch=1))
    assert (again["num_samples"], again["batch_count"]) == (40, 5)
    assert runner.status().process.failure_place == "after step 5"
    other = make_runner().handle(TrainRequest(call_number=0, until_epoch=1))
    assert again["train_loss"] == pytest.approx(other["train_loss"], rel=1e-9)
    runner.handle(TrainRequest(call_number=1, until_epoch=2))
    with failure(runner.operator, 12):
        runner.handle(TrainRequest(call_number=2, until_epoch=3))
    assert runner.handle(TrainRequest(call_number=3, until_epoch=3))["num_samples"] == 24


# ---- status and stop requests


def test_progress_counts_the_batches_and_samples_of_a_call():
    runner, seen = make_runner(), []

    def look(batch_info, when):
        if when == "after":
            seen.append(runner.status())

    runner.operator.fail = look
    runner.handle(TrainRequest(call_number=0, until_step=4))
    batches = [(p.batches.num_batches, p.batches.num_samples, p.batches.global_step) for p in seen]
    assert batches == [(0, 0, 0), (1, 8, 1), (2, 16, 2), (3, 24, 3)]
    assert [p.measured.timing.num_samples for p in seen] == [0, 8, 16, 24]
    assert [p.position.in_epoch for p in seen] == [False, True, True, True]
    assert {p.batches.num_total_batches for p in seen} == {4}
    assert seen[0].batches.latest_metrics == {}
    assert isinstance(seen[-1].batches.latest_metrics["train_loss"], float)
    done = runner.status().position
    assert done[:3] == (0, True, 4)
    runner.handle(TrainRequest(call_number=1, until_epoch=2))
    assert runner.status().position[:2] == (2, False)
    assert [p.measured.step_s > 0 for p in seen] == [False, *[True] * 3, False, *[True] * 5]
    runner.handle(PredictRequest(loader=runner.operator.validation_loader.loader))
    assert runner.status().batches.num_batches == 0


def test_progress_does_not_wait_for_the_gpu():
    """The GPU may wait forever for a lost worker."""
    reader, is_done = MetricReader(), threading.Event()  # the GPU has computed the newest loss
    meters = SimpleNamespace(latest=lambda: is_done.wait(20) and {"train_loss": 2.5})
    assert [reader.read(meters) for _ in range(3)] == [{}] * 3
    is_done.set()
    wait_until(lambda: reader.read(meters) == {"train_loss": 2.5})
    is_done.clear()
    assert [reader.read(meters) for _ in range(3)] == [{"train_loss": 2.5}] * 3
    is_done.set()


def test_control_threads_can_read_losses_at_the_same_time():
    """A driver that got no answer in time asks again."""
    reader, meters = MetricReader(), AverageMeterCollection()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(found == {} for found in threads.map(reader.read, [meters] * 400))
    finally:
        sys.setswitchinterval(interval)


def test_stop_request_ends_a_validation_at_the_next_batch():
    runner, seen = make_runner(), []

    def stop(batch_info, when):
        seen.append(runner.status().position)
        if batch_info["batch_idx"] == 1:
            runner.set_interrupted(True)

    runner.operator.fail = stop
    for call in range(2):
        with pytest.raises(Exception, match="asked this worker to stop"):
            runner.handle(ValidateRequest(call_number=call))
    runner.set_interrupted(False)
    runner.operator.fail = lambda *arguments: None
    runner.operator.validated.clear()
    assert runner.handle(ValidateRequest(call_number=1))["num_samples"] == 40
    assert runner.operator.validated == EPOCH
    assert len(seen) == len({*seen}) == 2, "the driver would take a long validation for a hang"


# ---- state


def test_an_iteration_begins_again_where_the_leader_is(monkeypatch):
    """The leader has committed a step that this worker has not."""
    runner = make_runner(Streaming)
    runner.handle(TrainRequest(call_number=0, until_step=1))
    loading, state = "raysgd.loop.operator_runner.load_from_leader", runner.operator._train_state
    monkeypatch.setattr(state, "begin_generation", lambda *_: None)
    monkeypatch.setattr(loading, lambda *_: vars(state.position).update(offset=2, global_step=2))
    runner.rejoin(WorkerContext(has_process_group=True), 0)
    runner.handle(TrainRequest(call_number=1, until_step=3))
    assert runner.operator.trained == [*EPOCH[:8], *EPOCH[16:24]]


class Unseeded(Recorder):
    """Shuffles with a generator whose seed differs between processes."""

    def make_loaders(self, config):
        loaders, generator = super().make_loaders(config), torch.Generator()
        generator.seed()
        data = loaders["train_loader"].dataset
        return {"train_loader": DataLoader(data, 8, shuffle=True, generator=generator)}


def test_loaded_epoch_keeps_the_order_of_an_unseeded_generator():
    saved, loaded = make_runner(Unseeded), make_runner(Unseeded)
    saved.handle(TrainRequest(call_number=0, until_step=2))
    loaded.load_state_dict(full_state(saved))
    for runner in (saved, loaded):
        runner.handle(TrainRequest(call_number=1, until_epoch=2))
    assert saved.operator.trained[16:] == loaded.operator.trained
    assert sorted(saved.operator.trained[:40]) == EPOCH


def full_state(runner):
    state = runner.state_dict()
    state["data"]["rng"] = [runner._train_state.generators.state()]
    return state


@pytest.mark.parametrize("num_steps", [0, 3, 7])
def test_training_continues_exactly_from_a_state(num_steps):
    """With shuffling, dropout, BatchNorm, and Adam, the parameters are bitwise equal."""
    config = {"shuffle": True, "dropout": 0.5, "batch_norm": True}
    runner = make_runner(config=config)
    runner.handle(TrainRequest(call_number=0, until_step=num_steps))
    runner.handle(ValidateRequest(call_number=1, num_steps=2))
    state = copy.deepcopy(full_state(runner))
    seen = list(runner.operator.trained)
    runner.handle(TrainRequest(call_number=2, until_step=12))

    other = make_runner(config={**config, "seed": 99})
    torch.rand(5)
    other.load_state_dict(state)
    assert other.status().position.global_step == num_steps
    other.operator.trained += seen
    other.handle(TrainRequest(call_number=0, until_step=12))
    assert other.operator.trained == runner.operator.trained
    assert same_parameters(runner, other)
    repeated = ValidateRequest(call_number=1, num_steps=1, offset=16)
    given = ValidateRequest(call_number=2, loader=[(torch.ones(1, 1),) * 2])
    for request in (repeated, given, repeated):
        other.handle(request)
    assert other.operator.validated == [*EPOCH[16:24], 1, *EPOCH[16:24]]


class Wide(Recorder):
    """Has weights that do not travel within a pickle."""

    width = 5000

    def load_state_dict(self, state):
        if self.config.get("refuses"):
            raise ValueError("not this state")


def addresses_of(runner):
    state = runner._hosted_loop.state_access.read()
    moments = [each["exp_avg"] for each in state["optimizers"][0]["state"].values()]
    tensors = (*state["models"][0].values(), *moments)
    return [tensor.data_ptr() for tensor in tensors if tensor.numel() == 5000]


def load_from_a_connection(runner, state, monkeypatch):
    monkeypatch.setattr(large_values, "_SMALL_BYTES", 0)
    worker = Worker()
    worker.runner = runner
    with large_values.serve_value(pack(LoadRequest(state=state)), [LOOPBACK]) as address:
        return worker.handle(address)


@pytest.mark.parametrize("has_trained", [True, False])
def test_a_large_state_arrives_in_the_memory_of_models_and_optimizers(monkeypatch, has_trained):
    runner, other = make_runner(Wide), make_runner(Wide, {"seed": 9})
    runner.handle(TrainRequest(call_number=0, until_step=3))
    state = copy.deepcopy(full_state(runner))
    if has_trained:
        other.handle(TrainRequest(call_number=0, until_step=6))
    before = addresses_of(other)
    assert load_from_a_connection(other, state, monkeypatch).kind == "ok"
    assert addresses_of(other)[: len(before)] == before
    torch.testing.assert_close(full_state(other)["models"], state["models"], rtol=0, atol=0)
    torch.testing.assert_close(full_state(other)["optimizers"], state["optimizers"], rtol=0, atol=0)
    for each in (runner, other):
        each.handle(TrainRequest(call_number=1, until_step=8))
    assert same_parameters(runner, other)


def test_a_refused_large_state_changes_nothing(monkeypatch):
    runner, other = make_runner(Wide), make_runner(Wide, {"seed": 9, "refuses": True})
    for each in (runner, other):
        each.operator.model.register_buffer("sparse", torch.eye(2).to_sparse())
    before = copy.deepcopy(other.operator.model.state_dict())
    outcome = load_from_a_connection(other, runner.state_dict(), monkeypatch)
    assert "not this state" in str(outcome.exception())
    torch.testing.assert_close(other.operator.model.state_dict(), before, rtol=0, atol=0)


def test_old_states_without_data_and_steps_load():
    runner = make_runner()
    runner.handle(TrainRequest(call_number=0, until_epoch=2))
    old = {k: v for k, v in runner.state_dict().items() if k not in ("data", "global_step")}
    other = make_runner(config={"seed": 5})
    other.load_state_dict(old)
    assert same_parameters(runner, other)
    assert other.status().position[:2] == (2, False)
    assert other.handle(TrainRequest(call_number=0, until_epoch=3))["num_samples"] == 40
    del old["operator"]
    other.load_state_dict(old)


# ---- generations


@pytest.mark.parametrize("global_batch", ["keep", "scale"])
def test_worker_of_a_group_gets_its_batch_share(global_batch):
    config = {BATCH_SIZE: 16}

    class Sharing(Recorder):
        def make_loaders(self, config):
            return super().make_loaders({**config, "batch_size": config[BATCH_SIZE]})

    runner = make_runner(Sharing, config, elastic=ElasticConfig(global_batch=global_batch))
    assert runner.operator.config[BATCH_SIZE] == 16
    runner.handle(TrainRequest(call_number=0, until_step=1))
    runner.rejoin(WorkerContext(world_rank=1, world_size=2, generation=2), leader_rank=0)
    assert runner.operator.config[BATCH_SIZE] == 8
    assert (runner.operator.world_rank, runner.operator.world_size) == (1, 2)
    runner.handle(TrainRequest(call_number=1, until_epoch=1))
    assert runner.operator.trained == [*range(16), *range(24, 32), *range(36, 40)]
    assert config == {BATCH_SIZE: 16}


def test_error_names_data_that_differ_between_workers():
    data = make_runner()._train_state.data
    found = data.fingerprint()
    data.check_equal_data(found)
    for before, after in (("40 samples", "39 samples"), ("batch size 8", "batch size 16")):
        other = {name: text.replace(before, after) for name, text in found.items()}
        said = rf"different data as .*_loader: .*{before}.* on worker 0, and .*{after}.* on "
        with pytest.raises(ValueError, match=said):
            data.check_equal_data(other)


def test_workers_compare_their_batch_sizes_at_the_start(monkeypatch):
    sent = []

    def broadcast(self, create, rank):
        sent.append(create())
        return sent[-1]

    monkeypatch.setattr(TorchCollectives, "broadcast", broadcast)
    monkeypatch.setattr(TorchCollectives, "all_reduce_min", lambda _, *own: own)
    make_runner(context=WorkerContext(world_size=2, is_in_driver=True))
    assert "batch size 8" in str(sent)


class Staged(Recorder):
    """Trains on other data from the second stage on."""

    stage = 1

    def state_dict(self):
        return {"stage": self.stage}

    def load_state_dict(self, state):
        self.stage = state["stage"]

    def on_world_change(self):
        if self.stage == 2:
            self.register_data(**self.make_loaders({**self.config, "num_samples": 32}))


JOIN_LATER = """
from tests.unit.torch.test_runner import *

alone = WorkerContext(is_alone=rank == 1, is_in_driver=True)
runner = make_runner(Staged, num_workers=2, context=alone)
operator = runner.operator
if rank == 0:
    runner.handle(TrainRequest(call_number=0, until_epoch=1))
    operator.stage = 2
    operator.on_world_change()
join()
runner.rejoin(WorkerContext(world_rank=rank, world_size=2, has_process_group=True), leader_rank=0)
operator.trained.clear()
result = runner.handle(TrainRequest(call_number=1, until_epoch=2))
assert result["num_samples"] == 16, result
assert sorted(operator.trained) == [i for i in range(32) if i // 8 % 2 == rank], operator.trained
operator.stage, operator.config["num_samples"] = 1, 40 + rank
operator.register_data(**operator.make_loaders(operator.config))
if rank:
    with pytest.raises(ValueError, match=r"on_world_change\\(self\\), by a value of state_dict"):
        runner.rejoin(WorkerContext(world_rank=1, world_size=2, has_process_group=True), 0)
else:
    runner.rejoin(WorkerContext(world_rank=0, world_size=2, has_process_group=True), leader_rank=0)
print("good")
"""


def test_a_worker_that_joins_registers_the_data_of_the_current_stage():
    run_ranks(JOIN_LATER, 2)


class Following(Recorder):
    """Records its groups, and may register a loader for each group."""

    def setup(self, config):
        super().setup(config)
        self.worlds = []

    def on_world_change(self):
        self.worlds.append((self.world_rank, self.world_size, self.global_step))
        if register := self.config.get("register"):
            self.register_data(train_loader=register(self))


def test_on_world_change_runs_after_setup_and_in_each_generation():
    runner = make_runner(Following)
    assert runner.operator.worlds == [(0, 1, 0)]
    runner.handle(TrainRequest(call_number=0, until_step=2))
    runner.rejoin(WorkerContext(world_rank=1, world_size=2, generation=2), leader_rank=0)
    assert runner.operator.worlds == [(0, 1, 0), (1, 2, 2)]
    replacement = make_runner(Following, context=WorkerContext(is_alone=True, is_in_driver=True))
    assert replacement.operator.worlds == []
    replacement.rejoin(WorkerContext(world_rank=1, world_size=2, generation=2), leader_rank=1)
    assert replacement.operator.worlds == [(1, 2, 0)]


@pytest.mark.parametrize("kind", ["list", "loader"])
def test_loader_of_on_world_change_is_used_from_the_next_step(kind):
    def part(operator):
        batches = batches_of(40, 4)[operator.world_rank :: operator.world_size]
        if kind == "list":
            return Unsized(batches)
        return DataLoader(TensorDataset(*map(torch.cat, zip(*batches, strict=True))), batch_size=4)

    runner = make_runner(Following, {"register": part})
    runner.handle(TrainRequest(call_number=0, until_step=2))
    assert runner.operator.trained == list(range(8))
    runner.operator._config["register"] = lambda op: Unsized(batches_of(40, 2))
    runner.rejoin(WorkerContext(is_in_driver=True, generation=2), leader_rank=0)
    runner.handle(TrainRequest(call_number=0, until_step=3))
    offset = 2 if kind == "list" else 8  # batches of the list, or samples of the loader
    assert runner.operator.trained[8:] == list(range(2 * offset, 2 * offset + 2))


def by_rank(operator):
    sampler = torch.utils.data.SequentialSampler(range(40))
    sampler.num_replicas, sampler.rank = operator.world_size, operator.world_rank
    return DataLoader(operator.train_loader.dataset, batch_size=4, sampler=sampler)


@pytest.mark.parametrize("in_hook", [False, True])
@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 1)])
def test_warning_about_a_loader_with_ranks_of_an_earlier_group(caplog, in_hook, rank, size):
    class Selecting(Following):
        def setup(self, config):
            super().setup(config)
            self.register_data(train_loader=by_rank(self))

    runner = make_runner(Selecting, {"register": by_rank} if in_hook else {})
    runner.rejoin(WorkerContext(world_rank=rank, world_size=size, generation=2), leader_rank=0)
    told = [record.message for record in caplog.records if "on_world_change" in record.message]
    assert len(told) == (not in_hook)
    said = f"by rank 0 of 1 workers, but this worker is rank {rank} of {size} now"
    assert in_hook or said in told[0]


# ---- stops for callbacks


@pytest.mark.parametrize("operator_cls", [Recorder, Streaming])
def test_call_stops_for_a_callback_or_earlier_for_the_driver(operator_cls):
    runner, plain = make_runner(operator_cls), make_runner(operator_cls)
    runner.pause_at(2)
    with pytest.raises(PausedError):
        runner.handle(TrainRequest(call_number=0, until_epoch=1, callback_pause_step=3))
    assert runner.status().position.global_step == 2
    runner.pause_at(None)
    for step in (3, 4):
        request = TrainRequest(call_number=0, until_epoch=1, callback_pause_step=step)
        assert isinstance(runner.handle(request), CallbackPause)
        assert runner.status().position.global_step == step
    result = runner.handle(TrainRequest(call_number=0, until_epoch=1, callback_pause_step=9))
    assert result == plain.handle(TrainRequest(call_number=0, until_epoch=1))
    assert runner.operator.trained == EPOCH


def test_workers_use_the_default_dtype_of_the_script(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    torch.set_default_dtype(torch.float64)
    try:
        options = TorchOptions(training_operator_cls=Recorder)
        torch.set_default_dtype(torch.float32)
        TorchRunner(pickle.loads(pickle.dumps(options))).prepare(WorkerContext(is_in_driver=False))
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_only_a_new_worker_takes_the_models_of_another_one_without_replication():
    """Each worker has its own models, also before their first step."""
    follows = []
    for alone in (False, True):
        context = WorkerContext(is_alone=alone, is_in_driver=True)
        runner = make_runner(context=context, wrap_ddp=False)
        runner._train_state.collectives.broadcast = lambda make, rank: make()
        runner._hosted_loop.state_access.copy_from = lambda leader, is_led: follows.append(is_led)
        for _ in range(2):
            context = WorkerContext(world_rank=1, world_size=2, has_process_group=True)
            runner.rejoin(context, leader_rank=0)
    assert follows == [False, False, True, False]
