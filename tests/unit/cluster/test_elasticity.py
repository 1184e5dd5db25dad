"""Losses, replacements, restarts, and hangs, on a simulated cluster and clock."""

import contextlib
import logging
import re
from concurrent.futures import Future

import pytest

from raysgd._internal.worker_status import WorkerStatus
from raysgd.cluster.worker import Worker
from raysgd.elastic.call_executor import CallExecutor
from raysgd.errors import CheckpointError, WorkerLostError
from tests.blackbox.simulation.seam import BadBatchError
from tests.blackbox.simulation.world import World
from tests.unit.cluster.calls import request_of, run


def run_until(controller, step, **arguments):
    """Train up to a step as the trainer does."""
    return run(controller, "train", until_step=step, **arguments)


def kinds(controller):
    return [event.kind for event in controller.events]


@pytest.fixture
def world():
    """Room for three workers."""
    return World(room=3)


@pytest.fixture
def two_of_three(world):
    """A controller of three workers with room for two so far."""
    world.room = 2
    return world.drive(3, resize_cooldown_s=0.0).controller


def every_new(world, **values):
    """Set attributes of all workers that start from now on."""

    def change(member):
        for name, value in values.items():
            setattr(member, name, value)

    world.on_new_worker.append(change)


def test_a_group_that_waits_for_room_asks_for_progress_once_per_second(world):
    controller = world.drive(3).controller
    world.room = 2
    world.at_step(20, lambda: world.lose(2))
    asked = []
    member = controller.members[0]
    control = member.submit_control
    member.submit_control = lambda method, *given: (
        asked.append(method.__name__) or control(method, *given)
    )
    assert run_until(controller, 2000, max_retries=1) == [2000] * 2
    assert asked.count("status") < 1.5 * 2000 * 0.05


def test_the_first_save_asks_all_workers_if_each_has_a_shard(world):
    every_new(world, divided=True)
    assert not world.drive(3).controller.record.newest_status.state_status.is_complete


def test_a_shutdown_can_take_the_workers_as_a_call_returns(world, monkeypatch):
    controller = world.drive(2).controller
    watch = CallExecutor._watch

    def taken(*arguments):
        polled = watch(*arguments)
        controller.members.clear()
        return polled

    monkeypatch.setattr(CallExecutor, "_watch", taken)
    assert len(run(controller, "train", until_step=3)) == 2


# ---- lost workers are replaced


def test_a_lost_worker_is_replaced_while_the_others_train(world, caplog):
    controller = world.drive(3).controller
    survivors = [controller.members[0], controller.members[2]]
    world.at_step(20, lambda: world.lose(1))
    with caplog.at_level(logging.INFO):
        outcomes = run_until(controller, 100, max_retries=1)
    assert outcomes == [100] * 3
    assert kinds(controller) == ["started", "lost", "regrouped", "grown"]
    assert set(survivors) < set(controller.members)
    assert [member.num_joins for member in controller.members if member not in survivors] == [1]
    assert world.trained == list(range(1, 101))
    assert run.call.losses.num_losses == 1
    lost, resumed, grown = controller.events[1:]
    assert [event.num_workers for event in controller.events] == [3, 2, 2, 3]
    assert (lost.ranks, resumed.ranks) == ((1,), (0, 1))
    assert lost.cause == "process 1: The actor died: OOM"
    first = controller.events[0].generation
    assert [e.generation - first for e in (lost, resumed, grown)] == [0, 1, 2]
    # workers of a node have adjacent ranks, so the replacement on node0 gets rank 1
    assert grown.node_ids == ("node0",)
    assert grown.ranks == (1,)
    said = [(r.levelname, r.message) for r in caplog.records if re.search("orkers? 1", r.message)]
    assert [(level, message.partition(" on ")[0]) for level, message in said] == [
        ("WARNING", "Lost worker 1"),  # once
        ("WARNING", "Worker 1 joined: 3 of 3."),
    ]
    assert "Training continues with 2 of 3 workers, no step lost." in caplog.text


