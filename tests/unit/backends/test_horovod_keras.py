"""Horovod's Keras optimizer is refused with Keras 3, whenever its module is imported."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("horovod")
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


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("legacy", "said"), [("0", "refused True"), ("1", "made SGD")])
def test_it_is_refused_with_keras_3_alone(early, legacy, said):
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(early=early)],
        env={**os.environ, "TF_USE_LEGACY_KERAS": legacy, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip().splitlines()[-1] == said, done.stderr[-2000:]
