"""The state of a TorchTrainer, including files to which each worker writes its shards."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raysgd.checkpoint.file import TENSORS_FILE
from raysgd.checkpoint.location import locate
from raysgd.checkpoint.sharded import (
    UnsharedFolderError,
    new_tensors,
    writable_folder,
    write_folder,
)
from raysgd.checkpoint.weights import save_rows
from raysgd.elastic.call import Call
from raysgd.torch.runner import SaveTensorsRequest, SaveWeightsRequest
from raysgd.torch.sharded_files import with_tensors
from raysgd.torch.sharding.pieces import gather_state
from raysgd.trainer.state import TrainerState

logger = logging.getLogger(__name__)


class TorchTrainerState(TrainerState):
    def assemble(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return with_tensors(gather_state(state), copy=True)

    def save_sharded(self, path: str | os.PathLike[str]) -> str:
        self.calls.check_open()
        self.calls.writer.wait()
        folder = writable_folder(locate(path))
        manifest = self._manifest()
        with self.sharded(folder) as state:
            return write_folder(state, folder, manifest)

    @contextlib.contextmanager
    def sharded(self, folder: Path) -> Iterator[dict[str, Any]]:
        """Yield the state after the workers have written its tensors into `folder`."""

        def collect() -> dict[str, Any]:
            generators = self._rng_states()
            request = SaveTensorsRequest(folder=str(tensors))
            call = Call(request=request, max_losses=3, any_size=True)
            state, checksum = self.calls.make(call)[0]
            state["data"]["rng"] = generators
            return {**state, "tensors": {"path": str(tensors / TENSORS_FILE), "sha256": checksum}}

        with new_tensors(folder) as tensors:
            yield self._complete(collect)

    def write_weights(self, target: str) -> str:
        if not self.is_fully_sharded or not locate(target).is_local:
            return super().write_weights(target)
        try:
            with new_tensors(Path(target).parent) as folder:
                request = SaveWeightsRequest(folder=str(folder))
                call = Call(request=request, max_losses=3, any_size=True)
                rest, other_names = self.calls.make(call)[0]
                return save_rows(folder / TENSORS_FILE, rest, other_names, target)
        except UnsharedFolderError as error:
            logger.warning("%s The driver writes the whole models instead.", error)
            return super().write_weights(target)
