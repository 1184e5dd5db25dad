"""Mixed precision through Keras's policies."""

import pytest

tf = pytest.importorskip("tensorflow")

from raysgd.tf.keras import (  # noqa: E402
    kerases,
    policy_name,
    scaled_optimizer,
    set_policy,
)
from tests.tf_operators import keras_of  # noqa: E402

both = pytest.mark.parametrize("keras", ["keras", "tf_keras"])


@pytest.fixture
def gpus(monkeypatch):
    """Sets how many GPUs this process seems to have."""

    def has(number):
        names = [f"GPU:{n}" for n in range(number)]
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: names)

    return has


@pytest.mark.parametrize(
    ("use_fp16", "num_gpus", "policy"),
    [
        (False, 1, None),
        (True, 1, "mixed_float16"),
        (True, 0, "mixed_bfloat16"),
        ("mixed_bfloat16", 1, "mixed_bfloat16"),
        ("mixed_float16", 0, "mixed_float16"),
    ],
)
def test_the_policy_is_the_one_that_the_device_is_good_at(use_fp16, num_gpus, policy, gpus):
    gpus(num_gpus)
    assert policy_name(use_fp16) == policy


@both
@pytest.mark.parametrize(
    ("use_fp16", "num_gpus", "scales"),
    [(False, 1, False), (True, 1, True), (True, 0, False), ("mixed_float16", 0, True)],
)
def test_the_loss_is_scaled_where_gradients_are_float16(keras, use_fp16, num_gpus, scales, gpus):
    gpus(num_gpus)
    module = keras_of({"keras": keras})
    mine = module.optimizers.SGD()
    found = scaled_optimizer(module, mine, use_fp16)
    assert (found is mine) == (not scales)
    assert isinstance(found, module.mixed_precision.LossScaleOptimizer) == scales
    assert scaled_optimizer(module, found, use_fp16) is found, "once is enough"


def test_models_of_both_kerases_compute_in_it_from_then_on():
    both_kerases = [keras_of({"keras": name}) for name in ("keras", "tf_keras")]
    assert set(kerases()) == set(both_kerases)
    try:
        set_policy("mixed_bfloat16")
        for keras in both_kerases:
            assert keras.layers.Dense(1).compute_dtype == "bfloat16"
    finally:
        set_policy("float32")
    assert all(keras.layers.Dense(1).compute_dtype == "float32" for keras in both_kerases)
