"""Preemption notices for workers and nodes, on a simulated cluster and clock."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from raysgd.cluster.group_options import GroupOptions
from raysgd.cluster.preemption_notices import PreemptionNotice
from raysgd.elastic.call import Call
from raysgd.elastic.preemption import PreemptionMonitor
from raysgd.loop.requests import LeavingMetricsRequest, TrainRequest
from tests.blackbox.simulation.world import TICK_S, World
from tests.unit.cluster.clock import ManualClock
from tests.unit.cluster.test_elasticity import lose_all


def train(controller, step, **options):
    """Train up to a step as the trainer does, and return the call."""
    call = Call(
        request=TrainRequest(call_number=0, until_step=step),
        has_batches=True,
        can_pause=True,
        leaving_metrics_request=LeavingMetricsRequest(call_number=0),
        **options,
    )
    assert set(controller.run(call)) == {step}
    return call


def kinds(controller):
    return [event.kind for event in controller.events[1:]]


@pytest.fixture
def start():
    def start(room, num_workers=3, **options):
        world = World(room)
        return world, world.drive(num_workers, **options).controller

    return start


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_replacement_takes_over_at_a_step_if_there_is_room(start, num_workers):
    world, controller = start(room=6, num_workers=num_workers)
    before = controller.members[0]
    world.at_step(20, lambda: controller.drain(None, 0, 60.0))
    record = train(controller, 200)
    assert kinds(controller) == ["draining", "drained"]
    draining, moved = controller.events[1:]
    assert (draining.ranks, round(draining.seconds)) == ((0,), 60)
    assert before.node_name in moved.cause
    assert before.dead
    assert before not in controller.members
    assert len(controller.members) == num_workers
    assert world.trained == list(range(1, 201))
    assert [outcome.unpack() for outcome in record.leaving_outcomes] == ["of 0"]
    assert record.losses.num_losses == 0


@pytest.mark.parametrize("snapshot_every", [1000, 10])
def test_metrics_of_a_worker_that_left_do_not_count_if_its_steps_run_again(start, snapshot_every):
    world, controller = start(room=6)
    world.snapshot_every = snapshot_every
    world.at_step(20, lambda: controller.drain(None, 1, 60.0))
    world.at_step(100, lambda: lose_all(world))
    record = train(controller, 200, max_retries=1)
    assert kinds(controller)[-1] == "restarted"
    repeated = controller.events[-1].step == 0
    assert repeated == (snapshot_every == 1000)
    assert [outcome.unpack() for outcome in record.leaving_outcomes] == ["of 1"] * (not repeated)


def test_missing_metrics_of_a_leaving_worker_are_reported(start, caplog):
    world, controller = start(room=6)
    before = controller.members[0]
    world.at_step(20, lambda: controller.drain(None, 0, 60.0))
    collect = controller._builder.collect_metrics

    def collect_metrics(members):
        before.silent = True  # when the others have formed the next generation
        collect(members)

    controller._builder.collect_metrics = collect_metrics
    assert train(controller, 200).leaving_outcomes == []
    missing = f"train() lacks the metrics of workers that leave {before.node_name}. They did"
    assert missing in caplog.text


def test_leaving_worker_that_dies_is_no_loss(start):
    world, controller = start(room=6)
    before = controller.members[0]
    world.at_step(20, lambda: controller.drain(None, 0, 60.0))
    world.on_meeting.append(lambda: before.die("its time is over"))
    record = train(controller, 200)
    assert kinds(controller) == ["draining", "drained"]
    assert (record.leaving_outcomes, record.losses.num_losses) == ([], 0)


def test_without_room_workers_leave_shortly_before_the_deadline(start):
    world, controller = start(room=3)
    world.at_step(19, lambda: controller.drain(None, 2, None))
    world.at_step(20, lambda: controller.drain("node1", None, 20.0))
    train(controller, 600)
    assert kinds(controller)[:2] == ["draining", "regrouped"]
    left = controller.events[2]
    assert "a worker has left" in left.cause
    assert left.num_workers == 2
    assert 20.0 - 5.0 < (left.step - 20) * TICK_S < 20.0
    assert world.trained == list(range(1, 601))


def test_a_draining_node_gets_no_worker(start):
    world, controller = start(room=6)
    node = controller.members[0].location.node_id
    world.at_step(20, lambda: controller.drain(node, None, 60.0))
    train(controller, 300)
    assert kinds(controller) == ["draining", "drained"]  # both of its workers together
    assert node not in {member.location.node_id for member in controller.members}
    assert len(controller.members) == 3


def test_a_worker_that_was_sent_sigterm_moves(start):
    world, controller = start(room=4)
    world.at_step(20, lambda: setattr(controller.members[1], "terminated_at", world.now - 4))
    train(controller, 200)
    assert kinds(controller) == ["draining", "drained"]
    draining = controller.events[1]
    assert draining.cause == "its process was sent SIGTERM"
    assert draining.seconds == pytest.approx(6, abs=1), "counts from the signal"


@pytest.mark.parametrize("is_divided", [False, True])
def test_driver_saves_immediately_if_no_worker_can_take_over(start, is_divided):
    world, controller = start(room=2, num_workers=2, min_workers=2)
    for member in controller.members:
        member.divided = is_divided
    begun, snapshots = [], controller.snapshots

    def make_request(position, must_save):
        begun.append((position.global_step, must_save, snapshots.load()))
        return TrainRequest(call_number=0, until_step=100)

    world.at_step(20, lambda: controller.drain("node0", None, 60.0))
    train(controller, 100, make_request=make_request)
    assert kinds(controller) == ["draining"]
    ((_, _, _), (step, immediately, state), *_) = begun
    assert immediately
    assert step < 50
    assert state == {"global_step": step, **({"shards": [0, 1]} if is_divided else {})}


@pytest.mark.parametrize(("left_s", "saves"), [(1.0, True), (60.0, False)])
def test_driver_saves_if_a_successor_would_be_too_late(start, left_s, saves):
    world, controller = start(room=3)
    world.at_step(20, lambda: controller.drain(None, 2, left_s))
    request, saved = TrainRequest(call_number=0, until_step=50), []
    train(controller, 50, make_request=lambda position, saves: saved.append(saves) or request)
    assert kinds(controller)[0] == "draining"
    assert any(saved) == saves


def test_a_save_while_lost_steps_run_again_sets_the_goal_after_them(start):
    world, controller = start(room=2, num_workers=2, min_workers=2)
    train(controller, 25)
    world.at_step(27, lambda: [world.lose(rank) for rank in (1, 0)])
    goals, request = [], TrainRequest(call_number=0, until_step=50)
    earlier = Call(request=replace(request, until_step=25), has_batches=True, can_pause=True)
    train(
        controller,
        50,
        max_retries=1,
        make_replay=lambda _: controller.drain("node0", None, 60.0) or earlier,
        make_request=lambda position, saves: goals.append((position.global_step, saves)) or request,
    )
    assert goals == [(25, False), (25, True)]


def watch_of(left_s, **sizes):
    """Return the watch of a group in which some ranks have this many seconds left."""
    clock = ManualClock()
    group = SimpleNamespace(
        clock=clock,
        members=range(sizes["num_workers"]),
        options=GroupOptions(**sizes),
        preempted=lambda: {r: PreemptionNotice(str(s), clock.now + s) for r, s in left_s.items()},
    )
    policy = SimpleNamespace(supports_live_join=True)
    record = SimpleNamespace(group=group, policy=policy, add_event=lambda *_, **__: None)
    return PreemptionMonitor(record)


def test_a_more_urgent_notice_saves_and_a_later_one_does_not_revoke_the_save():
    left_s, saves = {}, []
    watch = watch_of(left_s, num_workers=4)
    for rank, seconds in ((1, 60), (1, 1), (0, 60)):
        left_s[rank] = seconds
        watch.observe({})
        saves.append(watch.must_save)
    assert saves == [False, True, True]


def fail_in_user_code(member):
    member.end("user_error", ValueError("a"))


@pytest.mark.parametrize(
    ("fail", "rank", "arrives", "logged"),
    [
        (lambda member: None, 3, [2, 3], ""),
        (lambda member: member.die("OOM"), 3, [2], ""),
        (fail_in_user_code, 3, [2], "export_shards failed on"),
        (fail_in_user_code, 0, [], "0: ValueError('a')"),
    ],
)
def test_shards_of_leaving_workers_arrive_although_another_one_fails(
    start, caplog, fail, rank, arrives, logged
):
    world, controller = start(room=8, num_workers=4)
    before = list(controller.members)
    for member in before:
        member.divided = True
    failing, go_on = before[rank], before[rank].go_on

    def fail_when_asked():
        if failing.is_at("export_shards") or failing.is_at("import_shards"):
            fail(failing)
        go_on()

    failing.go_on = fail_when_asked
    for rank in (2, 3):
        world.at_step(20, lambda rank=rank: controller.drain(None, rank, 60.0))
    train(controller, 200)
    assert before[0].held == [before[rank].home.pid for rank in arrives]
    assert logged in caplog.text


def test_leaving_worker_that_dies_early_is_a_loss(start):
    world, controller = start(room=4)
    world.at_step(20, lambda: controller.drain(None, 1, 60.0))
    world.at_step(21, lambda: world.lose(1))
    record = train(controller, 200, max_retries=3)
    assert kinds(controller)[:2] in (["draining", "lost"], ["lost", "regrouped"])
    assert record.losses.num_losses == 1
    assert len(controller.members) == 3


@pytest.mark.parametrize(
    ("left_s", "num_workers", "num_ready", "min_workers", "leaving"),
    [
        ({0: 20, 2: 10}, 3, 1, 1, [2]),
        ({0: 20, 1: 20}, 2, 2, 1, [0]),  # the other one has the state
        ({0: 20}, 1, 1, 1, [0]),
        ({0: 2, 1: 2}, 2, 0, 1, [0]),
        ({0: 2, 1: 2}, 3, 0, 2, [0]),
    ],
)
def test_workers_leave_for_replacements_and_at_their_deadlines(
    left_s, num_workers, num_ready, min_workers, leaving
):
    watch = watch_of(left_s, num_workers=num_workers, min_workers=min_workers)
    assert watch.due_to_leave(num_ready) == leaving


@pytest.mark.parametrize("room", [3, 4])
def test_a_group_grows_out_of_a_preempted_node_if_another_has_room(start, room):
    _, controller = start(room, min_workers=3, can_join=False)
    controller.drain(None, 0, 60.0)
    assert controller.restart_with_more_workers() == (room == 4)
