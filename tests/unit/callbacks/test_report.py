"""The HTML report of a run."""

import html
import json
import re
import shutil
import subprocess

import pytest

from raysgd._internal.step_timing import PHASES
from raysgd.callbacks.report import RunLog, make_report

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=10000",
]


def run(time=100.0, step=0):
    return {"kind": "run", "time": time, "global_step": step, "num_workers": 2}


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


def event(kind, time, step=0, seconds=0.0, ranks=(0,), num_workers=2, cause="", shares=()):
    return {
        "shares": list(shares),
        "kind": kind,
        "time": time,
        "step": step,
        "seconds": seconds,
        "ranks": list(ranks),
        "cause": cause,
        "num_workers": num_workers,
    }


def write(folder, records, events=()):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))


@pytest.fixture
def folder(tmp_path):
    records = [run(100)]
    for epoch in range(1, 4):
        trained = {"train_loss": 1 / epoch, "num_samples": 640, "<script>x": 1.0}
        trained["lr"] = 0.003 + epoch % 2 * 1e-18
        val_loss = 0.5 / epoch if epoch > 1 else "nan"
        measured = {"val_loss": val_loss, "val_accuracy": 0.3 * epoch, "note": "<b>"}
        end, step = 100 + 20 * epoch, 10 * epoch
        records.append(call(end, 15, step, "train", epoch, **trained))
        records.append(call(end + 2, 2, step, "validate", epoch, **measured))
    events = [
        event("started", 100, ranks=(0, 1)),
        event("lost", 130, 14, num_workers=1, cause="<i>OOM</i>"),
        event("grown", 133, 16, 0.1, num_workers=2),
        event("rebalanced", 134, 17, shares=(1.5, 0.5)),
        event("started", 144),
    ]
    write(tmp_path, records, events)
    return tmp_path


def charts(text):
    """Return the data of each chart by its title."""
    found = re.findall(r'<h2>([^<]*)</h2><figure data-chart="(.*?)"', text)
    return {title: json.loads(html.unescape(data)) for title, data in found}


def figure(text, name):
    return html.unescape(re.search(rf"<td>{name}</td><td>(.*?)</td>", text)[1])


def test_the_page_loads_nothing_and_escapes_its_data(folder):
    text = make_report(folder).read_text()
    outside_scripts = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r'(src|href)="(?!data:)', outside_scripts)
    assert "<script>x" not in text
    assert "<i>OOM" not in outside_scripts


def check_numbers(text):
    assert figure(text, "lost workers") == "1"
    assert figure(text, "duration") == "0:01:02"
    assert (figure(text, "epochs"), figure(text, "steps")) == ("3", "30")
    assert figure(text, "last train_loss") == "0.3333"
    assert figure(text, "shares of the workers") == "1.5/0.5"
    assert figure(text, "goodput") == f"{100 * 45 / 60:.1f} %", "45 s in calls"
    assert figure(text, "last val_accuracy") == "0.9"


def test_report_has_config_versions_and_best_values(tmp_path):
    told = {
        "operator": "Digits",
        "device": "CPU",
        "versions": {"raysgd": "1", "torch": "2.9"},
        "config": {"lr": 0.125},
    }
    losses = (0.5, 0.1234567, "nan")
    validations = [
        call(110 + n, 1, 10 * n, kind="validate", epoch=n + 1, val_loss=loss)
        for n, loss in enumerate(losses)
    ]
    runs = [{**run(), **told}, {**run(105), **told, "num_workers": 1}]
    write(tmp_path, [*runs, call(109, 5, 10, train_loss=1.25), *validations])
    text = make_report(tmp_path).read_text()
    assert f"<title>Digits: {tmp_path.name}</title>" in text
    assert "raysgd 1, torch 2.9" in text
    assert "<td>workers</td><td>2</td><td>at the start, with CPU</td>" in text
    assert "<td>lr</td><td>0.125</td>" in text
    assert "<td>last val_loss</td><td>nan</td><td>best 0.1235, in epoch 2</td>" in text
    assert figure(text, "last train_loss") == "1.25"


