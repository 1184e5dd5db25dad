"""Workers compare their replicas, and report a difference."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from raysgd import Guard
from raysgd._internal.context import WorkerContext
from raysgd._internal.step_timing import FORWARD
from raysgd.loop.requests import TrainRequest
from raysgd.torch import device_timing
from raysgd.torch.features.guard import ReplicaGuard
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner
from tests.conftest import needs_full_sharding, needs_horovod
from tests.operators import on_gpu, set_sync_mode
from tests.unit.torch.cases import running_cases
from tests.unit.torch.features import guards
from tests.unit.torch.features.guards import NUM_WORKERS, ODD, Case


@pytest.fixture(scope="module")
def workers():
    """Return a function that runs a case and returns the result of each worker."""
    with running_cases(guards) as run:
        yield run


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (Case("initializes"), "models[0].body.0.weight"),
        (Case("adds_noise"), "and 1 more"),
        (Case("sets_data"), "models[0].head.weight"),
        (Case("flips_parameter"), "models[0].head.weight"),
        (Case("flips_sign_bits"), "models[0].head.weight"),
        (Case("swaps_elements"), "models[0].head.weight"),
        (Case("flips_state"), "optimizers[0].state[4]['exp_avg']"),
        (Case("flips_count"), "optimizers[0].state[4]['step']"),
        (Case("clears_state"), "optimizers[0].state[0]['exp_avg']"),
        (Case("scales_state"), "optimizers[0].state[0]['exp_avg_sq']"),
        (Case("flips_teacher"), "models[1].head.weight"),
        (Case("flips_buffer"), "models[1].table"),
        (Case("sets_buffer"), "models[1].table"),
        (Case("turns_factor", model="Viewed"), "models[0].factor"),
        (Case("flips_averages"), "averages[0]['head.weight']"),
        (Case("sets_rate"), "optimizers[0].param_groups[0]['lr']"),
        (Case("sets_decay"), "optimizers[0].param_groups[0]['weight_decay']"),
        (Case("steps_scheduler"), "schedulers[0]['last_epoch']"),
        (Case("freezes"), "models[0].head.weight"),
        (Case("parametrizes"), "models[0].head.parametrizations.weight.original"),
        (
            Case("sets_scale", settings={"use_fp16": True, "amp_dtype": torch.float16}),
            "scaler[0]",
        ),
    ],
    ids=str,
)
def test_difference_is_an_error_before_the_next_step(workers, case, named):
    for result in workers(case):
        assert named in result["problem"]
        assert f"worker {ODD} and the majority differ in" in result["problem"]
        assert "They were equal after step 2" in result["problem"]
        assert result["ranks"] == (ODD,)
        assert result["step"] == 2


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (Case("changes_gradients", "in a step"), "models[0].body.0.weight"),
        (Case("skips_update", "in a step"), "models[0].body.0.weight"),
        (Case("sets_data", "in a step"), "models[0].head.weight"),
        (Case("flips_state", "in a step"), "optimizers[0].state[4]['exp_avg']"),
        (Case("sets_rate", "in a step"), "optimizers[0].param_groups[0]['lr']"),
    ],
    ids=str,
)
@pytest.mark.parametrize("every", [500, 1])
def test_difference_within_a_call_is_an_error(workers, case, named, every):
    case = replace(case, guard=Guard(every=every))
    for result in workers(case):
        assert named in result["problem"]
        assert result["step"] == (6 if every == 500 else 4)


@pytest.mark.parametrize(("change", "step"), [("changes_gradients", 6), ("flips_end", 10)])
def test_difference_that_a_short_call_leaves_is_an_error_before_the_state_leaves(
    workers, change, step
):
    """A comparison after a short call reads a part of large tensors."""
    for result in workers(Case(change, "in a step", model="Large")):
        assert "models[0].large" in result["problem"]
        assert result["step"] == step


def test_difference_without_a_report_is_an_error_after_a_loss(workers):
    """Otherwise, the worker that differs would silently take the state of the others."""
    leader, *_ = workers(Case("flips_parameter", "before a loss"))
    assert "the workers differ" in leader["problem"]
    assert leader["step"] == 2


@pytest.mark.parametrize(
    ("case", "named", "step"),
    [
        (Case("flips_parameter", "in a join"), "models[0].head.weight", 2),
        (Case("flips_state", "in a join"), "optimizers[0].state[4]['exp_avg']", 2),
        (Case("flips_buffer", "in a join"), "models[1].table", 2),
        (Case("sets_own_buffer", "in a join", model="Normalized"), "models[0].mean", 2),
        (Case("weighs_classes", "in a join"), "criteria[0]['weight']", 3),
        (
            Case("sets_dropout", "in a join"),
            "models[0].body.2.p (0.1 on workers 0, 2, 0.5 on worker 1)",
            3,
        ),
        (Case("sets_dropout"), "models[0].body.2.p (0.1 on workers 0, 2, 0.5 on worker 1)", 3),
        (Case("evaluates", "in a step", guard=Guard(every=1)), "modes of models[0]", 4),
    ],
    ids=str,
)
def test_worker_that_joins_with_a_difference_is_an_error(workers, case, named, step):
    for result in workers(case):
        assert named in result["problem"]
        assert "They were equal after step 0" not in result["problem"]
        assert ("States do not contain options" in result["problem"]) == (step == 3)
        assert result["step"] == step


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (Case("replaces_head", "in a step"), "its parameter head.weight is new"),
        (Case("deletes_head", "in a step"), "its parameter head.weight is new"),
        pytest.param(
            Case("replaces_head", "in a step", register={"sharding": "full"}),
            "its parameter head.weight is new",
            marks=needs_full_sharding,
        ),
        (Case("adds_module", "in a step"), "its parameter body.3.weight is new"),
        (Case("adds_parameter", "in a step"), "its parameter body.0.scale is new"),
        (Case("casts", "in a step"), "was cast from torch.float32 to torch.float64"),
        (Case("adds_group", "in a step"), "An optimizer got 1 parameters after register()"),
    ],
    ids=str,
)
def test_added_parameters_are_an_error_before_they_are_trained(workers, case, named):
    for result in workers(replace(case, ranks=(0, 1, 2))):
        assert named in result["problem"]
        assert result["step"] == 4


FLOAT16 = {"use_fp16": True, "amp_dtype": torch.float16}


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(step="raw"),
        Case(step="noisy"),
        Case(step="head_by_data"),
        Case(step="closure"),
        Case(step="overflows", settings=FLOAT16),
        Case(model="Caching"),
        Case(model="Caching", register={"ddp_args": {"broadcast_buffers": False}}),
        Case(model="Monitored"),
        Case(model="Bounded"),
        Case(model="Normalized"),
        Case(model="Viewed"),
        Case("averages", ranks=(0, 1, 2)),
        Case("tags", ranks=(0, 1, 2)),
        Case(register={"gradient_accumulation_steps": 2}),
        Case(register={"sharding": "optimizer"}),
        pytest.param(Case(register={"sharding": "full"}), marks=needs_full_sharding),
        Case("adds_noise", settings={"wrap_ddp": False}),
        Case(step="own_averages", settings={"wrap_ddp": False}),
        Case(step="adversarial"),
        Case(wrap="replicated"),
        Case(wrap="compiled"),
        Case("freezes", ranks=(0, 1, 2)),
        Case("sets_rate", ranks=(0, 1, 2)),
    ],
    ids=str,
)
def test_legitimate_operators_train_without_an_error(workers, case):
    for result in workers(replace(case, guard=Guard(every=1))):
        assert result["problem"] == ""


def test_sparse_buffers_reach_workers_that_join(workers):
    unsynced = {"ddp_args": {"broadcast_buffers": False}}
    for result in workers(Case("tags", "in a join", (0, 1, 2), model="Sparse", register=unsynced)):
        assert result["problem"] == ""


def test_minority_takes_the_state_of_the_majority(workers):
    case = Case("adds_noise", "in a step", guard=Guard(every=1, on_difference="repair"))
    first, *others = workers(case)
    assert first["problem"] == ""
    assert first["repaired"][:2] == (4, (ODD,))
    assert all(torch.equal(first["weight"], each["weight"]) for each in others)


def test_no_worker_raises_before_all_know_the_difference(workers):
    """Otherwise, a worker that is interrupted could give the damaged state to the others."""
    for result in workers(Case("adds_noise", "with a late report")):
        assert f"worker {ODD} and the majority differ" in result["problem"]


def test_repair_needs_a_majority(workers):
    case = Case("adds_noise", "in a step", (0, 1, 2), guard="repair")
    for result in workers(case):
        assert "the workers differ in" in result["problem"]
        assert result["ranks"] == ()


def test_without_a_guard_a_difference_is_silent(workers):
    _, odd, other = workers(Case("adds_noise", guard=None))
    assert odd["problem"] == ""
    assert not torch.equal(odd["weight"], other["weight"])


def test_cross_check_finds_a_worker_that_computes_other_gradients(workers):
    case = Case(model="Broken", guard=Guard(crosscheck_every=4))
    for result in workers(case):
        assert f"After step 4, worker {ODD} computed other gradients" in result["problem"]
        assert "than the majority, in: models[0].body.0.weight" in result["problem"]
        assert f"{ODD} on 127.0.0.1" in result["problem"]
        assert result["ranks"] == (ODD,)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(step="raw"),
        Case(step="noisy"),
        Case(settings=FLOAT16),
        Case(model="Caching"),
        Case(model="Caching", register={"ddp_args": {"broadcast_buffers": False}}),
        Case("averages", ranks=(0, 1, 2)),
        Case(register={"gradient_accumulation_steps": 2}),
    ],
    ids=str,
)
def test_cross_check_does_not_change_the_result(workers, case):
    checked = workers(replace(case, guard=Guard(crosscheck_every=1)))
    assert [each["problem"] for each in checked] == [""] * NUM_WORKERS
    for own, other in zip(checked, workers(case), strict=True):
        assert own["state"] == other["state"]
        assert own["random"] == other["random"]


@pytest.mark.parametrize(
    "case", [Case(model="Bounded"), Case(register={"sharding": "optimizer"})], ids=str
)
def test_cross_check_refuses_what_it_cannot_compare(workers, case):
    for result in workers(replace(case, guard=Guard(crosscheck_every=1))):
        assert "Guard(crosscheck_every=" in result["problem"]


def test_cross_check_compares_buffers_as_before(workers):
    case = Case("flips_buffer", "in a step", guard=Guard(every=1, crosscheck_every=1))
    for result in workers(case):
        assert "models[1].table" in result["problem"]
        assert result["step"] == 4


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_workers": 2, "wrap_ddp": False},
        pytest.param({"num_workers": 2, "backend": "horovod"}, marks=needs_horovod),
    ],
)
def test_cross_check_needs_several_workers_that_raysgd_keeps_equal(settings):
    with pytest.raises(ValueError, match=r"crosscheck_every=3.*at least two workers"):
        TorchOptions(training_operator_cls=object, guard=Guard(crosscheck_every=3), **settings)


class Watched(guards.Trains):
    """Compares replicas before each step. Waiting for the GPU in steps 10 to 15 is an error."""

    def train_batch(self, batch, batch_info):
        if self.global_step == 2:  # the first comparison initializes NCCL
            self._train_state.feature(ReplicaGuard)._is_active = True
        elif self.global_step == 9:
            set_sync_mode("error")
        elif self.global_step == 15:
            set_sync_mode("default")
        return super().train_batch(self.to_device(batch), batch_info)


@on_gpu
def test_steps_do_not_wait_for_a_gpu_that_is_compared_and_measured(monkeypatch):
    monkeypatch.setattr(device_timing, "_EVERY_S", 0.0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    options = TorchOptions(
        training_operator_cls=Watched,
        config={"case": Case()},
        scheduler_step_freq="batch",
        use_gpu=True,
        guard=Guard(every=1),
    )
    runner = TorchRunner(options)
    try:
        runner.setup(WorkerContext(world_rank=0, world_size=1, distributed=True))
        runner.handle(TrainRequest(call=0, until_step=16, until_epoch=99))
        state = runner.operator._train_state
        guard = state.feature(ReplicaGuard)
        assert guard._equal_at >= 14
        assert state.timing.totals.seconds[FORWARD] > 0
        before, _ = guard._digests(True, False, 1)
        runner.operator.model.head.weight.data.view(torch.int32)[0, 0] ^= 1
        after, _ = guard._digests(True, False, 1)
        assert (before != after).tolist() == [False, False, True, False]
    finally:
        set_sync_mode("default")
        runner.teardown()
        dist.destroy_process_group()
