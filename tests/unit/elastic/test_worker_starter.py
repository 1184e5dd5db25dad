"""Replacement workers: how many start, when they are retried, and when they join."""

import contextlib
import re
from dataclasses import replace

import pytest

from raysgd.cluster.preemption_notices import PreemptionNotice
from raysgd.cluster.worker import WorkerLocation
from tests.blackbox.simulation.world import TICK_S, World
from tests.unit.cluster.test_elasticity import every_new, kinds, lose_all, run_until


@pytest.fixture
def world():
    """Room for two workers so far."""
    return World(room=2)


def test_a_replacement_is_discarded_if_the_member_stays_after_all(world):
    """One without a process is the first, and its request for resources is given back."""
    controller = world.drive(2).controller
    starter, notices = controller._starter, controller._group.notices._by_target
    notices |= dict.fromkeys(controller.members, PreemptionNotice("a test"))
    starter.advance()
    *_, one, other = slots = world.reservations[0].slots
    one.index, other.index, world.room = other.index, one.index, 3  # there is room for the second
    world.sleep(1.0)
    starter.advance()
    *_, started = world.workers
    assert (len(slots), len(world.workers), started.slot) == (4, 3, other)
    notices.popitem()
    starter.advance()
    assert not started.dead
    assert one in world.reservations[0].slots
    notices.clear()
    starter.advance()
    assert started.dead
    assert one not in world.reservations[0].slots


# ---- failures


@pytest.mark.parametrize(
    ("stage", "after_s", "most"), [("start", 0.1, 5), ("set up", 0.3, 3), ("ready", 0.8, 5)]
)
def test_a_slot_with_repeated_losses_in_the_same_stage_waits(world, stage, after_s, most):
    controller = world.drive(
        3, resize_cooldown_s=0.0, backoff_initial_s=2.0, max_start_attempts=5
    ).controller
    lives_s = iter([after_s] * (most - 1) + [0.0] + [after_s] * most)
    began = []

    def kill(member):
        began.append((world.now, controller._starter.error))
        member.start_s, life_s = 0.2, next(lives_s, None)
        if life_s == 0.0:
            member.die("OOM")  # while it comes up, which is another stage
        elif life_s is not None:
            world.plan(life_s, lambda: member.die("OOM"))

    world.on_new_worker.append(kill)
    world.room = 3
    assert run_until(controller, 400) == [400] * 3
    times, errors = zip(*began, strict=True)
    long = [n for n in range(1, len(times)) if times[n] - times[n - 1] > 1.9]
    assert (long, len(times)) == ([2 * most], 2 * most + 1)
    # user code runs only in these stages
    assert [error is not None for error in errors] == [False] * 2 * most + [stage != "ready"]


@pytest.mark.parametrize("is_lost", [True, False])
def test_replacements_start_again_after_a_new_loss_and_in_a_later_call(world, is_lost):
    """Otherwise, waiting for min_workers would be useless."""
    controller = world.drive(3, max_start_attempts=1).controller
    every_new(world, setup_error=ValueError("no such file"))
    world.room = 3
    world.at_step(100, lambda: (world.on_new_worker.clear(), is_lost and world.lose(1)))
    assert is_lost or len(run_until(controller, 200)) == 2
    assert run_until(controller, 400, max_retries=1) == [400] * 3
    assert kinds(controller).count("replacement_failed") == 1


# ---- late workers of a start


def delay(world, *seconds):
    """Set the seconds until a worker has started, by slot."""
    world.on_new_worker.append(lambda m: setattr(m, "start_s", seconds[m.slot.index]))


def test_a_start_waits_60_s_for_late_workers_from_the_moment_there_are_enough(world):
    world.room = 3
    delay(world, 1.0, 3.0, 90.0)
    assert len(world.drive(3, min_workers=2).controller.members) == 2
    assert world.now - 1000.0 == pytest.approx(63.0, abs=0.2)


def test_each_restart_waits_half_a_second_for_late_workers(world):
    controller = world.drive(3).controller
    delay(world, 0.0, 0.0, 90.0)
    world.room = 3
    for step in (20, 40):
        world.at_step(step, lambda: lose_all(world))
        run_until(controller, step + 10, max_retries=1)
    restarts = [event for event in controller.events if event.kind == "restarted"]
    assert [event.num_workers for event in restarts] == [2, 2]
    expected = 0.5 + 0.5  # from the end of the setup
    assert [event.seconds for event in restarts] == pytest.approx([expected] * 2, abs=0.2)


