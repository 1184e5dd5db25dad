"""The driver's store as a ``torch.distributed`` Store."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from raysgd.comm.connection import Address
from raysgd.comm.rendezvous import StoreClient


class TorchStore(Store):
    """Connection of a worker to a store, for torch.distributed. Bytes travel as Latin-1 text.

    Methods raise DistNetworkError after the store was closed or the client was interrupted, and
    DistStoreError if a key is not set in time.
    """

    def __init__(self, address: Address, timeout: datetime.timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        with _translated():
            self._client = StoreClient(address)

    def interrupt(self) -> None:
        self._client.interrupt()

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, value))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", key, _text(value))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [_bytes(value) for value in self._values(keys)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask("set", list(keys), [_text(value) for value in values])

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        self._values(keys, timeout)

    def _values(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> list[str]:
        # PyTorch's stubs lack the attribute that set_timeout() sets.
        wait_s = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]
        with _translated():
            return self._client.get(keys, wait_s)

    def _ask(self, operation: str, *arguments: Any) -> Any:
        with _translated():
            return self._client.ask(operation, *arguments)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
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
