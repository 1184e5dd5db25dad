"""Random schedules of lost workers, new workers, and errors, in a simulated cluster.

The simulation itself asserts what must always hold. No worker is a member twice. There are at most
``num_workers`` members. The member with the most committed steps provides the state. Training does
not restart from a snapshot while a worker that has trained is alive. Each call ends.
"""

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from raysgd.errors import WorkerLostError, WorkerTimeoutError
from tests.blackbox.simulation.seam import POINTS, BadBatchError, PartialStateError
from tests.blackbox.simulation.world import TICK_S, World
from tests.conftest import examples

ranks = st.integers(0, 3)
some_ranks = st.sets(ranks, max_size=3)
actions = st.one_of(
    st.tuples(st.just("lose"), ranks, some_ranks, some_ranks),
    st.tuples(st.just("lose_all")),
    st.tuples(st.just("lose_as_all_join"), ranks),
    st.tuples(st.just("error"), ranks),
    st.tuples(st.just("room"), st.integers(0, 5)),
    st.tuples(st.just("deaf"), ranks),
    st.tuples(st.just("lose_replacement")),
    st.tuples(st.just("lose_replacement_as_it_joins")),
    st.tuples(st.just("bad_setup"), st.booleans()),
    st.tuples(st.just("bad_join"), st.booleans()),
)
# times in ticks of the simulation; a training step takes one tick
schedules = st.lists(st.tuples(st.integers(0, 240), actions), min_size=1, max_size=10)
calls = st.lists(
    st.tuples(st.sampled_from([150, 60, 20, 3]), st.sampled_from([9, 4, 2, 1, 0])),
    min_size=1,
    max_size=4,
)


