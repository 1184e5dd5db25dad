"""A wrapper for distributed training that user code can use like its module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

_METHODS_OF_THE_MODULE = (
    "__bool__",
    "__delitem__",
    "__getitem__",
    "__iter__",
    "__len__",
    "__setitem__",
    "_apply",
    "add_module",
    "apply",
    "load_state_dict",
    "named_buffers",
    "named_children",
    "named_modules",
    "named_parameters",
    "register_buffer",
    "register_load_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_module",
    "register_parameter",
    "register_state_dict_post_hook",
    "register_state_dict_pre_hook",
    "state_dict",
    "train",
)
"""Methods of a wrapper that call the module's methods, so that names have no prefix."""


class Wrapper(DistributedDataParallel):
    """DistributedDataParallel with the attributes and items of its module.

    Names have no prefix ``module.``. Therefore user code works as with one worker. Subclasses
    declare their attributes in the class. Other attributes go to the module.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        del self.training  # __getattr__ then returns the mode of the module
        self._wrapped = True

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Add ``module.`` to the names if a model that contains this wrapper loads its state."""
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        # The constructor sets attributes of the wrapper.
        is_own = "_wrapped" not in own or name in own or hasattr(type(self), name)
        is_part = isinstance(value, torch.nn.Module | torch.nn.Parameter)
        if is_own or name == "module" or not (is_part or hasattr(self.module, name)):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)


def _of_module(name: str) -> Callable[..., Any]:
    def method(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
        if name == "__bool__":  # a module that has no length has no such method
            return bool(getattr(self.module, "_orig_mod", self.module))
        result = getattr(self.module, name)(*args, **kwargs)
        return self if result is self.module else result

    method.__name__ = name
    return method


for _name in _METHODS_OF_THE_MODULE:
    setattr(Wrapper, _name, _of_module(_name))
