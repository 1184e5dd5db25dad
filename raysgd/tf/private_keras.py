"""Private functions of Keras that have no public counterpart. Other files import them from here.

- The public ``dtype_policy()`` sets a missing policy, so raysgd reads and restores the attribute.
- A checkpoint needs the generator of layers without a seed, and arrays the seed that a script sets.
"""

import keras

try:
    from keras.src.backend.common.global_state import get_global_attribute as get_global_attribute
    from keras.src.backend.common.global_state import set_global_attribute as set_global_attribute
    from keras.src.random.seed_generator import global_seed_generator as global_seed_generator
    from keras.src.utils.rng_utils import get_random_seed as get_random_seed
except ImportError as error:
    raise ImportError(
        f"TFTrainer does not support Keras {keras.__version__}: {error}. Install a version that "
        "raysgd was tested with, such as 3.15."
    ) from error
