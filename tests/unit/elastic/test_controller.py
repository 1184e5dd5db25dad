"""The loop over calls, failures and generations, with workers in threads instead of actors."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from raysgd._internal.context import Progress
from raysgd.backends import Backend
from raysgd.cluster.group_options import GroupOptions
from raysgd.cluster.worker import Worker
from raysgd.cluster.worker_group import WorkerGroup
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.cluster.worker_info import WorkerInfo
from raysgd.elastic import attempt
from raysgd.elastic.call import LoadRequest
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.controller import Controller
from raysgd.elastic.machine import Broken, Closed, Ready
from raysgd.errors import CollectiveError, RemoteError, RemoteTraceback, WorkerLostError
from tests.blackbox.simulation.seam import LostError
from tests.unit.cluster.calls import run

PATIENCE_S = 20
"""How long a test waits for what must happen, and never in a run that passes."""


class StoppedError(Exception):
    pass


class FakeRunner:
    """Each rank does what its `script` says, a function of the runner."""

    step = 0

    def warm_up(self):
        pass

    def setup(self, context):
        self.contexts = [context]
        self.leaders = []
        self.step = 0
        self.stop = threading.Event()
        self.script = lambda runner: "done"
        self.calls = 0

    def prepare(self, context):
        self.prepared = context

    def rejoin(self, context, leader):
        self.contexts.append(context)
        self.leaders.append(leader)

    def progress(self):
        return Progress(global_step=self.step)

    def request_stop(self, requested):
        if not hasattr(self, "stop"):
            return
        if requested:
            self.stop.set()
        else:
            self.stop.clear()

    def pause_at(self, step):
        self.pause = step
        return 0

    def snapshot(self):
        return None

    def handle(self, request):
        if isinstance(request, LoadRequest):
            self.step = request.state["step"]
            return None
        return request.send_to(self)

    def teardown(self):
        self.torn_down = True

    def work(self, goal=0):
        self.calls += 1
        return self.script(self)

    def wait_for_peers(self):
        """Block as in a collective, until the driver interrupts."""
        assert self.stop.wait(PATIENCE_S)
        raise StoppedError


class FakeBackend(Backend):
    """A process group that fails to form where the driver's `broken` says so."""

    def __init__(self):
        self.broken = False
        self.num_prepared = 0
        self.closed = 0

    def prepare(self, addresses):
        self.num_prepared += 1
        return {"broken": self.broken, "addresses": list(addresses)}

    def setup(self, context, rendezvous):
        if rendezvous is None:  # it sets up alone
            return
        assert len(rendezvous["addresses"]) == context.world_size
        if rendezvous["broken"]:
            raise ConnectionError("peers not found")

    def interrupt(self):
        pass

    def teardown(self):
        pass

    def close(self):
        self.closed += 1

    def is_communication_error(self, error):
        return isinstance(error, ConnectionError)


class FakeMember(WorkerHandle):
    """A worker with a thread of its own, which can die."""

    remote = True

    def __init__(self, index):
        self.info = WorkerInfo(node_id=f"node{index // 2}", node_ip=f"10.0.0.{index // 2}")
        self.index = index
        self.worker = Worker()
        self.killed = False
        self._dead = None
        self._pending = []
        self._thread = ThreadPoolExecutor(1)

    def work(self, method, *arguments):
        return self._start(self._thread.submit, method, arguments)

    def control(self, method, *arguments):
        return self._start(lambda function: function(), method, arguments)

    def _start(self, submit, method, arguments):
        future = Future()
        if self._dead:
            future.set_exception(self._dead)
            return future
        self._pending.append(future)

        def run():
            result = getattr(self.worker, method)(*arguments)
            if not future.done():
                future.set_result(result)

        submit(run)
        return future

    def die(self, cause="OOM"):
        if self._dead:
            return
        self._dead = LostError(cause)
        for future in self._pending:
            if not future.done():
                future.set_exception(self._dead)

    def kill(self):
        self.killed = True
        self.die("killed by the driver")
        if self.worker.runner is not None:
            self.worker.runner.request_stop(True)  # no thread outlives its test
        self._thread.shutdown(wait=False)


class FakeSlot:
    is_ready = True
    node_id = last_node_id = None

    def __init__(self, index):
        self.index = index


class FakeReservation:
    def __init__(self, size):
        self.slots = [FakeSlot(index) for index in range(size)]

    def drop_lost(self, taken):
        return 0

    def release(self):
        pass


