"""Pickling with out-of-band buffers (PEP 574), which does not copy large tensors and arrays."""

from __future__ import annotations

import functools
import importlib
import io
import operator
import pickle
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LARGE_BYTES = 1 << 14
_STORED_BYTES = 1 << 20


@dataclass
class Packed:
    """A pickled value. Ray puts its buffers into shared memory without pickling them."""

    data: Any
    buffers: Sequence[Any] = ()
    reference: Any = None  # to the value in Ray's object store, if this process has put it there

    @property
    def is_large(self) -> bool:
        sizes = [memoryview(buffer).nbytes for buffer in (self.data, *self.buffers)]
        return sum(sizes) >= _STORED_BYTES

    def stored(self) -> Any:
        """Return this object, or a reference to it in Ray's object store if it is large."""
        if self.reference is None and self.is_large:
            import ray

            self.reference = ray.put(self)
            self.data, self.buffers = b"", ()
        return self if self.reference is None else self.reference

    def copy(self) -> Packed:
        return Packed(bytes(self.data), [bytearray(buffer) for buffer in self.buffers])

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        data = pickle.PickleBuffer(self.data) if protocol >= 5 else self.data
        return Packed, (data, self.buffers)

    def value(self, own: bool = True) -> Any:
        """Return the value. With `own`, copy arrays out of Ray's read-only shared memory."""
        if self.reference is not None:
            import ray

            stored: Packed = ray.get(self.reference)
            return stored.value(own)
        buffers = [bytearray(buffer) for buffer in self.buffers] if own else self.buffers
        return pickle.loads(self.data, buffers=buffers)


def dumps(
    value: Any, is_small: Any = None, portable: bool = False, shares_tensors: bool = True
) -> bytes:
    """Pickle a value. Ray references stay valid in other processes. See `pack`."""
    with io.BytesIO() as file:
        _pickler(portable, shares_tensors)(file, protocol=5, buffer_callback=is_small).dump(value)
        return file.getvalue()


def sendable(what: str, value: Any) -> Packed:
    """Pack a value for the workers. An error names it as `what`."""
    try:
        return pack(value, shares_tensors=False)
    except Exception as error:
        name_part = getattr(value, "unpicklable_part", lambda: what)
        raise TypeError(
            f"Cannot send {name_part()} to the workers, because it cannot be pickled: {error}. "
            "Create such objects in setup(), which runs on the workers."
        ) from None


def unpicklable_key(values: Mapping[Any, Any]) -> Any:
    for key, value in values.items():
        try:
            pack(value)
        except Exception:
            return key
    return None


def pack(value: Any, portable: bool = False, shares_tensors: bool = True) -> Packed:
    """Pickle a value except its large tensors and arrays, which must not change until it is sent.

    Args:
        value: the value.
        portable: whether any process must be able to read the result, see `Portable`.
        shares_tensors: whether processes may share the memory of tensors and change it.
    """
    large: list[pickle.PickleBuffer] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < _LARGE_BYTES:
            return True
        large.append(buffer)
        return False

    return Packed(dumps(value, is_small, portable, shares_tensors), large)


class Portable:
    """A mixin of picklers whose output loads without a GPU or a process group.

    Device tensors load on the CPU. A DistributedDataParallel loads as the model that it wraps.
    """

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None:
            storages = torch.UntypedStorage | torch.storage.TypedStorage
            untyped = getattr(obj, "_untyped_storage", obj)
            if isinstance(obj, storages) and torch.serialization.location_tag(untyped) != "cpu":
                file = io.BytesIO()
                torch.save(obj, file, _use_new_zipfile_serialization=False)
                load = functools.partial(torch.load, map_location="cpu", weights_only=False)
                return load, (io.BytesIO(file.getvalue()),)
            if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
                return operator.itemgetter(0), ((obj.module,),)
        return super().reducer_override(obj)  # type: ignore[misc]


@functools.cache
def _pickler(portable: bool, shares_tensors: bool) -> Any:
    from ray.cloudpickle import Pickler  # not at the top: a worker in the driver needs no Ray

    rebuild = _tensor if shares_tensors else _own_tensor

    class WithTensors(Pickler):
        def reducer_override(self, obj: Any) -> Any:
            torch = sys.modules.get("torch")
            if torch is not None and type(obj) is torch.Tensor and _is_plain(obj, torch):
                flat = obj.reshape(-1).view(torch.uint8).numpy()
                return rebuild, (flat, obj.dtype, tuple(obj.shape))
            # Ray would pickle modules such as torch.distributed.config by value.
            if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
                name = obj.__name__
                if sys.modules.get(name) is obj:
                    return importlib.import_module, (name,)
            return super().reducer_override(obj)  # type: ignore[no-untyped-call]

    return type("PortableWithTensors", (Portable, WithTensors), {}) if portable else WithTensors


def _is_plain(tensor: Any, torch: Any) -> bool:
    """Return whether a tensor consists only of its memory. PyTorch would pickle it slowly."""
    return bool(
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.nbytes >= _LARGE_BYTES
        and tensor.nbytes == tensor.untyped_storage().nbytes()
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not vars(tensor)
    )


def _tensor(flat: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about read-only arrays
        return torch.from_numpy(flat).view(dtype).reshape(shape)


def _own_tensor(flat: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    return _tensor(flat if flat.flags.writeable else flat.copy(), dtype, shape)
