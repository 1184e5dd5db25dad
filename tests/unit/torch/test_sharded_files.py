"""Tensors in one file, to which all workers write."""

import pytest
import torch

from raysgd.checkpoint.sharded import UnsharedFolderError
from raysgd.torch.sharded_files import write


def test_a_folder_that_each_worker_has_for_itself_is_refused(process_group, tmp_path, monkeypatch):
    """Rank 0 would put together a state without the rows of the others."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)  # who made it on another host
    with pytest.raises(UnsharedFolderError, match="some workers do not see the folder of rank 0"):
        write({"models.0.weight": torch.ones(2)}, str(tmp_path / "tensors-0123abcd"))
