"""Calls of the controller on a simulated cluster: outcomes, errors, interruptions, and shutdown."""

import threading

import pytest

from raysgd.cluster.worker import Worker
from raysgd.elastic.call import Call
from raysgd.errors import CollectiveError, WorkerLostError
from tests.blackbox.simulation.seam import BadBatchError, LostError
from tests.blackbox.simulation.world import World
from tests.unit.cluster.calls import request_of, run
from tests.unit.cluster.test_elasticity import kinds, lose_all


@pytest.fixture
def world():
    return World(room=3)


def train(controller, until_step=40, **options):
    return run(controller, "train", until_step=until_step, **options)


def fail_all_to_talk(members):
    for member in members:
        member.fail_to_talk()


def test_answers_come_in_the_order_of_the_ranks(world):
    controller = world.drive(3).controller
    assert run(controller, "work") == [0, 1, 2]
    assert controller.group_status == "ready"
    assert kinds(controller) == ["started"]
    assert controller.events[0].ranks == (0, 1, 2)


def test_arguments_that_cannot_be_pickled_are_an_error_before_any_call(world):
    controller = world.drive(3).controller
    with pytest.raises(TypeError, match=r"arguments of work.*cannot be pickled"):
        run(controller, "work", goal=threading.Lock())
    assert len(run(controller, "work")) == 3


# ---- errors


def test_a_user_error_is_raised_instead_of_the_broken_connections_it_causes(world):
    controller = world.drive(3).controller
    first, second, third = controller.members

    def fail():
        fail_all_to_talk([first, third])
        world.plan(0.2, lambda: second.end("user_error", BadBatchError("the reason")))

    world.at_step(20, fail)
    with pytest.raises(BadBatchError, match="the reason"):
        train(controller)
    assert controller.group_status == "broken"
    assert (controller.events[-1].kind, controller.events[-1].ranks) == ("user_error", (1,))
    assert train(controller) == [40] * 3
    assert kinds(controller) == ["started", "user_error", "regrouped"]


def test_live_workers_that_cannot_communicate_raise_an_error(world):
    controller = world.drive(3).controller
    world.at_step(20, lambda: fail_all_to_talk(controller.members))
    with pytest.raises(CollectiveError, match=r"All workers are alive.*closed by peer"):
        train(controller)
    assert train(controller) == [40] * 3


@pytest.mark.parametrize("method", ["train", "work"])
def test_a_call_is_repeated_after_workers_were_cut_off_from_the_driver(world, method):
    controller = world.drive(3).controller
    for member in controller.members:
        member.work_s = 1.0
    world.plan(0.5, lambda: controller.members[0].end("cut_off", OSError()))
    if method == "train":
        assert train(controller) == [40] * 3
        assert kinds(controller) == ["started", "regrouped"]
    else:  # a call that must not be made twice
        with pytest.raises(CollectiveError):
            run(controller, "work")


def test_more_losses_than_allowed_end_the_call_with_every_cause(world):
    controller = world.drive(3).controller
    world.at_step(20, lambda: world.lose(1))
    with pytest.raises(
        WorkerLostError, match=r"The call of train\(\) failed: workers were lost"
    ) as caught:
        train(controller, max_retries=0)
    error = caught.value
    assert (error.rank, error.node_id) == (1, "node0")
    assert "workers were lost in one call more often than max_retries=0" in str(error)
    assert "OOM" in str(error)
    assert isinstance(error.__cause__, LostError)


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_loss_in_a_replay_is_a_retry_if_the_call_has_begun(world, has_begun):
    controller = world.drive(3).controller
    train(controller, 25)

    def make_replay(position):
        world.plan(0.1, lambda: lose_all(world))
        request = request_of("train", until_step=position.global_step)
        return Call(request=request, has_batches=True)

    world.at_step(27, lambda: lose_all(world))
    with pytest.raises(WorkerLostError, match=f"max_retries={int(has_begun)}"):
        train(controller, max_retries=int(has_begun), make_replay=make_replay)
    assert run.call.losses.num_losses == 1 + has_begun
    if not has_begun:  # the next call repairs the group
        assert train(controller, make_replay=make_replay) == [40] * 3
        assert run.call.losses.num_losses == 0
    assert kinds(controller).count("lost") == 6


def test_without_replacements_too_few_survivors_end_the_call(world):
    controller = world.drive(3, min_workers=3, replace_workers=False).controller
    world.at_step(20, lambda: world.lose(1))
    with pytest.raises(WorkerLostError, match=r"2 workers left, .*replace_workers=False") as caught:
        train(controller, max_retries=3)
    assert "OOM" in str(caught.value)