@pytest.mark.parametrize(("replace_workers", "grace_s"), [(True, 0.5), (False, 60.0)])
def test_a_start_waits_half_a_second_for_the_successor_of_a_killed_worker(
    world, replace_workers, grace_s
):
    world.room = 3
    delay(world, 1.0, 1.0, 90.0)
    world.plan(0.5, lambda: world.workers[2].die("killed"))
    controller = world.drive(3, min_workers=2, replace_workers=replace_workers).controller
    assert (len(world.workers), len(controller.members)) == (4, 2)
    assert world.now - 1000.0 == pytest.approx(1.0 + grace_s, abs=0.2)


# ---- joining


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_worker_for_new_room_waits_for_the_cooldown_unless_it_succeeds_a_lost_one(world, is_lost):
    controller = world.drive(3, resize_cooldown_s=10.0).controller
    world.room = 3
    if is_lost:
        world.plan(0.2, lambda: world.workers[2].die("OOM"))
    run_until(controller, 400)
    assert kinds(controller)[-1] == "grown"
    assert controller.events[-1].step * TICK_S == pytest.approx(1.0 if is_lost else 10.0, abs=0.9)


def test_the_successor_of_a_worker_that_leaves_waits_although_its_slot_was_lost_before(world):
    world.room = 3
    controller = world.drive(3, resize_cooldown_s=10.0).controller
    world.at_step(20, lambda: world.lose(2))
    run_until(controller, 100, max_retries=1)
    controller.drain(None, 2, 6.0)
    run_until(controller, 600)
    assert kinds(controller)[-4:] == ["grown", "draining", "regrouped", "grown"]
    left, grown = controller.events[-2:]
    assert (grown.step - left.step) * TICK_S == pytest.approx(10.0, abs=0.9)


# ---- from a free slot to a worker that is ready


GPUS = ("1", "3")


def setups(member):
    """Return the arguments of the calls in which a worker sets up, whose answers still wait."""
    return [task.arguments for task in member.queue if task.method == "setup"]


def test_a_replacement_knows_its_rank_and_sets_up_alone(world):
    controller = world.drive(4).controller
    every_new(world, home=WorkerLocation(node_id="n", node_ip="10.0.0.9", gpu_ids=GPUS))
    world.room = 4
    controller._starter.advance()
    world.workers[2].die("OOM")
    controller._starter.advance()
    for rank, member in ((3, world.workers[3]), (2, world.workers[4])):
        ((context, rendezvous),) = setups(member)
        assert (rendezvous, context.is_alone) == (None, True)
        assert (context.world_rank, context.world_size) == (rank, 4)
        assert (context.node_ip, context.visible_gpus, context.gpu_index) == ("10.0.0.9", GPUS, 0)
        assert (context.generation, context.num_cpus) == (controller.record.generation, 1)
        assert context.has_process_group


def test_a_worker_that_sets_up_again_sees_the_same_gpus(world):
    """Its process cannot change them."""
    together, alone = [], []
    every_new(world, home=WorkerLocation(node_id="n", node_ip="10.0.0.9", gpu_ids=GPUS))

    def lose():
        (member,) = (each for each in world.workers if each.context is None and each.slot.index)
        together.extend(setups(member))
        world.workers[0].die("OOM")
        world.plan(0.1, lambda: alone.extend(setups(member)))

    world.on_meeting.append(lose)
    world.drive(2)
    ((before, *_),) = together
    ((after, *_),) = alone
    assert after == replace(before, generation=after.generation, is_alone=True)
    assert after.generation > before.generation


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"setup_s": 1e6}, "Worker 2 took longer than 30 s to set up. To wait longer, raise time"),
        ({"silent": True}, "took longer than 100 s to come up. .*set SGD_PLACEMENT_GROUP_TIMEOUT"),
    ],
)
def test_a_phase_that_takes_too_long_is_an_error(world, change, said):
    controller = world.drive(3, timeout_s=30.0).controller
    controller._group.options = replace(controller._group.options, start_timeout_s=100.0)
    every_new(world, **change)
    world.room = 3
    run_until(controller, 2200)
    assert re.search(said, controller.events[-1].cause)


@pytest.mark.parametrize("error", [RuntimeError("the group is gone"), KeyboardInterrupt()])
def test_a_worker_that_cannot_be_started_is_tried_again_later(world, error):
    controller = world.drive(3, resize_cooldown_s=0.0).controller

    group = controller._group
    start_worker = group.start_worker

    def fail(slot):
        group.start_worker = start_worker
        raise error

    group.start_worker = fail
    world.room = 3
    with pytest.raises(KeyboardInterrupt) if not str(error) else contextlib.nullcontext():
        run_until(controller, 200)
    assert run_until(controller, 400) == [400] * 3
    (failed,) = (event for event in controller.events if event.kind == "replacement_failed")
    assert str(error) in failed.cause