def test_the_progress_of_survivors_is_known_before_they_continue(world):
    controller = world.drive(3).controller
    behind = []

    def note():
        event = controller.events[-1]
        if event.kind == "lost":
            controller.record.set_newest_status(
                WorkerStatus()
            )  # the survivors have not answered yet
        if event.kind == "regrouped":
            behind.append(event.step - controller.record.newest_status.position.global_step)

    controller.record.on_event = lambda: note
    world.at_step(20, lambda: world.lose(1))
    run_until(controller, 100, max_retries=1)
    assert behind == [0]


def test_a_replacement_that_is_ready_between_two_calls_joins_at_the_next(world, two_of_three):
    run_until(two_of_three, 3)
    assert len(two_of_three.members) == 2
    world.room = 3
    run_until(two_of_three, 6)
    for _ in range(5):
        run(two_of_three, "validate")
        world.sleep(1.0)
    assert all(member.interruptions == 0 for member in world.workers)
    assert len(two_of_three.members) == 3
    assert run_until(two_of_three, 9) == [9] * 3


def test_a_straggler_that_does_not_come_back_is_lost_too(world, caplog):
    controller = world.drive(3).controller
    controller.members[2].deaf = True
    world.at_step(20, lambda: world.lose(1))
    assert run_until(controller, 100, max_retries=2) == [100] * 3
    causes = [event.cause for event in controller.events if event.kind == "lost"]
    assert len(causes) == 2
    assert "still busy 60 s after" in causes[1]
    assert "Waiting up to 55 s for workers 2, which are still busy" in caplog.text


def test_one_long_step_among_short_ones_is_waited_for_too(world, two_of_three):
    """For example, a worker may evaluate for minutes in one step."""
    first_two = list(two_of_three.members)
    world.at_step(4, lambda: setattr(world, "room", 3))

    def hold_up():
        member = first_two[0]
        if member.pause is None:
            world.plan(0.0, hold_up)
        else:
            member.silent = True
            world.plan(120.0, go_on)

    def go_on():
        first_two[0].silent = False
        first_two[0].go_on()

    world.at_step(4, hold_up)
    run_until(two_of_three, 100, max_retries=0)
    assert len(two_of_three.members) == 3
    assert [member.interruptions for member in first_two] == [0, 0]
    assert "lost" not in kinds(two_of_three)
    assert world.trained == list(range(1, 101))


# ---- replacement workers that fail


@pytest.mark.parametrize("failing", ["setup_error", "join_error"])
def test_replacement_that_raises_is_retried_later(world, failing):
    world.room = 2
    controller = world.drive(3, resize_cooldown_s=0.0, backoff_initial_s=2.0).controller
    every_new(world, **{failing: StopIteration("no such file")})
    world.room = 3
    world.plan(4.0, world.on_new_worker.clear)
    assert run_until(controller, 400, max_retries=0) == [400] * 3
    failed = [event for event in controller.events if event.kind == "replacement_failed"]
    assert {event.cause for event in failed} == {"no such file"}
    assert run.call.losses.num_losses == 0
    assert world.trained == list(range(1, 401))


@pytest.mark.parametrize(("rank", "num_failures"), [(2, 0), (1, 1)])
def test_death_during_a_join_counts_only_for_members_and_replacements_join_later(
    world, two_of_three, rank, num_failures
):
    world.room = 3
    world.on_meeting.append(lambda: world.workers[rank].die("OOM while joining"))
    assert run_until(two_of_three, 400, max_retries=num_failures) == [400] * 3
    assert world.workers[rank] not in two_of_three.members
    assert run.call.losses.num_losses == num_failures
    assert kinds(two_of_three).count("replacement_failed") == 1 - num_failures
    assert world.trained == list(range(1, 401))


