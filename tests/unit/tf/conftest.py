"""TensorFlow operators in this process, without Ray."""

import os

import pytest

from raysgd._internal.runner import WorkerContext

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


@pytest.fixture
def build(monkeypatch):
    """A factory of operators that are set up in this process."""
    pytest.importorskip("tensorflow")
    from raysgd.tf import train_state
    from raysgd.tf.communication import KerasCollectives
    from raysgd.tf.options import KerasOptions, KerasSettings
    from raysgd.tf.runner import build_operator

    def make(operator_cls, config=None, seed=3, workers=1, **options):
        options = KerasOptions(seed=seed, **options)
        settings = KerasSettings(options=options, context=WorkerContext(is_in_driver=True))
        monkeypatch.setattr(train_state, "create_collectives", lambda _: KerasCollectives(workers))
        return build_operator(operator_cls, config or {}, settings)

    return make
