"""The driver's store as torch.distributed takes it."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from raysgd.comm.connection import Address
from raysgd.comm.rendezvous import StoreClient

__all__ = ["TorchStore"]


class TorchStore(Store):
    """A worker's connection to a store. It lives as long as anything that torch makes of it.

    Every method raises DistNetworkError once the store is closed or the client interrupted, and
    DistStoreError where a key does not come in time. Bytes travel as text of the same code points.

    Args:
        address: where the store listens.
        timeout: how long to wait for keys where a call does not say how long.
    """

    def __init__(self, address: Address, timeout: datetime.timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        with _translated():
            self._client = StoreClient(address)

    def interrupt(self) -> None:
        """End the wait that another thread is in, and refuse all later ones."""
        self._client.interrupt()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        """Return a key's value, once it is there."""
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        """Add to a number, 0 at first, and return the sum."""
        return int(self._ask("add", key, value))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value, empty at first."""
        self._ask("append", key, _text(value))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask("check", list(keys)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has a certain value, empty for none, and return what it has then."""
        return _bytes(self._ask("compare_set", key, _text(expected), _text(desired)))

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it was there."""
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return int(self._ask("num_keys"))

    # the names by which torch's C++ looks for them
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        """Whether there are `append` and the operations on several keys."""
        return True

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys, once all are there."""
        return [_bytes(value) for value in self._values(keys)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        self._ask("set", list(keys), [_text(value) for value in values])

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._values(keys, timeout)

    def _values(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> list[str]:
        # torch's declarations leave the attribute out that its set_timeout() sets
        wait_s = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]
        with _translated():
            return self._client.get(keys, wait_s)

    def _ask(self, operation: str, *arguments: Any) -> Any:
        with _translated():
            return self._client.ask(operation, *arguments)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise torch's errors in place of Python's."""
    try:
        yield
    except ConnectionError as error:
        raise dist.DistNetworkError(str(error)) from error.__cause__
    except TimeoutError as error:
        raise dist.DistStoreError(str(error)) from None


def _text(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def _bytes(value: str) -> bytes:
    return value.encode("latin-1")
