"""Reading a run's folder, and the share of its time that went into training."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.callbacks.run_log import RunLog, goodput


def run(time=100.0, step=0):
    return {"kind": "run", "time": time, "version": "1", "global_step": step, "num_workers": 2}


def call(end, seconds, step, kind="train", epoch=1, **metrics):
    return {
        "kind": kind,
        "time": end,
        "seconds": seconds,
        "epoch": epoch,
        "global_step": step,
        "num_workers": 2,
        "metrics": metrics,
    }


def event(kind, time, step=0, seconds=0.0, ranks=(0,), num_workers=2):
    return {
        "kind": kind,
        "time": time,
        "step": step,
        "seconds": seconds,
        "ranks": list(ranks),
        "cause": "",
        "num_workers": num_workers,
    }


def write(folder, records, events=()):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))


def test_a_log_is_read_into_runs_calls_and_events(tmp_path):
    write(
        tmp_path,
        [run(), call(120, 10, 5), call(125, 5, 5, kind="validate")],
        [event("started", 101)],
    )
    log = RunLog.read(tmp_path)
    assert len(log.runs) == 1
    assert [c["kind"] for c in log.calls] == ["train", "validate"]
    assert [c["time"] for c in log.of("validate")] == [125]
    assert (log.began, log.ended) == (100, 125)
    assert log.events[0]["kind"] == "started"


def test_incomplete_lines_are_skipped(tmp_path, caplog):
    """Of a driver that was killed, and of one that went on after it."""
    write(tmp_path, [run(), call(120, 10, 5)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra\n' + json.dumps(run(130)) + '\n{"kind"')
    log = RunLog.read(tmp_path)
    assert (len(log.runs), len(log.calls)) == (2, 1)
    assert "Skipped line 3 of" in caplog.text


@pytest.mark.parametrize("line", ["[1]", '{"epoch": 1}'])
def test_a_line_of_another_program_is_an_error(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(line)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1: the record has no"):
        RunLog.read(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no metrics\.jsonl.*logdir="):
        RunLog.read(tmp_path)


def test_stops_do_not_count_as_goodput():
    events = [
        event("started", 101),
        event("lost", 112, 2),
        event("lost", 112.5, 2),
        event("resumed", 113, 2, seconds=0.4),
        event("grown", 116, 3, seconds=0.5),
        event("user_error", 130, 5),  # between two calls: nothing stands still in one
        event("resumed", 131, 5, seconds=0.1),
    ]
    log = RunLog([run(100)], [call(120, 10, 5), call(150, 15, 10)], events)
    # 25 s in calls, less 112 to 113, less 115.5 to 116
    assert goodput(log) == pytest.approx((25 - 1 - 0.5) / 50)


def test_steps_repeated_after_a_restart_do_not_count_as_goodput():
    events = [event("lost", 110, step=6), event("restarted", 114, step=2, seconds=4)]
    log = RunLog([run(100)], [call(120, 20, 12)], events)
    # 16 s of training for 12 steps and 4 that were done twice
    assert goodput(log) == pytest.approx(16 * 12 / 16 / 20)


def test_stop_ends_with_its_run():
    """The next one on the folder stands still for its own losses alone."""
    events = [
        event("started", 101),
        event("user_error", 115, 3),
        event("started", 205),
        event("grown", 230, 8, seconds=0.5),
    ]
    log = RunLog([run(100), run(200, 3)], [call(112, 10, 3), call(250, 40, 20)], events)
    assert goodput(log) == pytest.approx((10 + 40 - 0.5) / 150)


def test_calls_that_a_later_run_repeated_are_not_kept():
    resumed = run(200, 5)
    calls = [call(110, 5, 5), call(120, 5, 10), call(220, 5, 10), call(230, 5, 15)]
    log = RunLog([run(100), resumed], calls, [])
    assert [c["time"] for c in log.kept("train")] == [110, 220, 230]


def test_steps_repeated_by_a_resumed_run_do_not_count_as_goodput():
    resumed = run(200, 4)
    log = RunLog([run(100), resumed], [call(120, 20, 10), call(230, 30, 16)], [])
    # 50 s of training for 16 steps and 6 that were done twice
    assert goodput(log) == pytest.approx(50 * 16 / 22 / 130)


@given(st.data())
def test_goodput_is_a_share(data):
    times = st.floats(100, 200)
    kinds = st.sampled_from(
        ["lost", "hung", "user_error", "resumed", "grown", "moved", "restarted"]
    )
    calls = [
        call(data.draw(times), data.draw(st.floats(0, 50)), data.draw(st.integers(0, 9)))
        for _ in range(data.draw(st.integers(0, 4)))
    ]
    events = [
        event(data.draw(kinds), time, data.draw(st.integers(0, 9)), data.draw(st.floats(0, 9)))
        for time in sorted(data.draw(st.lists(times, max_size=6)))
    ]
    assert 0.0 <= goodput(RunLog([run()], calls, events)) <= 1.0