class Run:
    """A run of a trainer with a schedule, and the effects on its workers."""

    def __init__(self, world, num_workers, schedule, **options):
        self.world = world
        self.killed = set()
        self.num_errors = 0
        self.setup_is_bad = self.join_is_bad = False
        world.on_new_worker.append(self._prepare)
        self.driver = world.drive(num_workers, **options)
        for ticks, (name, *arguments) in schedule:
            world.plan(
                ticks * TICK_S, lambda name=name, given=arguments: getattr(self, name)(*given)
            )

    def _prepare(self, member):
        if self.setup_is_bad:
            member.setup_error = ValueError("bad setup")
        if self.join_is_bad and self.world.driver.workers:  # a replacement, not a restart
            member.join_error = ValueError("bad join")

    def member(self, rank):
        members = self.driver.workers
        return members[rank] if rank < len(members) else None

    def replacements(self):
        members = self.driver.workers
        return [w for w in self.world.workers if not w.dead and w not in members and not w.step]

    # ---- what may happen

    def lose(self, rank, ahead, noticing):
        if (member := self.member(rank)) is not None:
            self.killed.add(member)
            self.world.lose(rank, ahead=sorted(ahead), noticing=sorted(noticing))

    def lose_all(self):
        for rank in reversed(range(len(self.driver.workers))):
            self.lose(rank, (), ())

    def lose_as_all_join(self, rank):
        def lose():
            if (member := self.member(rank)) is not None:
                self.killed.add(member)
                member.die("OOM while joining")

        self.world.on_meeting.append(lose)

    def error(self, rank):
        if (member := self.member(rank)) is not None:
            self.num_errors += 1
            member.error = BadBatchError("bad batch")

    def room(self, size):
        self.world.room = size

    def deaf(self, rank):
        if (member := self.member(rank)) is not None:
            self.killed.add(member)  # it is lost at the next interruption
            member.deaf = True

    def lose_replacement(self):
        for replacement in self.replacements():
            replacement.die("OOM before it joined")

    def lose_replacement_as_it_joins(self):
        self.world.on_meeting.append(self.lose_replacement)

    def bad_setup(self, on):
        self.setup_is_bad = on

    def bad_join(self, on):
        self.join_is_bad = on

    def fail(self, among, point, dies):
        """Make workers fail at the same point of their next step."""
        for rank in among:
            if (member := self.member(rank)) is not None:
                member.failure = point, dies
                if dies:
                    self.killed.add(member)
                else:
                    self.num_errors += 1

    def ctrl_c(self):
        self.world.has_ctrl_c = self.is_calling

    # ---- what the trainer does

    is_calling = False

    def call(self, goal, max_retries):
        """Train up to a step and check the result. Return whether the step was reached."""
        driver = self.driver
        seen, is_done = len(driver.events), False
        self.is_calling = True
        try:
            reached = driver.train(goal, max_retries=max_retries)
        except KeyboardInterrupt:
            event("ctrl-c")
        except PartialStateError:
            event("partial state")
            assert all(worker.condition == "damaged" for worker in driver.workers)
        except WorkerLostError as error:
            event("lost")
            self._check_lost(str(error), driver.events[seen:], max_retries)
        except BadBatchError:
            event("user error")
            assert driver.events[-1].kind == "user_error"
            self.num_errors -= 1
            assert self.num_errors >= 0, "one error is raised twice"
        except ValueError as error:
            event(str(error))
            assert not driver.workers, "what others can do without is raised"
        else:
            event("done")
            is_done = True
            assert reached == [goal] * len(reached)
            assert len(reached) == len(driver.workers) >= driver.min_workers
            assert len({worker.generation for worker in driver.workers}) == 1
            assert driver.losses_in_call <= max_retries
            assert all(worker.weights == [goal] * 2 for worker in driver.workers)
        finally:
            self.is_calling = self.world.has_ctrl_c = False
        lost = [e for e in driver.events if e.kind == "lost"]
        assert len(lost) <= len(self.killed), "a worker counts as lost that was not"
        assert all(e.ranks[0] >= 0 for e in lost), "who was never a member is no loss"
        for kind in {e.kind for e in driver.events[seen:]}:
            event(kind)
        return is_done

    def _check_lost(self, message, events, max_retries):
        causes = [e.cause for e in events if e.kind == "lost"]
        assert all(cause in message for cause in causes)
        assert message.count("\nworker ") == len(causes)
        if "max_retries" in message:
            assert self.driver.losses_in_call == max_retries + 1
        else:
            assert self.driver.losses_in_call <= max_retries

    def end(self):
        trained = self.world.trained
        assert trained == list(range(1, len(trained) + 1)), "a step was left out"
        self.driver.shutdown()
        assert all(worker.dead for worker in self.world.workers), "a worker is left behind"
        assert all(not reservation.slots for reservation in self.world.reservations)


# a worker dies while the other is a step ahead, and later the other dies
AHEAD = [(10, ("lose", 0, {1}, set())), (50, ("lose", 1, {0}, {0}))]
# a replacement dies while it joins, and so does a member
JOINING = [
    (10, ("lose", 1, set(), set())),
    (12, ("lose_replacement_as_it_joins",)),
    (12, ("lose_as_all_join", 0)),
]
# no room for a while, and replacements whose setup fails
NO_ROOM = [
    (6, ("room", 1)),
    (8, ("lose_all",)),
    (60, ("bad_setup", True)),
    (80, ("room", 5)),
    (180, ("bad_setup", False)),
]