@pytest.mark.parametrize("num_failures", [2, 3])
def test_forming_a_group_is_retried_twice(world, num_failures):
    controller = world.drive(3).controller
    members = list(controller.members)
    world.at_step(20, lambda: setattr(members[1], "error", BadBatchError("bad")))
    with pytest.raises(BadBatchError):
        train(controller)
    failed = []

    def fail():
        failed.append(1)
        fail_all_to_talk(members)
        if len(failed) < num_failures:
            world.on_meeting.append(fail)

    world.on_meeting.append(fail)
    if num_failures == 3:
        with pytest.raises(CollectiveError, match="All workers are alive"):
            train(controller)
    assert train(controller) == [40] * 3
    assert len(failed) == num_failures
    assert controller.members == members


def test_the_driver_logs_what_the_workers_warn_of_when_they_form_a_group(world, caplog):
    controller = world.drive(3).controller
    for member in controller.members:
        member.warning = "removed a hook"
    world.at_step(20, lambda: world.lose(1))
    train(controller, max_retries=3)
    assert caplog.text.count("removed a hook") == 2


def test_a_restart_tears_down_the_worker_in_the_drivers_process(world, monkeypatch):
    controller = world.drive(2, rejoins=False).controller
    local, asked = controller.members[0], []
    local.is_remote = False
    work = local.submit_work
    monkeypatch.setattr(
        local, "submit_work", lambda what, *rest: asked.append(what) or work(what, *rest)
    )
    world.at_step(20, lambda: world.lose(1))
    assert train(controller, max_retries=1) == [40] * 2
    assert local not in controller.members
    assert kinds(controller) == ["started", "lost", "restarted"]
    assert Worker.teardown in asked


# ---- calls and interruptions


@pytest.mark.parametrize("is_deaf", [False, True])
def test_the_next_call_works_after_ctrl_c(world, is_deaf):
    controller = world.drive(3).controller
    controller.members[1].deaf = is_deaf
    world.at_step(20, lambda: setattr(world, "has_ctrl_c", True))
    with pytest.raises(KeyboardInterrupt):
        train(controller)
    assert controller.group_status == "broken"
    assert train(controller) == [40] * 3
    assert ("lost" in kinds(controller)) == is_deaf
    causes = {e.kind: e.cause for e in controller.record.events}
    assert causes["regrouped"] == ("" if is_deaf else "interrupted by Ctrl-C")


def test_steps_lost_before_ctrl_c_in_a_restart_are_left_to_the_next_call(world):
    controller = world.drive(3).controller

    def interrupt():
        if kinds(controller)[-1] == "restarted":
            raise KeyboardInterrupt

    controller.record.on_event = lambda: interrupt
    world.at_step(25, lambda: [member.die("OOM") for member in controller.members])
    with pytest.raises(KeyboardInterrupt):
        train(controller, max_retries=1)
    assert controller.record.newest_status.position.global_step > world.kept_by_driver == 20


def test_on_progress_gets_the_progress_of_the_workers(world):
    controller = world.drive(3).controller
    seen = []
    train(controller, on_progress=lambda progress: seen.append([p.global_step for p in progress]))
    assert [20, 20, 20] in seen


# ---- start and shutdown


def test_an_error_at_the_start_leaves_no_worker(world):
    world.on_new_worker.append(lambda member: setattr(member, "join_error", ValueError("no data")))
    with pytest.raises(ValueError, match="no data"):
        world.drive(3)
    assert world.driver.controller.is_shut_down
    assert all(worker.dead for worker in world.workers)


@pytest.mark.parametrize("is_broken", [False, True])
def test_shutdown_is_gentle_unless_the_group_is_broken(world, is_broken):
    controller = world.drive(3).controller
    forced, shutdown = [], controller._group.shutdown
    controller._group.shutdown = lambda force: forced.append(force) or shutdown(force)
    if is_broken:
        world.at_step(20, lambda: fail_all_to_talk(controller.members))
        with pytest.raises(CollectiveError):
            train(controller)
    controller.shutdown()
    controller.shutdown()
    assert forced[0] == is_broken
    with pytest.raises(RuntimeError, match="shut down"):
        run(controller, "work")


def test_the_workers_that_a_shutdown_stops_during_a_call_are_not_lost(world):
    controller = world.drive(3).controller
    world.at_step(20, controller.shutdown)
    with pytest.raises(RuntimeError, match="shut down"):
        train(controller, max_retries=3)
    assert kinds(controller) == ["started"]


def test_drain_of_an_unknown_rank_is_an_error(world):
    controller = world.drive(3).controller
    with pytest.raises(ValueError, match=r"drain\(rank=3\): must be from 0 to 2\."):
        controller.drain(None, 3, None)
    controller.members.clear()
    with pytest.raises(ValueError, match=r"drain\(rank=3\): no worker is left\."):
        controller.drain(None, 3, None)


def test_a_fork_of_the_driver_neither_calls_nor_ends_the_workers(world):
    controller = world.drive(3).controller
    controller._pid += 1
    for call in (lambda: run(controller, "work"), lambda: controller.stop(None)):
        with pytest.raises(RuntimeError, match="This process was forked from the process of"):
            call()
    controller.shutdown(force=True)  # a forked process calls this when it exits
    assert not any(member.dead for member in world.workers)
