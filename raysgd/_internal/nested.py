"""Helpers for nested state, and for objects that load it."""

import contextlib
import copy
import dataclasses
import itertools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from raysgd._internal.paths import without_secrets
from raysgd.errors import CheckpointError


def map_leaves(tree: Any, convert: Callable[[Any], Any]) -> Any:
    """Return `tree` with `convert` applied to the leaves of its dicts, lists, and tuples.

    Dicts keep their type and attributes, such as the version in the state dict of a module. A
    tensor that consists of others, such as a quantized one, is a container of them.

    >>> map_leaves({"a": [1, (2,)]}, lambda leaf: -leaf)
    {'a': [-1, (-2,)]}
    """
    if isinstance(tree, dict):
        mapped = copy.copy(tree)
        for key, value in tree.items():
            mapped[key] = map_leaves(value, convert)
        return mapped
    if type(tree) in (list, tuple):
        return type(tree)(map_leaves(item, convert) for item in tree)
    if hasattr(tree, "__tensor_flatten__") and not isinstance(tree, type):
        names, context = tree.__tensor_flatten__()
        inner = {name: getattr(tree, name) for name in names}
        tree = _FlatTensor(type(tree), inner, (context, tree.size(), tree.stride()))
    return tree.map(convert) if isinstance(tree, _FlatTensor) else convert(tree)


class _FlatTensor(NamedTuple):
    """A subclass of ``torch.Tensor`` as the inner tensors of ``__tensor_flatten__``."""

    kind: Any
    inner: dict[str, Any]
    others: tuple[Any, ...]

    def map(self, convert: Callable[[Any], Any]) -> Any:
        """Return the tensor with converted inner tensors. If these are none, it stays flat."""
        inner = map_leaves(self.inner, convert)
        if all(hasattr(each, "detach") for each in inner.values()):
            return self.kind.__tensor_unflatten__(inner, *self.others)
        return self._replace(inner=inner)


def describe(value: Any) -> str:
    """Return the types and shapes in a batch or an output, shortened.

    >>> describe({"names": ["a", "b"], "ages": (1.5, 2)})
    '{names: [str, str], ages: (float, int)}'
    """
    with contextlib.suppress(Exception):  # also a nested tensor has no shape
        dtype = str(getattr(value.dtype, "name", value.dtype)).removeprefix("torch.")
        return f"{dtype}{list(value.shape)}"
    if (named := named_values(value)) is not None:
        inner = ", ".join(f"{name}: {describe(each)}" for name, each in named.items())
        kind = "" if type(value) is dict else type(value).__name__
        return f"{kind}{{{inner:.300}}}"
    if isinstance(value, tuple | list):
        inner = ", ".join(map(describe, value[:10])) + (", …" if len(value) > 10 else "")
        return f"({inner:.300})" if isinstance(value, tuple) else f"[{inner:.300}]"
    return type(value).__name__


def named_values(value: Any) -> Mapping[str, Any] | None:
    """Return the values of a dict or data class by name, and None for other values."""
    if isinstance(value, Mapping):
        return value
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def cat_outputs(outputs: Sequence[Any], concatenate: Callable[[Sequence[Any]], Any]) -> Any:
    """Concatenate results for consecutive samples, with one row per sample.

    Rows of different shapes become a list.

    >>> cat_outputs([{"a": ["x", "y"]}, {"a": ["z"]}], list)
    {'a': ['x', 'y', 'z']}
    """
    first = outputs[0]
    if isinstance(first, dict):
        return {key: cat_outputs([output[key] for output in outputs], concatenate) for key in first}
    if type(first) is tuple:
        return tuple(cat_outputs(column, concatenate) for column in zip(*outputs, strict=True))
    shapes = [tuple(output.shape) for output in outputs if hasattr(output, "shape")]
    if shapes and all(shapes):
        alike = len({shape[1:] for shape in shapes}) == 1
        return concatenate(outputs) if alike else [row for output in outputs for row in output]
    if isinstance(first, list):
        return [row for output in outputs for row in output]
    raise TypeError(
        f"predict_batch returned {first!r}. It must return one row per sample: a tensor, an array, "
        "a list, or a dict or tuple of them."
    )


def check_rows(output: Any, num_samples: int | None, num_rows: int = 0) -> None:
    """Check that the results for a batch have a row for each sample, if their number is known.

    Without `num_samples`, tensors need `num_rows` rows, unless it is 0.
    """
    if isinstance(output, dict | tuple):
        for each in output.values() if isinstance(output, dict) else output:
            check_rows(each, num_samples, num_rows)
        return
    is_list = isinstance(output, list)
    shape = (len(output),) if is_list else tuple(getattr(output, "shape", ()))
    expected = (0 if is_list else num_rows) if num_samples is None else num_samples
    if expected and shape and shape[0] != expected:
        raise ValueError(
            f"predict_batch returned a result of shape {shape} for a batch of {expected} samples. "
            "The first dimension must be that of the samples: use transpose(0, 1), or return a "
            "list with an item for each sample."
        )


