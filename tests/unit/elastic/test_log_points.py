"""Points of ``fit(log_every=...)`` from workers that join, leave, and are lost."""

from types import SimpleNamespace

import pytest

from raysgd._internal.step_timing import PhaseTotals
from raysgd._internal.worker_status import LogPoint, Measurements, WorkerStatus
from raysgd.elastic.call import LogPointCollector


class Worker:
    """A worker that repeats its points in each status."""

    def __init__(self):
        self.points = []


def part(call, step, num_samples, reaches_log_step=True):
    return LogPoint(
        call_number=call,
        global_step=step,
        num_completed_epochs=0,
        in_epoch=True,
        metrics={"num_samples": num_samples},
        timing=PhaseTotals(),
        seconds=0.1,
        reaches_log_step=reaches_log_step,
    )


@pytest.fixture
def run():
    """A call with the workers ``a`` and ``b``. ``shown`` has the points and their samples."""
    shown, a, b = [], Worker(), Worker()

    def show(parts):
        shown.append((parts[-1][1].global_step, [p.metrics["num_samples"] for _, p in parts]))

    points = LogPointCollector(7, show, acknowledged_step=-1)
    points.begin(0, [a, b])

    def take(*workers, members=(a, b)):
        measured = {each: Measurements(log_points=each.points) for each in workers}
        points.add({each: WorkerStatus(measured=measured[each]) for each in workers}, members)

    return SimpleNamespace(points=points, a=a, b=b, shown=shown, take=take)


def test_a_point_waits_for_all_workers_and_counts_once(run):
    run.a.points, run.b.points = [part(7, 10, 1), part(7, 20, 2)], [part(7, 10, 3)]
    run.take(run.a)
    assert (run.shown, run.points.acknowledged_step) == ([], -1)
    run.take(run.a, run.b)
    assert run.shown == [(10, [1, 3])]
    assert run.points.acknowledged_step == 10
    run.b.points = [part(6, 15, 9), part(7, 20, 4)]  # one of an earlier call
    run.take(run.a, run.b)
    assert run.shown[1:] == [(20, [2, 4])]


def test_a_restart_repeats_no_point_that_was_shown(run):
    run.a.points, run.b.points = [part(7, 10, 1), part(7, 20, 2)], [part(7, 10, 3)]
    run.take(run.a, run.b)
    c, d = Worker(), Worker()
    run.points.begin(5, [c, d])  # both workers are lost
    c.points = d.points = [part(7, 10, 5), part(7, 20, 6)]
    run.take(c, d, members=(c, d))
    assert run.shown == [(10, [1, 3]), (20, [6, 6])]


def test_what_a_leaving_worker_has_measured_counts_in_the_next_point(run):
    run.a.points, run.b.points = (
        [part(7, 10, 1)],
        [part(7, 10, 2), part(7, 13, 3, reaches_log_step=False)],
    )
    run.take(run.b, members=())
    joined = Worker()
    run.take(run.a, members=(run.a,))
    run.points.begin(13, [run.a, joined])
    run.a.points, joined.points = [part(7, 20, 4)], [part(7, 20, 5)]
    run.take(run.a, members=(run.a, joined))
    assert run.shown == [(10, [2, 1])]
    run.take(joined, members=(run.a, joined))
    assert run.shown[1:] == [(20, [3, 4, 5])]


def test_a_lost_worker_delays_no_point_and_its_repeated_step_is_dropped(run):
    run.a.points, run.b.points = [part(7, 10, 1)], [part(7, 20, 9)]
    run.take(run.a, run.b)
    run.points.begin(19, [run.a])  # step 20 of the lost worker did not count
    run.a.points = [part(7, 20, 2)]
    run.take(run.a, members=(run.a,))
    assert run.shown == [(10, [1]), (20, [2])]
