"""Import path of preprocessors in older scripts."""

import sys

from raysgd.train.callbacks.preprocessors import *  # noqa: F403
from raysgd.train.callbacks.preprocessors import __all__ as __all__

for _name in ("aggregate", "index", "keys", "preprocessor"):  # as `os` does for os.path
    sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]