def try_copy(leaf: Any) -> Any:
    """Return a deep copy, or `leaf` itself if it cannot be copied, such as a lock."""
    try:
        return copy.deepcopy(leaf)
    except Exception:
        return leaf


@contextlib.contextmanager
def preserving_attributes(owner: Any, deep_except: Iterable[Any] | None = None) -> Iterator[None]:
    """Restore an object's attributes at the end, and the content of its lists, dicts, and sets.

    With `deep_except`, also restore what these contain, such as tensors and metrics, except these
    objects, models, and data of more than 64 MiB or 10 000 items.
    """
    attributes = dict(vars(owner))
    seen, items, restore = {*map(id, deep_except or ())}, [*attributes.values()], []
    for item in items:
        if id(item) in seen:
            continue
        seen.add(id(item))
        if function := _restoring(item):
            restore.append(function)
        if deep_except is None:
            continue
        if isinstance(item, list | tuple | set | deque | dict):
            if len(item) <= _MANY:
                items += item.values() if isinstance(item, dict) else item
        elif _may_hold_totals(item):
            with contextlib.suppress(Exception):  # __getattr__ of user code may raise any error
                items.append(getattr(item, "__dict__", ()))
                names = [name for name in _slots_of(item) if hasattr(item, name)]
                slots = {name: getattr(item, name) for name in names}
                items += slots.values()
                restore.append(partial(_set_attributes, item, slots))
    try:
        yield
    finally:
        vars(owner).clear()
        vars(owner).update(attributes)
        for function in restore:
            function()


_LARGE_BYTES, _MANY = 2**26, 10_000


def _restoring(item: Any) -> Callable[[], Any] | None:
    """Return a function that restores the content of an object, or None."""
    if type(item) in (list, dict, set, deque, Counter, OrderedDict, defaultdict):
        content = item.copy()
        fill = "extend" if isinstance(item, list | deque) else "update"
        return lambda: (item.clear(), getattr(item, fill)(content))
    if type(item).__name__ in ("Random", "Generator", "RandomState"):  # of random, NumPy, PyTorch
        for read, write in (("getstate", "setstate"), ("get_state", "set_state")):
            if hasattr(item, read):
                return partial(getattr(item, write), getattr(item, read)())
        source = getattr(item, "bit_generator", None)  # its `state` lacks the count of spawn()
        return source and partial(source.__setstate__, copy.deepcopy(source.__getstate__()))
    with contextlib.suppress(Exception):  # objects of other types, and sparse tensors
        if item.nbytes <= _LARGE_BYTES:
            array = item.detach() if hasattr(item, "detach") else item
            return partial(_fill, array, copy.deepcopy(array))
    return None


def _fill(array: Any, values: Any) -> None:
    with contextlib.suppress(Exception):  # user code cannot write it either
        array[...] = values


_FOREIGN = {"torch", "tensorflow", "keras", "ray", *sys.stdlib_module_names} - {
    "abc",
    "collections",
    "typing",
}


def _slots_of(item: Any) -> Iterable[str]:
    own = [vars(kind).get("__slots__", ()) for kind in type(item).__mro__]
    return itertools.chain.from_iterable([each] if isinstance(each, str) else each for each in own)


def _set_attributes(item: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        with contextlib.suppress(AttributeError):  # frozen
            setattr(item, name, value)


def _may_hold_totals(item: Any) -> bool:
    """Return whether an object is a metric, or an object of user code."""
    if hasattr(type(item), "named_parameters"):
        return not any(True for _ in item.named_parameters())
    return is_user_object(item)


def is_user_object(item: Any) -> bool:
    """Return whether the class of an object is of user code, and derives from no other library."""
    if isinstance(item, type):
        return False
    return _FOREIGN.isdisjoint(each.__module__.split(".")[0] for each in type(item).__mro__[:-1])


@contextlib.contextmanager
def load_or_restore(
    owner: Any, own_state: Any, state: Any, path: str, load: Callable[[Any], Any] | None = None
) -> Iterator[None]:
    """Make an object load a state. If loading or the block fails, reload its `own_state`.

    `path` is the path of `state` in the state of the trainer. `load` replaces
    ``owner.load_state_dict``.
    """
    load = load or owner.load_state_dict
    try:
        try:
            load(state)
        except Exception as error:
            raise CheckpointError(
                f"The state's {path} cannot be loaded: {type(owner).__name__}.load_state_dict "
                f"raised {without_secrets(repr(error))}."
            ) from error
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            load(own_state)
        raise