def test_a_stopped_worker_is_lost_before_the_next_generation_forms(world):
    controller = world.drive(3, replace_workers=False).controller
    stopped = controller.members[2]
    world.at_step(20, lambda: (setattr(stopped, "silent", True), world.lose(1)))
    assert run_until(controller, 100, max_retries=2) == [100]
    assert controller.events[-2].cause == "its process is stopped: no answer within 10 s"


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_worker_that_holds_the_gil_while_a_generation_forms_is_not_lost(world, when):
    """It answers nothing for longer than a stopped process may, and than a straggler may take."""
    controller = world.drive(3, replace_workers=False).controller
    busy = controller.members[2]
    if when == "before":
        world.at_step(19, lambda: busy.hold_gil(80.0))
    world.at_step(19 if when == "before" else 20, lambda: world.lose(1))
    if when == "while":
        world.on_meeting.append(lambda: busy.hold_gil(80.0))
    began = world.now
    assert run_until(controller, 100, max_retries=1) == [100] * 2
    assert world.now - began > 80
    assert kinds(controller).count("lost") == 1


def test_a_worker_that_answers_nothing_within_timeout_s_is_lost(world):
    controller = world.drive(3, replace_workers=False, timeout_s=30.0).controller
    break_with_an_error(world, controller)
    controller.members[2].hold_gil(1000.0)
    assert run_until(controller, 100, max_retries=1) == [100] * 2
    assert controller.events[-2].cause == "no answer within 31 s (timeout_s)"


def test_a_worker_that_dies_is_lost_while_another_holds_the_gil(world):
    controller = world.drive(3, replace_workers=False).controller
    doomed, busy = controller.members[1:]
    world.at_step(20, lambda: world.lose(0))
    world.on_meeting.append(
        lambda: (busy.hold_gil(80.0), world.plan(1.0, lambda: doomed.die("OOM")))
    )
    assert run_until(controller, 100, max_retries=2) == [100]
    assert kinds(controller).count("lost") == 2
    assert controller.members == [busy]


def break_with_an_error(world, controller):
    controller.members[0].error = BadBatchError("bad")
    with pytest.raises(BadBatchError):
        run_until(controller, 10)


def test_endless_losses_before_a_call_raise_an_error(world):
    world.room = 30
    controller = world.drive(30, replace_workers=False, max_start_attempts=3).controller
    break_with_an_error(world, controller)

    def lose_again():
        world.lose(0)
        world.on_meeting.append(lose_again)

    world.on_meeting.append(lose_again)
    with pytest.raises(WorkerLostError, match="times before the call began"):
        run_until(controller, 20, max_retries=0)


# ---- errors of the user


@pytest.mark.parametrize("error", [None, BadBatchError("bad")])
def test_a_pause_that_a_worker_misses_discards_the_step(world, two_of_three, monkeypatch, error):
    first, missed = two_of_three.members[0], []
    control = first.submit_control

    def miss_one(method, *arguments):
        if method is not Worker.pause_at or arguments[1] is None or missed:
            return control(method, *arguments)
        first.error = error
        missed.append(Future())
        return missed[0]

    monkeypatch.setattr(first, "submit_control", miss_one)
    world.at_step(2, lambda: setattr(world, "room", 3))
    with pytest.raises(BadBatchError) if error else contextlib.nullcontext():
        assert run_until(two_of_three, 400) == [400] * 3
        assert kinds(two_of_three) == ["started", "grown"]
    assert missed


# ---- shares of the global batch


@pytest.fixture
def mixed(world):
    """A controller with measured shares. Worker 0 is three times as fast as the others."""
    every_new(world, speed=100.0)
    controller = world.drive(3, shares="measured", resize_cooldown_s=1.0).controller
    controller.members[0].speed = 300.0
    return controller


def shares_of(controller):
    return [event.shares for event in controller.events if event.kind == "rebalanced"]


def test_new_shares_need_no_new_generation(world, mixed, monkeypatch):
    slow = mixed.members[2]

    def hear_late(method, *arguments, control=slow.submit_control):
        if method is Worker.pause_at:
            world.sleep(0.5)
        return control(method, *arguments)

    monkeypatch.setattr(slow, "submit_control", hear_late)
    run_until(mixed, 200)
    assert shares_of(mixed) == [(1.8, 0.6, 0.6)]
    assert kinds(mixed) == ["started", "rebalanced"]
    assert [member.interruptions for member in mixed.members] == [0] * 3