@examples(50)
@given(
    num_workers=st.integers(2, 4),
    min_workers=st.sampled_from([1, 1, 2, 3]),
    room=st.sampled_from([4, 4, 2, 1]),
    schedule=schedules,
    calls=calls,
    replace_workers=st.sampled_from([True, True, True, False]),
    cooldown=st.sampled_from([0.0, 1.0, 10.0]),
    snapshot_every=st.sampled_from(["epoch", "epoch", None]),
    can_join=st.sampled_from([True, True, False]),
    setup_s=st.sampled_from([0.1, 1.0]),
)
@example(2, 1, 2, AHEAD, [(100, 4)], True, 0.0, "epoch", True, 0.1)
@example(3, 2, 3, JOINING, [(60, 2), (60, 2)], True, 0.0, "epoch", True, 0.1)
@example(3, 2, 3, NO_ROOM, [(60, 1), (60, 3)], True, 1.0, "epoch", True, 0.1)
def test_whatever_happens_to_workers_steps_are_kept_and_calls_end(
    num_workers,
    min_workers,
    room,
    schedule,
    calls,
    replace_workers,
    cooldown,
    snapshot_every,
    can_join,
    setup_s,
):
    min_workers = min(min_workers, num_workers)
    world = World(room=max(room, min_workers))
    world.on_new_worker.append(lambda member: setattr(member, "setup_s", setup_s))
    run = Run(
        world,
        num_workers,
        schedule,
        min_workers=min_workers,
        replace_workers=replace_workers,
        resize_cooldown_s=cooldown,
        snapshot_every=snapshot_every,
        can_join=can_join,
        max_start_attempts=4,
    )
    goal = 0
    for steps, max_retries in calls:
        goal = max(goal, world.furthest) + steps
        run.call(goal, max_retries)
    run.end()


@given(
    num_workers=st.integers(2, 4),
    present=st.integers(1, 3),
    rooms=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 6)), min_size=1, max_size=5),
    calls=st.lists(st.sampled_from([80, 30, 10, 1]), min_size=1, max_size=4),
    cooldown=st.sampled_from([0.0, 0.5, 3.0]),
    setup_s=st.sampled_from([0.1, 1.0]),
)
def test_changes_of_room_alone_cost_no_retry_and_redo_no_step(
    num_workers, present, rooms, calls, cooldown, setup_s
):
    world = World(room=min(present, num_workers))
    world.on_new_worker.append(lambda member: setattr(member, "setup_s", setup_s))
    schedule = [(ticks, ("room", size)) for ticks, size in rooms]
    run = Run(world, num_workers, schedule, resize_cooldown_s=cooldown)
    first = list(run.driver.workers)
    goal = 0
    for steps in calls:
        goal += steps
        run.call(goal, 0)
        assert run.driver.step == goal
    assert {e.kind for e in run.driver.events} <= {"started", "grown"}
    assert run.driver.workers[0] is first[0]
    assert set(first) <= set(run.driver.workers)
    assert all(member.interruptions == 0 for member in first)
    assert all(member.num_joins >= 1 for member in run.driver.workers)
    run.end()


@examples(30)
@given(
    ticks=st.integers(0, 300),
    schedule=schedules,
    can_join=st.booleans(),
    rejoins=st.booleans(),
    setup_s=st.sampled_from([0.1, 1.0]),
)
# between two attempts of a restart, before there is room
@example(50, [(8, ("room", 0)), (10, ("lose_all",)), (52, ("room", 3))], True, True, 0.1)
@example(60, [(8, ("room", 0)), (10, ("lose_all",)), (62, ("room", 3))], True, True, 0.1)
# while a replacement worker starts
@example(14, [(10, ("lose", 0, set(), set()))], True, True, 1.0)
def test_a_shutdown_is_final_whatever_is_under_way(ticks, schedule, can_join, rejoins, setup_s):
    """The shutdown comes from another thread, a signal handler, or a callback."""
    world = World(room=3)
    world.on_new_worker.append(lambda member: setattr(member, "setup_s", setup_s))
    run = Run(world, 3, schedule, can_join=can_join, rejoins=rejoins, max_start_attempts=4)
    ended_at, error = [], None

    def shut_down():
        run.driver.shutdown()
        ended_at.append((world.now, len(world.workers)))

    world.plan(ticks * TICK_S, shut_down)
    try:
        run.driver.train(200, max_retries=10)
    except (RuntimeError, WorkerTimeoutError, BadBatchError, ValueError) as raised:
        error = raised
    event(type(error).__name__)
    if ended_at:
        assert "shut down" in str(error), "a call that was shut down ends by an error of its own"
        assert world.now - ended_at[0][0] < 2.0, "a call goes on though it is shut down"
        assert len(world.workers) == ended_at[0][1], "a worker is started after the shutdown"
    else:
        run.driver.shutdown()
    for _ in range(200):  # later events change nothing
        world.tick()
    assert all(worker.dead for worker in world.workers), "a worker is left behind"
    assert all(not reservation.slots for reservation in world.reservations)
    with pytest.raises(RuntimeError, match="shut down"):
        run.driver.train(300)


