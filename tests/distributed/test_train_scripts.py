"""Scripts for other libraries give the same weights after a failure."""

import functools
import importlib.util

import pytest

from raysgd.train import Trainer
from tests.distributed.framework_scripts import FAULT_EPOCH, NUM_EPOCHS, SCRIPTS, fail
from tests.distributed.test_train_fit import Seen

MISSING = {
    name
    for name in ("accelerate", "lightning", "transformers")
    if not importlib.util.find_spec(name)
}
if "accelerate" in MISSING:
    MISSING.add("transformers")  # its Trainer needs Accelerate


@pytest.fixture(scope="module")
def trainer(module_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    trainer = Trainer("torch", num_workers=2, logdir=folder)
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
    script, seen = functools.partial(SCRIPTS[name], str(tmp_path)), Seen()
    (expected, *whole), other = trainer.run(script)
    assert whole == [0, 2]
    assert other == (expected, *whole)
    with pytest.raises(KeyError, match="in the middle"):
        trainer.run(functools.partial(script, fail))
    resumed = trainer.run(script, checkpoint=trainer.latest_checkpoint, callbacks=[seen])
    assert resumed == [(expected, FAULT_EPOCH, 2)] * 2
    assert len(seen.results) == NUM_EPOCHS - FAULT_EPOCH
    assert all("loss" in metrics and "epoch" in metrics for metrics in seen.results[-1])