def test_a_replacement_joins_with_a_share_by_its_speed(world, mixed):
    run_until(mixed, 200)
    every_new(world, speed=500.0)
    world.at_step(220, lambda: world.lose(1))
    run_until(mixed, 400, max_retries=1)
    assert kinds(mixed)[2:] == ["lost", "regrouped", "rebalanced", "grown", "rebalanced"]
    assert shares_of(mixed)[1:] == [(1.5, 0.5), (1.0, 1.667, 0.333)]
    assert mixed.events[-1].step == mixed.events[-2].step


def test_a_restart_of_all_workers_returns_to_even_shares(world, mixed):
    run_until(mixed, 200)
    world.at_step(220, lambda: lose_all(world))
    run_until(mixed, 400, max_retries=1)
    assert kinds(mixed)[-2:] == ["restarted", "rebalanced"]
    assert mixed.events[-1].shares == (1.0, 1.0, 1.0)


def test_snapshots_are_fetched_in_the_order_of_ranks(world, monkeypatch):
    controller, polled = world.drive(3).controller, []
    world.workers.reverse()  # the last rank returns first
    monkeypatch.setattr(controller.snapshots, "request_newer", lambda p: polled.append([*p]))
    run_until(controller, 5)
    assert polled[-1] == controller.members


# ---- all workers are lost


def lose_all(world):
    for rank in reversed(range(len(world.driver.controller.members))):
        world.lose(rank)


def test_when_all_are_lost_the_group_restarts_from_the_newest_snapshot(world):
    controller = world.drive(3).controller
    world.at_step(25, lambda: lose_all(world))
    outcomes = run_until(controller, 60, max_retries=1)
    assert outcomes == [60] * 3
    assert kinds(controller) == ["started", "lost", "lost", "lost", "restarted"]
    assert controller.events[-1].step in (10, 20)  # of a snapshot that the driver has fetched
    lost = [event.step for event in controller.events if event.kind == "lost"]
    assert all(controller.events[-1].step <= step <= 25 for step in lost)
    assert run.call.losses.num_losses == 1
    assert len(world.reservations) == 1  # the restart reuses their slots


def test_steps_of_earlier_calls_that_run_again_are_logged_once(world, caplog):
    controller = world.drive(3).controller
    run_until(controller, 25)
    lose_all(world)
    run_until(controller, 30, max_retries=1)
    (warned,) = [text for text in caplog.messages if "were lost with all workers" in text]
    assert warned.startswith(f"Steps {controller.events[-1].step + 1} to 25 ")


def test_a_restart_continues_from_the_loaded_state(world):
    controller = world.drive(3).controller
    run(controller, "load", state={"global_step": 7})
    controller.snapshots.store({"global_step": 7})
    world.kept_by_driver = 7
    lose_all(world)
    run_until(controller, 30, max_retries=1)
    assert next(e for e in controller.events if e.kind == "restarted").step == 7


def test_without_snapshots_losing_all_ends_the_call(world):
    controller = world.drive(3, snapshot_every=None).controller
    run_until(controller, 12)
    lose_all(world)
    with pytest.raises(WorkerLostError, match="snapshot_every=None") as caught:
        run_until(controller, 30, max_retries=1)
    assert str(caught.value).count("OOM") == 3
    assert controller.record.newest_status.position.global_step == 12
    # later calls name the same way out
    first, _, _ = str(caught.value).partition("\n")
    for method in ("train", "work"):
        with pytest.raises(WorkerLostError) as caught:
            run(controller, method, until_step=30)
        assert str(caught.value) == first.replace("train()", f"{method}()")
    assert first.endswith("load a checkpoint: trainer.load(path).")


def read_damaged_file():
    raise CheckpointError("the file is damaged.")