@examples(30)
@given(
    num_workers=st.integers(2, 4),
    kills=st.lists(st.tuples(st.integers(10, 40), st.integers(0, 7)), max_size=12),
    is_function=st.booleans(),
    start_s=st.sampled_from([0.1, 0.3]),
    setup_s=st.sampled_from([0.1, 0.4]),
)
def test_killing_workers_makes_no_other_worker_restart_or_wait(
    num_workers, kills, is_function, start_s, setup_s
):
    world = World(room=num_workers)
    world.on_new_worker.append(lambda member: vars(member).update(start_s=start_s, setup_s=setup_s))
    killed, at = [], 0

    def kill(number):
        alive = [worker for worker in world.workers if not worker.dead]
        killed.append(alive[number % len(alive)])
        killed[-1].die("killed")

    for gap, number in kills:
        at += gap
        world.plan(at * TICK_S, lambda number=number: kill(number))
    driver = world.drive(num_workers, can_join=not is_function)
    assert driver.train(300, max_retries=len(kills)) == [300] * len(driver.workers)
    kinds = [event.kind for event in driver.events]
    assert "waiting" not in kinds
    lost = kinds.count("lost")
    # for a training function, each loss of a member restarts all workers
    assert len(world.workers) <= num_workers * (1 + lost * is_function) + len(killed)
    assert world.now - 1000.0 < 300 * TICK_S + len(kills) * 3.0 + 2.0
    assert world.trained == list(range(1, 301))
    driver.shutdown()
    assert all(worker.dead for worker in world.workers), "a worker is left behind"


failures = st.one_of(
    st.tuples(
        st.just("fail"),
        st.sets(ranks, min_size=1, max_size=4),
        st.sampled_from(POINTS),
        st.booleans(),
    ),
    st.tuples(st.just("ctrl_c")),
)


@examples(50)
@given(
    num_workers=st.integers(1, 4),
    schedule=st.lists(st.tuples(st.integers(1, 200), failures), min_size=1, max_size=6),
    calls=st.lists(st.sampled_from([60, 20, 3]), min_size=1, max_size=4),
    snapshot_every=st.sampled_from(["epoch", "epoch", None]),
    can_join=st.booleans(),
)
@example(2, [(60, ("fail", {0, 1}, "update", False))], [99, 20], "epoch", True)
@example(2, [(1, ("fail", {0, 1}, "update", False))], [60, 60], None, True)
def test_a_step_that_fails_anywhere_is_kept_or_redone_by_all_workers(
    num_workers, schedule, calls, snapshot_every, can_join
):
    world = World(room=num_workers)
    run = Run(world, num_workers, schedule, snapshot_every=snapshot_every, can_join=can_join)
    for steps in calls:
        run.call(world.furthest + steps, max_retries=len(schedule))
    results = [run.call(world.furthest + 20, len(schedule)) for _ in range(len(schedule) + 2)]
    if not any(results):  # the calls fail because the state is lost
        assert snapshot_every is None or not run.driver.has_snapshot
        assert all(worker.condition == "damaged" for worker in run.driver.workers)
    run.end()


def test_a_call_counts_from_the_last_step_after_the_loss_of_all_workers():
    world = World(room=2)
    driver = world.drive(2)
    driver.train(13)
    for rank in (1, 0):
        world.lose(rank)
    with pytest.raises(WorkerLostError):
        driver.train(13)
    assert driver.train_further(5) == [18, 18]
    assert world.trained == list(range(1, 19))
    driver.shutdown()
