"""Each part of the status of a worker has one reader on the driver: a module or a package."""

import re

from raysgd._internal.worker_status import WorkerStatus
from tests.contracts.test_strategies import files

DRIVER = re.compile(
    r"raysgd/(callbacks|cli|driver|elastic|testing|train/executor|trials|cluster/(?!worker\.py))"
)
READERS = dict.fromkeys(WorkerStatus._fields, "elastic/") | {
    "batches": "elastic/call_executor.py",
    "snapshot": "elastic/snapshot_keeper.py",
    "updates": "driver/",
}


def test_each_part_has_one_reader():
    # A trainer reads the position of the group.
    group = r"(?<!record\.newest_status(?=\.position))(?<!reporter)(?<!self)"
    read = re.compile(rf"{group}\.({'|'.join(WorkerStatus._fields)})\b(?!\()")
    found = {part: set() for part in READERS}
    for name, text in files().items():
        for part in read.findall(text) if DRIVER.match(name) else ():
            found[part].add(name)
    for part, names in found.items():
        assert names, part
        assert all(name.startswith(f"raysgd/{READERS[part]}") for name in names), (part, names)