@pytest.mark.parametrize("snapshot_every", [None, "epoch"])
def test_a_state_can_be_loaded_if_the_snapshot_is_missing_or_damaged(world, snapshot_every):
    controller = world.drive(3, snapshot_every=snapshot_every).controller
    run_until(controller, 25)
    lose_all(world)
    if snapshot_every is not None:
        controller.snapshots.replace_with(read_damaged_file)
    for _ in range(2):
        with pytest.raises((WorkerLostError, CheckpointError), match=r"trainer\.load\(path\)"):
            run_until(controller, 30, max_retries=1)
    world.kept_by_driver = 0  # new workers do not load the snapshot
    run(controller, "load", state={"global_step": 7}, max_retries=1)
    assert controller.record.newest_status.position.global_step == 7
    assert run_until(controller, 30) == [30] * 3


def test_a_call_reads_the_snapshot_only_if_all_workers_are_lost(world):
    controller = world.drive(3, snapshot_every=None).controller
    controller.snapshots.replace_with(read_damaged_file)  # reading a large file takes long
    assert run_until(controller, 5) == [5] * 3


def test_after_a_failed_load_all_restart_from_the_snapshot(world):
    controller = world.drive(3).controller
    run_until(controller, 25)
    lose_all(world)
    kept, world.kept_by_driver = world.kept_by_driver, 0
    bad = {"global_step": 7, "error": ValueError("another model")}
    with pytest.raises(ValueError, match="another model"):
        run(controller, "load", state=bad, max_retries=1)
    assert controller.record.newest_status.position.global_step == 25
    world.kept_by_driver = kept
    assert run_until(controller, 30) == [30] * 3
    assert controller.events[-1].step == kept > 0


def test_lost_shards_need_no_snapshot_if_a_state_is_loaded(world):
    world.snapshot_every = 1000
    controller = world.drive(3, snapshot_every=None).controller
    run_until(controller, 25)
    lose_shares(world, controller)
    run(controller, "load", state={"global_step": 7}, max_retries=1)
    assert run_until(controller, 30) == [30] * 3


def lose_shares(world, controller):
    """Lose a worker and all copies of its shards."""
    for member in controller.members:
        member.condition = "lost"
    world.lose(1)


def test_all_restart_from_the_snapshot_if_shards_are_lost(world, caplog):
    controller = world.drive(3).controller
    before = list(controller.members)
    world.at_step(25, lambda: lose_shares(world, controller))
    assert run_until(controller, 60, max_retries=1) == [60] * len(controller.members)
    assert not set(before) & set(controller.members)
    assert kinds(controller)[:3] == ["started", "lost", "restarted"]
    assert "without one: all copies of some shards" in caplog.text


def test_without_snapshots_lost_shards_end_the_call(world):
    controller = world.drive(3, snapshot_every=None).controller
    world.at_step(25, lambda: lose_shares(world, controller))
    with pytest.raises(WorkerLostError, match="all copies of some shards of the state are lost"):
        run_until(controller, 60, max_retries=1)


def test_a_restart_waits_for_room_longer_each_time(world):
    controller = world.drive(3, min_workers=2, backoff_initial_s=1.0).controller
    began = []

    def lose_room():
        world.room = 0
        began.append(world.now)
        lose_all(world)
        world.plan(12.0, lambda: setattr(world, "room", 2))

    world.at_step(15, lose_room)
    assert run_until(controller, 60, max_retries=1) == [60] * 2
    waits = [event.seconds for event in controller.events if event.kind == "waiting"]
    assert waits == [1, 2, 4, 8]
    assert kinds(controller)[-1] == "restarted"


def test_a_restart_without_room_fails_and_keeps_the_state(world):
    controller = world.drive(
        3, min_workers=2, backoff_initial_s=0.5, max_start_attempts=3
    ).controller
    run_until(controller, 15)
    world.room = 0
    lose_all(world)
    with pytest.raises(WorkerLostError, match="0 workers left, but min_workers=2"):
        run_until(controller, 60, max_retries=1)
    assert kinds(controller).count("waiting") == 3
    assert controller.snapshots.load() == {"global_step": 10}
    world.room = 3
    assert run_until(controller, 60, max_retries=1) == [60] * 3


