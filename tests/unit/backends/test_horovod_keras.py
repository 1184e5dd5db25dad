"""Horovod's Keras optimizer is refused with Keras 3, whenever its module is imported."""

import os
import subprocess
import sys

import pytest

from tests.conftest import import_horovod

import_horovod()
pytest.importorskip("tensorflow")

CODE = """
import os
from raysgd.backends.horovod_keras import refuse_with_keras_3
if {early}:
    import horovod.tensorflow.keras
refuse_with_keras_3()
refuse_with_keras_3()
import horovod.tensorflow.keras as hvd
import tensorflow as tf
os.environ.update(HOROVOD_RANK="0", HOROVOD_SIZE="1", HOROVOD_CONTROLLER="gloo")
hvd.init()
try:
    made = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))
except RuntimeError as error:
    print("refused", "does not synchronize with Keras 3" in str(error))
else:
    print("made", type(made).__name__)
"""


SAID = {"0": "refused True", "1": "made SGD"}
"""By whether the older Keras is asked for."""
EARLY = (True, False)


@pytest.fixture(scope="module")
def processes():
    """All at once: most of their time goes into importing TensorFlow."""
    started = {
        (legacy, early): subprocess.Popen(
            [sys.executable, "-c", CODE.format(early=early)],
            env={**os.environ, "TF_USE_LEGACY_KERAS": legacy, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for legacy in SAID
        for early in EARLY
    }
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.slow("six processes that import TensorFlow")
@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize(("legacy", "said"), SAID.items())
def test_it_is_refused_with_keras_3_alone(processes, legacy, early, said):
    process = processes[legacy, early]
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-2000:]
    assert out.strip().splitlines()[-1] == said, err[-2000:]
