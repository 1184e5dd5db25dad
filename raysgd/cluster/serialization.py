"""Pickling: out-of-band buffers (PEP 574) for large tensors, and classes of the user's script."""

import functools
import importlib
import inspect
import io
import operator
import pickle
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle

_LARGE_BYTES = 1 << 14
_STORED_BYTES = 1 << 20
_ALIGNMENT = 64
_KNOWN_DTYPES = re.compile(r"torch\.(bool|uint8|int(8|16|32|64)|b?float(16|32|64)|complex(64|128))")
"""Types of tensors that PyTorch pickles and unpickles, unlike float8."""


def padding(size: int) -> int:
    """Return the number of bytes between a buffer of `size` bytes and the next one."""
    return -size % _ALIGNMENT


@dataclass
class PackedValue:
    """A pickled value. Ray puts its buffers into shared memory without pickling them."""

    data: Any
    buffers: Any = ()  # or a function that returns them, if they belong to the receiver
    reference: Any = None  # to the value in Ray's object store, if this process has put it there

    @property
    def sizes(self) -> list[int]:
        return [memoryview(buffer).nbytes for buffer in self.buffers]

    @property
    def needs_object_store(self) -> bool:
        return memoryview(self.data).nbytes + sum(self.sizes) >= _STORED_BYTES

    def blocks(self) -> Iterator[Any]:
        """Iterate over the buffers with their padding."""
        for buffer in self.buffers:
            yield (content := pickle.PickleBuffer(buffer).raw())
            yield bytes(padding(content.nbytes))

    def write(self, file: Any) -> None:
        for block in self.blocks():
            file.write(block)

    def store(self) -> Any:
        """Return this object, or a reference to it in Ray's object store if it is large."""
        if self.reference is None and self.needs_object_store:
            import ray

            self.reference = ray.put(self)
            self.data, self.buffers = b"", ()
        return self if self.reference is None else self.reference

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        data = pickle.PickleBuffer(self.data) if protocol >= 5 else self.data
        return PackedValue, (data, self.buffers)

    def unpack(self, copies: bool = True) -> Any:
        """Return the value. With `copies`, copy arrays out of Ray's read-only shared memory."""
        if self.reference is not None:
            import ray

            stored: PackedValue = ray.get(self.reference)
            return stored.unpack(copies)
        if callable(self.buffers):
            buffers = self.buffers()
        else:
            buffers = map(bytearray, self.buffers) if copies else self.buffers
        return pickle.loads(self.data, buffers=buffers)


def dumps(value: Any, stays_in_band: Any = None, portable: bool = False) -> bytes:
    """Pickle a value. Ray references stay valid in other processes. See `pack`."""
    with io.BytesIO() as file:
        _pickler(portable)(file, protocol=5, buffer_callback=stays_in_band).dump(value)
        return file.getvalue()


def pack_as(what: str, value: Any) -> PackedValue:
    """Pack a value for the workers. An error names it as `what`."""
    try:
        return pack(value)
    except Exception as error:
        name = getattr(value, "unpicklable_argument", lambda: what + find_unpicklable(value)[0])
        raise TypeError(
            f"Cannot send {name()} to the workers, because it cannot be pickled: "
            f"{str(error).rstrip('.')}. Create such objects in setup(), which runs on the workers."
        ) from None


def find_unpicklable(value: Any) -> tuple[str, Any]:
    """Return the path in a value to an object that cannot be pickled, and this object.

    It leads through items, attributes, base classes, and the variables that functions use.
    """
    path, empty = "", types.CellType()  # of a variable without a value
    seen = []  # a dict may contain itself, and super() uses the class of its function
    for _ in range(10):
        seen.append(value)
        items = dict(enumerate(value)) if type(value) in (list, tuple) else value
        if isinstance(items, Mapping):
            shown, parts = "[{!r}]", items
        elif isinstance(value, types.FunctionType) and empty not in (value.__closure__ or ()):
            shown, parts = " (uses {})", operator.or_(*inspect.getclosurevars(value)[:2])
        else:
            bases = {each.__name__: each for each in getattr(value, "__bases__", ())}
            shown, parts = ".{}", bases | dict(getattr(value, "__dict__", {}))
        parts = {key: each for key, each in parts.items() if not any(each is s for s in seen)}
        if (key := unpicklable_key(parts)) is None:
            break
        path, value = path + shown.format(key), parts[key]
    return path, value


def unpicklable_key(values: Mapping[Any, Any]) -> Any:
    for key, value in values.items():
        try:
            pack(value)
        except Exception:
            return key
    return None


def pack(value: Any, portable: bool = False) -> PackedValue:
    """Pickle a value except its large tensors and arrays, which must not change until it is sent.

    If it is `portable`, any process can read the result: see `portable_pickler`.
    """
    large: list[pickle.PickleBuffer] = []

    def stays_in_band(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < _LARGE_BYTES:
            return True
        large.append(buffer)
        return False

    return PackedValue(dumps(value, stays_in_band, portable), large)


def portable_pickler(kind: Any) -> Any:
    """Return a pickler like `kind` whose output loads without a GPU or a process group.

    Device tensors load on the CPU. A DistributedDataParallel loads as the model that it wraps.
    """

    class Portable(kind):  # type: ignore[misc]
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
            return super().reducer_override(obj)

    return Portable


@functools.cache
def _pickler(portable: bool) -> Any:
    from ray.cloudpickle import Pickler  # not at the top: a worker in the driver needs no Ray

    class WithTensors(Pickler):
        def reducer_override(self, obj: Any) -> Any:
            torch = sys.modules.get("torch")
            if torch is not None and type(obj) is torch.Tensor and _is_plain(obj, torch):
                size, is_on_cpu = obj.nbytes, obj.device.type == "cpu"
                is_large = is_on_cpu and size >= _LARGE_BYTES  # PyTorch would pickle it slowly
                if is_large and obj.is_contiguous() and size == obj.untyped_storage().nbytes():
                    flat = obj.reshape(-1).view(torch.uint8).numpy()
                    return _restore_tensor, (flat, obj.dtype, tuple(obj.shape))
                if not _KNOWN_DTYPES.fullmatch(str(obj.dtype)):
                    integers = obj.view(getattr(torch, f"int{8 * obj.itemsize}"))
                    return operator.methodcaller("view", obj.dtype), (integers,)
            # Ray would pickle modules such as torch.distributed.config by value.
            if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
                name = obj.__name__
                if sys.modules.get(name) is obj:
                    return importlib.import_module, (name,)
            return super().reducer_override(obj)  # type: ignore[no-untyped-call]

    return portable_pickler(WithTensors) if portable else WithTensors


def _is_plain(tensor: Any, torch: Any) -> bool:
    """Return whether a tensor consists only of its memory, or of a part of it."""
    return bool(
        tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not vars(tensor)
    )


def _restore_tensor(flat: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    own = flat if flat.flags.writeable else flat.copy()  # processes share read-only memory
    return torch.from_numpy(own).view(dtype).reshape(shape)


# ---- processes that a worker spawns, such as those of a DataLoader


def send_classes_of_the_script() -> None:
    """Pickle classes and functions of ``__main__`` by value between this and other processes.

    Python looks them up by name, but the ``__main__`` of a worker is Ray's.
    """
    ForkingPickler.reducer_override = _reduce_by_value  # type: ignore[method-assign]


def _reduce_by_value(pickler: Any, obj: Any) -> Any:
    if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
        return _unpickle, (cloudpickle.dumps(obj),)
    return NotImplemented


def _unpickle(blob: bytes) -> Any:
    send_classes_of_the_script()  # the new process may return such objects
    return pickle.loads(blob)
