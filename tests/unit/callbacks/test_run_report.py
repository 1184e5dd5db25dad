"""The page that is made when a run ends."""

import sys

from raysgd import TorchTrainer
from raysgd.callbacks.run_log import RunLog, goodput
from tests.operators import Classifier


def train(logdir):
    with TorchTrainer(
        training_operator_cls=Classifier, use_local=True, use_gpu=False, logdir=logdir
    ) as trainer:
        trainer.train()
        return trainer.validate()


def test_a_run_with_a_folder_ends_with_a_page_about_it(tmp_path):
    metrics = train(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert f'<b id="val_loss">{metrics["val_loss"]:.4g}</b>' in text
    assert f'<b id="goodput">{100 * goodput(RunLog.read(tmp_path)):.1f} %</b>' in text


def test_run_without_plotly_succeeds_with_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with TorchTrainer(
        training_operator_cls=Classifier, use_local=True, use_gpu=False, logdir=tmp_path
    ) as trainer:
        trainer.fit(1)
    assert not (tmp_path / "report.html").exists()
    assert caplog.text.count('pip install "raysgd[callbacks]"') == 1
    assert f"raysgd report {tmp_path}" in caplog.text
