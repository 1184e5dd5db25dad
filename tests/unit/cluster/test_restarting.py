"""Groups whose workers cannot rejoin: all restart from the state of a survivor."""

import pytest

from raysgd.cluster.preemption_notices import PreemptionNotices
from tests.blackbox.simulation.seam import BadBatchError
from tests.blackbox.simulation.world import World
from tests.unit.cluster.test_elasticity import kinds, lose_all, run_until


@pytest.fixture
def world():
    return World(room=4)


def test_loss_restarts_all_with_the_furthest_state_of_a_survivor(world):
    controller = world.drive(3, rejoins=False).controller
    first = list(controller.members)
    world.at_step(17, lambda: world.lose(0, ahead=[2]))
    run_until(controller, 40, max_retries=1)
    assert kinds(controller) == ["started", "lost", "restarted"]
    assert not set(first) & set(controller.members)
    assert controller.events[-1].step == 18  # the snapshot has step 10
    assert [event.num_workers for event in controller.events] == [3, 0, 3]
    assert world.trained == list(range(1, 41))


def test_a_failed_start_reuses_no_process(world):
    world.on_meeting.append(lambda: world.workers[1].die("OOM"))
    controller = world.drive(3, rejoins=False).controller
    assert not set(controller.members) & set(world.workers[:3])


def test_a_users_error_costs_no_step_and_no_retry(world):
    controller = world.drive(2, rejoins=False).controller

    def fail():
        controller.members[1].error = BadBatchError("bad batch")

    world.at_step(17, fail)
    with pytest.raises(BadBatchError):
        run_until(controller, 40)
    step = controller.record.newest_status.position.global_step
    run_until(controller, 40, max_retries=0)
    assert kinds(controller) == ["started", "user_error", "restarted"]
    assert controller.events[-1].step == step >= 17


def test_restart_with_less_room_starts_fewer_workers_and_grows_later(world):
    controller = world.drive(2, rejoins=False, resize_cooldown_s=0.0).controller

    def shrink():
        world.room = 1
        world.lose(1)

    world.at_step(17, shrink)
    run_until(controller, 60, max_retries=1)
    assert len(controller.members) == 1
    world.room = 2
    run_until(controller, 120)
    assert len(controller.members) == 2
    assert kinds(controller)[-1] == "grown"
    assert world.trained == list(range(1, 121))


@pytest.fixture
def silence(world, monkeypatch):
    """A function that sets when the Ray head is unresponsive."""
    spans = []

    def asked_at(notices):
        return next((start - 3 for start, end in spans if start <= world.monotonic() < end), None)

    asked = property(asked_at, lambda *_: None)
    monkeypatch.setattr(PreemptionNotices, "_unanswered_since", asked, raising=False)
    return lambda *span: spans.append(span)


def test_while_the_ray_head_is_silent_no_start_is_tried(world, silence, caplog):
    controller = world.drive(2, rejoins=False, max_start_attempts=1).controller
    world.at_step(17, lambda: silence(world.monotonic() - 5, world.monotonic() + 30))
    world.at_step(17, lambda: lose_all(world))
    run_until(controller, 40, max_retries=2)
    assert "waiting" not in kinds(controller)
    assert caplog.text.count("The Ray head does not answer") == 1


def test_leaving_workers_stay_while_no_worker_can_start(world, silence):
    controller = world.drive(3, min_workers=2, rejoins=False).controller
    run_until(controller, 10)
    controller.drain(None, 1, None)
    now = world.monotonic()
    silence(now - 5, now + 30)
    assert not controller.restart_with_more_workers()
    assert len(controller.members) == 3
    world.sleep(30)
    assert controller.restart_with_more_workers()


def test_a_group_restarts_to_grow_only_if_ray_can_start_workers(world, silence):
    world.room = 2
    controller = world.drive(3, rejoins=False, resize_cooldown_s=0.0).controller
    run_until(controller, 5)
    world.room = 3
    world.on_new_worker.append(lambda _: silence(world.monotonic(), world.monotonic() + 30))
    run_until(controller, 2000)
    assert min(event.num_workers for event in controller.events) == 2
    assert len(controller.members) == 3