def test_loss_at_the_begin_of_a_restart_replaces_one_worker(world):
    controller = world.drive(3).controller
    run_until(controller, 15)
    lose_all(world)
    world.on_meeting.append(lambda: world.workers[4].die("again"))
    assert run_until(controller, 60, max_retries=1) == [60] * 3
    assert kinds(controller)[-2:] == ["replacement_failed", "restarted"]
    assert {world.workers[3], world.workers[5]} < set(controller.members)  # they stay members


def test_error_in_setup_during_a_restart_reaches_the_caller(world):
    controller = world.drive(3).controller
    run_until(controller, 15)
    lose_all(world)
    every_new(world, setup_error=ValueError("the data is not there"))
    with pytest.raises(ValueError, match="the data is not there"):
        run_until(controller, 60, max_retries=1)
    world.on_new_worker.clear()
    assert run_until(controller, 60, max_retries=1) == [60] * 3
    assert all(member.is_set_up for member in controller.members)


# ---- too few workers are left


def test_too_few_workers_wait_for_replacements(world):
    controller = world.drive(3, min_workers=3).controller
    world.at_step(20, lambda: world.lose(1))
    assert run_until(controller, 100, max_retries=1) == [100] * 3
    assert kinds(controller) == ["started", "lost", "grown"]  # no "waiting", because there is room
    assert all(m.context.world_size == 3 for m in controller.members)


def test_call_fails_without_replacements_and_the_state_can_be_read(world):
    controller = world.drive(
        3, min_workers=3, backoff_initial_s=0.5, max_start_attempts=3
    ).controller

    def lose_with_its_node():
        world.room = 2
        world.lose(2)

    world.at_step(20, lose_with_its_node)
    with pytest.raises(WorkerLostError, match="more are not free: room for 2") as caught:
        run_until(controller, 100, max_retries=1)
    assert "OOM" in str(caught.value)
    assert kinds(controller).count("waiting") == 3
    assert len(controller.members) == 2
    assert len(run(controller, "work", allows_any_size=True)) == 2


@pytest.mark.parametrize(
    ("failing", "error", "num_tries"),
    [
        ("setup_error", ValueError("no such file"), 2),
        ("join_error", ValueError("no such file"), 2),
        ("join_error", CheckpointError("another model"), 1),  # no worker can load this state
    ],
)
def test_a_later_call_retries_replacements_that_failed(world, failing, error, num_tries, caplog):
    """The user may have fixed the cause of the error in `setup`."""
    controller = world.drive(
        3, min_workers=3, backoff_initial_s=0.5, max_start_attempts=2
    ).controller
    every_new(world, **{failing: error})
    world.at_step(20, lambda: world.lose(1))
    with pytest.raises(WorkerLostError, match=f"min_workers=3, and replacements fail: {error}"):
        run_until(controller, 100, max_retries=1)
    assert kinds(controller).count("replacement_failed") == num_tries
    assert f"replacements fail: {error}. Waiting 0.5 s for workers." in caplog.text
    every_new(world, **{failing: None})
    assert run_until(controller, 100, max_retries=1) == [100] * 3


# ---- groups that cannot be joined


def test_group_that_cannot_be_joined_grows_by_a_restart(world):
    world.room = 2
    started = []
    options = {"can_join": False, "on_start": lambda: started.append(len(world.driver.workers))}
    controller = world.drive(3, resize_cooldown_s=1.0, **options).controller
    assert not controller.restart_with_more_workers()
    world.room = 3
    assert not controller.restart_with_more_workers()  # resize_cooldown_s is not over
    world.sleep(1.5)
    controller.snapshots.store({"global_step": 7})
    world.kept_by_driver = 7
    assert controller.restart_with_more_workers()
    assert (len(controller.members), started) == (3, [2, 3])
    assert kinds(controller) == ["started", "grown"]
    assert run_until(controller, 9) == [9] * 3
    assert not controller.restart_with_more_workers()


def test_stopped_work_makes_the_next_call_form_a_new_generation(world):
    controller = world.drive(2).controller
    controller.stop(request_of("work"))
    assert [member.interruptions for member in controller.members] == [1, 1]
    assert controller.group_status == "broken"
    assert run_until(controller, 5) == [5, 5]
    assert kinds(controller) == ["started", "regrouped"]