def test_incomplete_lines_are_skipped(tmp_path, caplog):
    """A driver was killed while it wrote a line, and another one continued the file."""
    write(tmp_path, [run(), call(120, 10, 5)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra\n' + json.dumps(run(130, 5)) + '\n{"kind"')
    log = RunLog(tmp_path)
    assert (len(log.runs), len(log.calls)) == (2, 1)
    assert "Skipped line 3 of" in caplog.text


@pytest.mark.parametrize("line", ["[1]", '{"epoch": 1}', '{"kind": "train", "time": 1}'])
def test_a_log_of_another_program_is_an_error(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(line)
    with pytest.raises(ValueError, match=r"has a log that raysgd did not write.*logdir="):
        make_report(tmp_path)


def test_steps_that_a_later_run_repeated_are_not_kept(tmp_path):
    calls = [call(110, 5, 5), call(120, 5, 10), call(220, 5, 10), call(230, 5, 15)]
    events = [event("started", 99), event("lost", 115, 8, num_workers=1)]
    events += [event("started", 199, 0, num_workers=3), event("lost", 222, 11)]
    write(tmp_path, [run(100), run(200, 5), *calls], events)
    assert [c["time"] for c in RunLog(tmp_path).calls_of("train")] == [110, 220, 230]
    (line,) = charts(make_report(tmp_path).read_text())["Workers"]["lines"]
    assert line == ["workers", [[0, 2], [5, 3], [11, 2], [15, 2]]]
    loaded = [call(240, 5, 12), call(250, 5, 10, kind="validate")]  # a file of step 10, twice
    write(tmp_path, [run(100), run(200, 5), *calls, *loaded, run(260)], events)  # untrained
    assert [c["time"] for c in RunLog(tmp_path).calls] == [110, 220, 250, 240]


def test_only_committed_steps_count_as_goodput(tmp_path):
    def trained(end, seconds, step, step_s):
        speed = {f"{phase}_s": [0.0, 0.0] for phase in PHASES}
        speed |= {"forward_s": [step_s / 2] * 2, "wait_s": [0.0, step_s], "save_s": [9.0, 9.0]}
        return {**call(end, seconds, step), "speed": speed}

    events = [
        event("started", 100),
        event("lost", 110, step=4),
        event("restarted", 114, step=2, seconds=4),
        event("user_error", 130, 10),
        event("started", 205),
    ]
    calls = [trained(120, 20, 10, 1.0), trained(250, 40, 16, 2.0)]
    write(tmp_path, [run(100), calls[0], run(206, 10), calls[1]], events)
    log = RunLog(tmp_path)
    assert log.interruptions == [(10, 75)]
    assert log.goodput() == pytest.approx((10 * 1 + 6 * 2) / (150 - 75))
    write(tmp_path, [run(100), calls[0], run(200, 4), calls[1]], events[:1])
    assert RunLog(tmp_path).goodput() == pytest.approx(16 * 2 / 150), "steps 5 to 10 are repeated"


def test_a_run_without_a_finished_call_has_a_page_too(tmp_path):
    write(tmp_path, [run()])
    assert figure(make_report(tmp_path).read_text(), "lost workers") == "0"


def test_the_entries_of_a_vector_share_a_drawing(tmp_path):
    values = {f"val_f1_{n}": n / 10 for n in range(10)}
    values |= {"profile/mean_fwd_s": 1.0, "profile/mean_grad_s": 2.0, "lr-0": 0.1, "lr-1": 0.2}
    write(tmp_path, [run(), call(120, 10, 5, **values)])
    text = make_report(tmp_path).read_text()
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == ["f1", "profile", "lr"]


def test_phases_of_the_steps_are_stacked_over_time(tmp_path):
    calls = [call(112, 10, 5), call(130, 10, 10)]
    for number, record in enumerate(calls):
        record["speed"] = {f"{name}_s": [0.0, 0.0] for name in PHASES}
        record["speed"]["forward_s"] = [0.002, 0.004 + number]
    write(tmp_path, [run(), *calls, call(140, 5, 12)])
    text = make_report(tmp_path).read_text()
    lines = charts(text)["Milliseconds per step"]["lines"]
    assert lines == [["forward", [[0, 5, 0, 3], [5, 10, 0, 503]]]], "other phases took no time"


def test_a_long_run_has_a_small_page_with_all_extremes(tmp_path):
    calls = [call(n, 1, n, loss=float(n % 7)) for n in range(1, 3001)]
    for record in calls:
        record["speed"] = {"forward_s": [0.002, 0.004]}
    calls[1234]["metrics"]["loss"] = 99.0
    write(tmp_path, [run(0), *calls])
    drawn = charts(make_report(tmp_path).read_text())
    ((_, points),), ((_, parts),) = (
        drawn[title]["lines"] for title in ("Loss", "Milliseconds per step")
    )
    assert len(points) <= 1000
    assert [1235, 99.0] in points
    assert points == sorted(points)
    assert len(parts) == 500
    assert parts[-1] == [2994, 3000, 0, pytest.approx(3)]


def test_charts_share_steps_and_marks_and_have_gaps(tmp_path):
    calls = [call(110, 5, 5, loss=1.0, num_samples=9), call(120, 5, 10, loss=0.5)]
    later = [call(220, 5, 15, loss=0.2)]
    events = [event("started", 100), event("lost", 115, 7, num_workers=1, cause="killed")]
    write(tmp_path, [run(100), *calls, run(203, 10), *later], [*events, event("started", 202)])
    text = make_report(tmp_path).read_text()
    drawn, (axis,) = charts(text), re.findall('data-run="(.*?)"', text)
    assert list(drawn) == ["Loss", "Samples per second", "Workers"]
    marks = [[7, "lost", "lost: killed"], [10, "interrupted", "82 s"]]
    assert json.loads(html.unescape(axis)) == {"steps": [0, 15], "marks": marks}
    assert drawn["Loss"]["lines"] == [["loss", [[5, 1.0], [10, 0.5], [15, 0.2]]]]
    workers = [[0, 2], [7, 1], [10, 2], [15, 2]]
    assert drawn["Workers"]["lines"] == [["workers", workers]]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
def test_a_browser_shows_the_page_without_an_error(folder, tmp_path_factory):
    path = make_report(folder)
    profile = tmp_path_factory.mktemp("browser")
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", f"file://{path}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    check_numbers(done.stdout)
    drawn = re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)
    # loss, accuracy, rate, the metric with a tag in its name, speed, and workers
    assert drawn.count("<svg viewBox") == 6
    assert drawn.count('class="line"') == 7, "two lines of loss"
    assert drawn.count('class="mark"') == 3 * 6
    gaps = re.findall(r'class="line"[^>]* d="(M[^"M]*M[^"]*)"', drawn)
    assert len(gaps) == 6, "between trainers, in all lines but that of the workers"
    assert re.search(r'text-anchor="end">0\.003<', drawn), "a constant has its own axis"
    assert re.findall(r'text-anchor="end">(.*?)<', drawn.partition(">Workers<")[2]) == [*"012"]
    assert len(make_report(folder).read_bytes()) < 50_000
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
