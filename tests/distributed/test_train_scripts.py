"""Scripts for other libraries give the same weights after a failure, and under torchrun."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raysgd import ElasticConfig
from raysgd.train import Trainer
from raysgd.train.callbacks import TrainingCallback
from tests.conftest import IN_SOAK
from tests.distributed import framework_scripts
from tests.distributed.framework_scripts import FAULT_EPOCH, NUM_EPOCHS, SCRIPTS, fail, kill_once

MISSING = {
    name
    for name in ("accelerate", "lightning", "transformers")
    if not importlib.util.find_spec(name)
}
if "accelerate" in MISSING:
    MISSING.add("transformers")  # its Trainer needs Accelerate


class Reports(TrainingCallback):
    def __init__(self):
        self.results = []

    def handle_result(self, results, **info):
        self.results.append(results)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The result of each script on two processes of torchrun."""
    folder = tmp_path_factory.mktemp("torchrun")
    names = sorted(SCRIPTS.keys() - MISSING)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {
        "ACCELERATE_USE_CPU": "true",
        "PL_TRAINER_ACCELERATOR": "cpu",
        "PL_TRAINER_DEVICES": "2",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, *launch, framework_scripts.__file__, str(folder), *names],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


@pytest.fixture(scope="module")
def trainer(module_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    elastic = ElasticConfig(initial_s=0.1)
    trainer = Trainer("torch", num_workers=2, logdir=folder, max_retries=1, elastic=elastic)
    trainer.start()
    yield trainer
    trainer.shutdown()


@pytest.fixture(params=sorted(SCRIPTS))
def name(request):
    if request.param in MISSING:
        pytest.skip(f"{request.param} is not installed, or Accelerate is not")
    return request.param


@pytest.mark.slow("two workers import Lightning and Transformers")
def test_a_resumed_script_ends_with_the_same_weights(name, trainer, tmp_path):
    script, reports = functools.partial(SCRIPTS[name], str(tmp_path)), Reports()
    (expected, *whole), other = trainer.run(script)
    assert whole == [0, 2]
    assert other == (expected, *whole)
    with pytest.raises(KeyError, match="in the middle"):
        trainer.run(functools.partial(script, fail))
    resumed = trainer.run(script, checkpoint=trainer.latest_checkpoint, callbacks=[reports])
    assert resumed == [(expected, FAULT_EPOCH, 2)] * 2
    assert len(reports.results) == NUM_EPOCHS - FAULT_EPOCH
    assert all("loss" in metrics and "epoch" in metrics for metrics in reports.results[-1])


@pytest.mark.skipif(not IN_SOAK, reason="many processes import Transformers and Lightning")
def test_a_killed_worker_does_not_change_the_result(name, expected, trainer, tmp_path):
    mark = tmp_path / "killed"
    fault = functools.partial(kill_once, str(mark))
    first, second = trainer.run(functools.partial(SCRIPTS[name], str(tmp_path), fault))
    assert mark.exists()
    assert expected[name][1:] == [0, 2]
    assert [first[1:], second[1:]] == [(FAULT_EPOCH, 2), (FAULT_EPOCH, 2)]
    assert first[0] == second[0]
    assert first[0] == [pytest.approx(expected[name][0][0], rel=1e-6)]
    kinds = [event.kind for event in trainer.events]
    assert kinds[-2:] == ["lost", "restarted"]