class FakeGroup(WorkerGroup):
    """The real group, whose workers are threads and need no room."""

    def __init__(self, num_workers, min_workers=1):
        super().__init__(GroupOptions(num_workers=num_workers, min_workers=min_workers))
        self.shutdowns = []
        self.all = []

    def reserve(self, timeout_s):
        self._is_wanted = True
        self._reservation = FakeReservation(self.options.num_workers)

    def new_member(self, slot):
        member = FakeMember(slot.index)
        self._slots[member] = slot
        self.all.append(member)
        return member

    def room(self):
        return "no room"

    def shutdown(self, force=False):
        self.shutdowns.append(force)
        super().shutdown(force)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nothing here takes time, so that no grace period has to be waited for."""
    monkeypatch.setattr(attempt, "_NODE_LOSS_S", 0.05)


@pytest.fixture
def start():
    """A function that returns a started controller of so many workers."""
    made = []

    def start(num_workers=3, min_workers=1, hook=None, backend=None, **elastic):
        group = FakeGroup(num_workers, min_workers)
        config = ElasticConfig(**{"grow": False, **elastic})
        backend = backend or FakeBackend()
        controller = Controller(group, FakeRunner(), backend, hook, PATIENCE_S, config)
        made.append(controller)
        controller.start()
        return controller

    yield start
    for controller in made:
        controller.shutdown(force=True)


def runners(controller):
    return [member.worker.runner for member in controller.members]


def script(controller, **by_rank):
    """Set what ranks do: ``script(controller, r1=function)``."""
    for name, function in by_rank.items():
        runners(controller)[int(name[1:])].script = function


def raising(error, step=0):
    def run(runner):
        runner.step += step
        raise error

    return run


def dying(controller, rank):
    """A script in which the worker dies while it is at work."""
    member = controller.members[rank]

    def run(runner):
        member.die()
        runner.wait_for_peers()

    return run


def kinds(controller):
    return [event.kind for event in controller.events]


# ---- without failures


def test_each_worker_gets_its_ranks(start):
    controller = start(4)
    contexts = [runner.contexts[0] for runner in runners(controller)]
    assert [c.world_rank for c in contexts] == [0, 1, 2, 3]
    assert [c.local_rank for c in contexts] == [0, 1, 0, 1]
    assert [c.node_rank for c in contexts] == [0, 0, 1, 1]
    assert all(c.world_size == 4 and c.generation == 1 and c.distributed for c in contexts)
    assert [runner.prepared for runner in runners(controller)] == contexts
    assert isinstance(controller.state, Ready)
    assert kinds(controller) == ["started"]
    assert controller.events[0].ranks == (0, 1, 2, 3)


def test_outcomes_come_in_the_order_of_the_ranks(start):
    controller = start()
    script(controller, r0=lambda r: "a", r1=lambda r: "b", r2=lambda r: "c")
    assert [outcome.value() for outcome in run(controller, "work")] == ["a", "b", "c"]
    assert isinstance(controller.state, Ready)


def test_arguments_that_cannot_be_pickled_are_an_error_before_any_call(start):
    controller = start()
    with pytest.raises(TypeError, match=r"arguments of work.*cannot be pickled"):
        run(controller, "work", goal=threading.Lock())
    with pytest.raises(TypeError, match=r"initialization_hook.*cannot be pickled"):
        start(hook=threading.Lock().acquire)
    assert [outcome.value() for outcome in run(controller, "work")] == ["done"] * 3


# ---- errors of the user


def test_the_first_user_error_is_raised_and_the_other_workers_are_stopped(start):
    controller = start()
    script(
        controller,
        r0=FakeRunner.wait_for_peers,
        r1=raising(ValueError("bad batch")),
        r2=FakeRunner.wait_for_peers,
    )
    with pytest.raises(ValueError, match="bad batch") as caught:
        run(controller, "work")
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "worker 1" in str(caught.value.__cause__)
    assert isinstance(controller.state, Broken)
    assert (controller.events[-1].kind, controller.events[-1].ranks) == ("user_error", (1,))


def test_after_an_error_the_next_call_makes_a_new_generation_from_the_furthest_worker(start):
    controller = start()
    script(
        controller,
        r0=FakeRunner.wait_for_peers,
        r1=raising(ValueError("bad batch")),
        r2=raising(StoppedError(), step=1),
    )
    with pytest.raises((ValueError, StoppedError)):
        run(controller, "work")
    script(controller, **{f"r{rank}": lambda r: r.step for rank in range(3)})
    run(controller, "work")
    for rank, runner in enumerate(runners(controller)):
        first, second = runner.contexts
        assert (second.generation, second.world_rank) == (first.generation + 1, rank)
        assert runner.leaders == [2]
    assert kinds(controller) == ["started", "user_error", "resumed"]
    assert controller._backend.num_prepared == 2


def test_a_user_error_is_raised_instead_of_the_broken_connections_it_causes(start):
    """Peers of a rank that raised see their collective fail, and may say so first."""
    controller = start(2)
    peer_failed = threading.Event()
    runner = runners(controller)[1]

    def late(runner):
        assert peer_failed.wait(PATIENCE_S)
        raise ValueError("the reason")

    def broken(runner):
        peer_failed.set()
        raise ConnectionError("closed by peer")

    script(controller, r0=broken, r1=late)
    with pytest.raises(ValueError, match="the reason"):
        run(controller, "work")
    assert runner.calls == 1


def test_live_workers_that_cannot_communicate_raise_an_error(start):
    controller = start(2)
    script(controller, r0=raising(ConnectionError("a")), r1=raising(ConnectionError("b")))
    with pytest.raises(CollectiveError, match="All workers are alive"):
        run(controller, "work")
    script(controller, r0=lambda r: 1, r1=lambda r: 2)
    assert len(run(controller, "work")) == 2


# ---- losses


def cut_off(controller, rank):
    """A script in which the worker does not reach the driver, once, and stops by itself."""
    worker = controller.members[rank].worker

    def run(runner):
        if runner.calls == 1:
            worker._stop_alone()
            raise StoppedError
        return "done"

    return run


def test_a_call_is_repeated_after_workers_were_cut_off_from_the_driver(start):
    controller = start(2)
    script(controller, r0=cut_off(controller, 0), r1=FakeRunner.wait_for_peers)
    runners(controller)[1].script = lambda r: r.calls > 1 or r.wait_for_peers()
    assert [outcome.value() for outcome in run(controller, "work", max_losses=1)] == ["done", True]
    assert kinds(controller) == ["started", "resumed"]
    script(controller, r0=cut_off(controller, 0), r1=lambda r: 1)
    runners(controller)[0].calls = 0
    with pytest.raises(CollectiveError):  # a call that must not be made twice
        run(controller, "work")


def test_survivors_continue_after_a_loss(start):
    controller = start()
    lost = controller.members[1]
    survivors = [controller.members[0], controller.members[2]]
    script(controller, r1=dying(controller, 1))

    def work(runner):
        return runner.wait_for_peers() if len(runner.contexts) == 1 else runner.contexts[-1]

    script(controller, r0=work, r2=work)
    outcomes = run(controller, "work", max_losses=1)
    contexts = [outcome.value() for outcome in outcomes]
    assert controller.members == survivors
    assert [(c.world_rank, c.world_size) for c in contexts] == [(0, 2), (1, 2)]
    before = controller.events[0].generation
    assert [c.generation for c in contexts] == [before + 1] * 2
    assert [c.local_rank for c in contexts] == [0, 0]
    assert run.call.num_losses == 1
    assert lost.killed
    assert not any(member.killed for member in survivors)
    assert kinds(controller) == ["started", "lost", "resumed"]
    event = controller.events[1]
    assert (event.ranks, event.generation) == ((1,), before)
    assert "OOM" in event.cause
    run(controller, "work")
    assert run.call.num_losses == 0


def test_more_losses_than_allowed_end_the_call_with_every_cause(start):
    controller = start()
    script(
        controller,
        r0=FakeRunner.wait_for_peers,
        r1=dying(controller, 1),
        r2=FakeRunner.wait_for_peers,
    )
    with pytest.raises(WorkerLostError, match="Training run failed") as caught:
        run(controller, "work", max_losses=0)
    error = caught.value
    assert (error.rank, error.node_id) == (1, "node0")
    assert "1 loss in one call, which allows 0" in str(error)
    assert "OOM" in str(error)
    assert isinstance(error.__cause__, LostError)


def test_fewer_survivors_than_min_workers_end_the_call(start):
    controller = start(2, min_workers=2)
    script(controller, r0=FakeRunner.wait_for_peers, r1=dying(controller, 1))
    with pytest.raises(WorkerLostError, match=r"1 left, min_workers=2, and grow=False") as caught:
        run(controller, "work", max_losses=3)
    assert "OOM" in str(caught.value)
    script(controller, r0=lambda runner: "done")
    # what reads the state is allowed with fewer
    assert [o.value() for o in run(controller, "work", any_size=True)] == ["done"]


def test_forming_a_group_is_retried(start):
    class LateBackend(FakeBackend):
        def prepare(self, addresses):
            self.broken = 1 < self.num_prepared + 1 < 4
            return super().prepare(addresses)

    backend = LateBackend()
    controller = start(2, backend=backend)
    script(controller, r0=raising(ValueError("bad batch")), r1=FakeRunner.wait_for_peers)
    with pytest.raises(ValueError, match="bad batch"):
        run(controller, "work")
    script(controller, r0=lambda r: "done", r1=lambda r: "done")
    assert len(run(controller, "work")) == 2
    assert backend.num_prepared == 4


def test_a_restart_tears_down_the_worker_in_the_drivers_process(start):
    """Its process lives on: a process group that stays there is in the way of the next one."""
    controller = start(2, in_place=False)
    local = controller.members[0]
    local.remote = False
    runner = local.worker.runner
    script(controller, r0=FakeRunner.wait_for_peers, r1=dying(controller, 1))
    run(controller, "work", max_losses=1)
    assert local not in controller.members
    assert kinds(controller) == ["started", "lost", "restarted"]
    assert getattr(runner, "torn_down", False)


def test_a_second_call_at_the_same_time_is_an_error(start):
    controller = start(1)
    inside, outside = threading.Event(), threading.Event()

    def work(runner):
        inside.set()
        assert outside.wait(PATIENCE_S)
        return "done"

    script(controller, r0=work)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, controller, "work")
        assert inside.wait(PATIENCE_S)
        under_way = controller._context.call
        with pytest.raises(RuntimeError, match="Another thread is calling"):
            run(controller, "work")
        assert controller._context.call is under_way
        outside.set()
        assert first.result(PATIENCE_S)[0].value() == "done"


# ---- interruption by the user


def test_the_next_call_works_after_ctrl_c(start):
    controller = start(2)
    script(controller, r0=FakeRunner.wait_for_peers, r1=FakeRunner.wait_for_peers)

    def interrupt(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(controller, "work", on_wait=interrupt)
    assert isinstance(controller.state, Broken)
    script(controller, r0=lambda r: 1, r1=lambda r: 2)
    assert [outcome.value() for outcome in run(controller, "work")] == [1, 2]
    assert kinds(controller) == ["started", "resumed"]


def test_on_wait_gets_the_progress_of_the_workers(start):
    controller = start(2)
    told, enough = [], threading.Event()

    def on_wait(progress):
        told.append([p.global_step for p in progress])
        if told[-1] == [3, 3]:
            enough.set()

    def work(runner):
        runner.step = 3
        assert enough.wait(PATIENCE_S)
        return "done"

    script(controller, r0=work, r1=work)
    run(controller, "work", on_wait=on_wait)
    assert told[-1] == [3, 3]


# ---- the start and the end


@pytest.mark.parametrize("error", [ValueError("no data"), SystemExit(1)])
def test_an_error_at_the_start_leaves_no_worker(error):
    def hook():
        raise error

    group, backend = FakeGroup(2), FakeBackend()
    controller = Controller(group, FakeRunner(), backend, hook, PATIENCE_S)
    expected = RemoteError if isinstance(error, SystemExit) else type(error)
    with pytest.raises(expected):
        controller.start()
    assert isinstance(controller.state, Closed)
    assert group.shutdowns == [True]
    assert all(member.killed for member in group.all)
    assert backend.closed


def test_shutdown_is_gentle_unless_the_group_is_broken(start):
    controller = start(2)
    controller.shutdown()
    controller.shutdown()
    assert not any(controller._group.shutdowns)
    assert controller._backend.closed
    with pytest.raises(RuntimeError, match="shut down"):
        run(controller, "work")
    broken = start(2)
    script(broken, r0=raising(ValueError("x")), r1=raising(ValueError("x")))
    with pytest.raises(ValueError, match="x"):
        run(broken, "work")
    broken.shutdown()
    assert broken._group.shutdowns == [True]


def test_drain_of_an_unknown_rank_is_an_error(start):
    controller = start(2)
    with pytest.raises(ValueError, match=r"drain\(rank=2\): the ranks are 0 to 1\."):
        controller.drain(None, 2, None)
    controller.members.clear()
    with pytest.raises(ValueError, match=r"drain\(rank=2\): no worker is left\."):
        controller.drain(None, 2, None)


def test_calls_in_a_fork_of_the_driver_are_an_error(start):
    controller = start(1)
    controller._pid += 1
    with pytest.raises(RuntimeError, match="This process was forked from the process of"):
        run(controller, "work")
    controller._pid -= 1
