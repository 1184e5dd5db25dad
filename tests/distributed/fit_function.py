"""A training function that both a killed driver and its successor import."""

import pathlib

from raysgd import train
from raysgd.train import Checkpoint
from tests.conftest import wait_until


def function(config):
    """Train five epochs. The fourth waits for the file ``go``, which the second driver creates."""
    folder = pathlib.Path(config["folder"])
    checkpoint = train.get_checkpoint()
    start = 0 if checkpoint is None else checkpoint.to_dict()["epoch"] + 1
    for epoch in range(start, 5):
        if epoch == 3:
            wait_until((folder / "go").exists, 120)
        made = Checkpoint.from_dict({"epoch": epoch})
        train.report({"epoch": epoch, "started_from": start}, checkpoint=made)
        if train.world_rank() == 0:
            (folder / f"saved-{epoch}").touch()
