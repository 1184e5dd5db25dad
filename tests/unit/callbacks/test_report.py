"""The page about a run."""

import html
import re
import shutil
import subprocess
import sys

import pytest

from raysgd import TorchTrainer
from raysgd.callbacks.report import make_report
from raysgd.callbacks.run_log import RunLog, goodput, time_spent
from tests.operators import Classifier
from tests.unit.callbacks.test_run_log import call, event, run, write

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


@pytest.fixture
def folder(tmp_path):
    records = [run(100)]
    for epoch in range(1, 4):
        records.append(
            call(
                100 + 20 * epoch,
                15,
                10 * epoch,
                epoch=epoch,
                train_loss=1 / epoch,
                num_samples=640,
                **{"<script>x": 1.0},
            )
        )
        records.append(
            call(
                102 + 20 * epoch,
                2,
                10 * epoch,
                kind="validate",
                epoch=epoch,
                val_loss=0.5 / epoch if epoch > 1 else "nan",
                val_accuracy=0.3 * epoch,
                note="<b>",
            )
        )
    events = [
        event("started", 101, ranks=(0, 1)),
        {**event("lost", 130, 14, num_workers=1), "cause": "<i>OOM</i>"},
        event("resumed", 130.5, 14, 0.4, num_workers=1),
        event("grown", 133, 16, 0.1, num_workers=2),
        {**event("rebalanced", 134, 17, num_workers=2), "shares": [1.5, 0.5]},
    ]
    write(tmp_path, records, events)
    return tmp_path


def tile(text, key):
    return html.unescape(re.search(rf'<b id="{re.escape(key)}">(.*?)</b>', text)[1])


def test_the_page_needs_nothing_from_elsewhere(folder):
    text = make_report(folder).read_text()
    outside_scripts = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r'(src|href)="(?!data:)', outside_scripts)
    assert "<script>x" not in text
    assert "<i>OOM" not in outside_scripts


def check_numbers(text, folder):
    log = RunLog.read(folder)
    assert tile(text, "goodput") == f"{100 * goodput(log):.1f} %"
    assert tile(text, "lost-workers") == "1"
    assert tile(text, "duration") == "0:01:02"
    assert (tile(text, "epoch"), tile(text, "global-step")) == ("3", "30")
    assert tile(text, "train_loss") == "0.3333"
    assert tile(text, "shares") == "1.50, 0.50"
    assert tile(text, "val_accuracy") == "0.9"


def test_report_has_config_versions_and_best_values(tmp_path):
    told = {
        "operator": "Digits",
        "device": "CPU",
        "versions": {"torch": "2.9"},
        "config": {"lr": 0.125},
    }
    losses = (0.5, 0.1234567, 0.25)
    validations = [
        call(110 + n, 1, 10 * n, kind="validate", epoch=n + 1, val_loss=loss)
        for n, loss in enumerate(losses)
    ]
    write(tmp_path, [{**run(), **told}, call(109, 5, 10, train_loss=1.25), *validations])
    text = make_report(tmp_path).read_text()
    assert f"<title>Digits: {tmp_path.name}</title>" in text
    assert "2 workers, CPU · raysgd 1 · torch 2.9" in text
    assert "<td>lr</td><td>0.125</td>" in text
    assert "validation loss, last; best 0.1235, epoch 2" in text
    assert tile(text, "train_loss") == "1.25"
    assert (tmp_path / "plotly.min.js").stat().st_size > 1e6


def test_report_with_low_goodput_shows_where_the_time_went(folder):
    spent = time_spent(RunLog.read(folder))
    log = RunLog.read(folder)
    assert sum(spent.values()) == pytest.approx(log.ended - log.began)
    assert spent["training"] == pytest.approx(goodput(log) * (log.ended - log.began))
    assert spent["validation"] == 6
    assert spent["starting"] == 5
    assert spent["stopped"] == pytest.approx(0.6)
    assert "<td>validation</td><td>6.0 s</td>" in make_report(folder).read_text()


def test_a_run_without_a_finished_call_has_a_page_too(tmp_path):
    write(tmp_path, [run()])
    assert tile(make_report(tmp_path).read_text(), "lost-workers") == "0"


def test_the_entries_of_a_vector_share_a_drawing(tmp_path):
    values = {f"val_f1_{n}": n / 10 for n in range(10)}
    values |= {"profile/mean_fwd_s": 1.0, "profile/mean_grad_s": 2.0, "lr-0": 0.1, "lr-1": 0.2}
    write(tmp_path, [run(), call(120, 10, 5, **values)])
    text = make_report(tmp_path).read_text()
    titles = re.findall(r"<section><h2>(.*?)</h2>", text)
    assert titles == ["Where the time went", "f1", "profile", "lr"]


@pytest.mark.parametrize(("value", "low", "high"), [(1.0, 0.95, 1.05), (0.0, -0.05, 0.05)])
def test_a_constant_metric_has_a_narrow_axis(tmp_path, value, low, high):
    calls = [call(110 + n, 1, 10 * n, kind="validate", epoch=n, val_accuracy=value) for n in (1, 2)]
    write(tmp_path, [run(), *calls])
    (axis,) = re.findall(r'"yaxis":\{[^}]*"range":\[(.*?)\]', make_report(tmp_path).read_text())
    assert [float(end) for end in axis.split(",")] == [low, high]


def test_a_page_that_cannot_be_written_leaves_nothing_behind(folder):
    (folder / "report.html").mkdir()
    before = sorted(folder.iterdir())
    with pytest.raises(OSError, match="directory"):
        make_report(folder)
    assert sorted(folder.iterdir()) == before


def test_a_run_with_a_folder_ends_with_a_page_about_it(tmp_path):
    with TorchTrainer(
        training_operator_cls=Classifier, use_local=True, use_gpu=False, logdir=tmp_path
    ) as trainer:
        trainer.train()
        metrics = trainer.validate()
    assert tile((tmp_path / "report.html").read_text(), "val_loss") == f"{metrics['val_loss']:.4g}"


def test_run_without_plotly_succeeds_with_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with TorchTrainer(
        training_operator_cls=Classifier, use_local=True, use_gpu=False, logdir=tmp_path
    ) as trainer:
        trainer.fit(1)
    assert not (tmp_path / "report.html").exists()
    assert caplog.text.count('pip install "raysgd[callbacks]"') == 1
    assert f"raysgd report {tmp_path}" in caplog.text


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
def test_a_browser_shows_it_without_a_network_or_an_error(folder, tmp_path_factory):
    path = make_report(folder)
    profile = tmp_path_factory.mktemp("browser")
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", f"file://{path}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    check_numbers(done.stdout, folder)
    drawn = re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)
    # loss, accuracy, the odd metric, speed, workers
    assert drawn.count('class="main-svg"') >= 5
    assert drawn.count('class="trace scatter') >= 6
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