def test_worker_that_does_not_stop_is_replaced(world):
    controller = world.drive(2, can_join=False).controller
    slow = controller.members[1]
    slow.work_s, slow.deaf = 1000.0, True
    before = world.now
    controller.stop(request_of("work"))
    assert world.now - before < 1.0
    assert run_until(controller, 5) == [5, 5]
    assert world.now - before < 10.0
    assert slow.dead
    assert kinds(controller) == ["started", "lost", "restarted"]


# ---- losses while workers start


@pytest.fixture
def slow_world():
    """Room for three workers whose processes take a second to start."""
    made = World(room=3)
    every_new(made, start_s=1.0)
    return made


@pytest.mark.parametrize("when", ["starting", "in setup"])
def test_worker_lost_during_a_start_is_replaced_alone(slow_world, when):
    world = slow_world
    if when == "starting":
        world.plan(0.5, lambda: world.workers[1].die("OOM"))
    else:
        world.on_meeting.append(lambda: world.workers[1].die("OOM"))
    controller = world.drive(3, min_workers=3).controller
    assert kinds(controller) == ["replacement_failed", "started"]
    assert set(controller.members) == {world.workers[n] for n in (0, 2, 3)}
    assert [member.num_joins for member in controller.members] == [1] * 3
    assert run_until(controller, 20) == [20] * 3


def test_a_long_setup_is_logged(world, caplog):
    world.join_s = 40.0
    world.drive(2)
    assert "Still waiting for workers 0, 1 to set up." in caplog.text


def test_replacements_form_the_group_if_the_last_member_is_lost(slow_world):
    world = slow_world
    controller = world.drive(3).controller
    every_new(world, start_s=3.0)
    world.at_step(25, lambda: (world.lose(1), world.lose(2)))
    world.at_step(75, lambda: lose_all(world))
    assert run_until(controller, 200, max_retries=2) == [200] * 3
    restarted = next(e for e in controller.events if e.kind == "restarted")
    assert restarted.step in (60, 70)  # from the snapshot, not from scratch
    assert restarted.seconds < 2.0
    assert {world.workers[3], world.workers[4]} <= set(controller.members)
    assert "waiting" not in kinds(controller)


def die_in_setup(world, workers, cause, at="setup"):
    """Kill the given workers whenever they are in the method `at`, alone or in a rendezvous."""

    def die():
        for member in workers():
            if member.is_at(at):
                member.die(cause)

    def die_alone():
        die()
        world.plan(0.0, die_alone)

    def die_together():
        die()
        world.on_meeting.append(die_together)

    die_alone()
    die_together()


@pytest.mark.parametrize(
    ("rejoins", "at", "said"),
    [
        (True, "setup", "3 times in a row in setup"),
        (False, "setup", "3 times in a row in setup"),
        (True, "create_runner", "10 times in a row in initialization_hook or an import"),
    ],
)
def test_crashes_of_a_slot_in_user_code_end_the_start(world, rejoins, at, said):
    every_new(world, start_s=0.5)
    die_in_setup(world, lambda: world.workers, "Segmentation fault", at)
    with pytest.raises(WorkerLostError, match=rf"Worker \d died {said}.*fault"):
        world.drive(3, rejoins=rejoins)
    assert all(worker.dead for worker in world.workers)
    assert world.now < 1000.0 + 10.0


def test_three_crashes_in_setup_of_one_slot_alone_end_the_start(world):
    """The start fails although the other workers, which are set up by then, would be enough."""

    def die():
        for member in world.workers:
            if member.slot.index == 1 and member.is_at("setup"):
                member.die("fault")
        world.plan(0.0, die)
        world.on_meeting[:] = [lambda: world.workers[1].die("fault")]

    die()
    every_new(world, setup_s=0.1)
    with pytest.raises(WorkerLostError, match="Worker 1 died 3 times in a row in setup"):
        world.drive(3)
