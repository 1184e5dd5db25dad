"""Objects of the script's classes in spawned processes. A worker's ``__main__`` lacks them."""

import multiprocessing
from multiprocessing.reduction import ForkingPickler

import torch
from torch.utils.data import DataLoader

from raysgd.cluster import serialization

SCRIPT = """
class Item:
    def __init__(self, number):
        self.number = number

class Data:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return double(index)

def double(number):
    return 2 * number

def join(numbers):
    return Item(numbers)
"""


def test_a_spawned_process_gets_and_returns_objects_of_the_script(monkeypatch):
    names = {"__name__": "__main__"}
    exec(SCRIPT, names)
    monkeypatch.setattr(ForkingPickler, "reducer_override", None, raising=False)
    monkeypatch.delattr(ForkingPickler, "reducer_override")
    serialization.send_classes_of_the_script()
    loader = DataLoader(
        names["Data"](),
        batch_size=2,
        num_workers=1,
        collate_fn=names["join"],
        multiprocessing_context="spawn",
    )
    batches = list(loader)
    assert [batch.number for batch in batches] == [[0, 2], [4, 6]]
    assert {type(batch) for batch in batches} == {names["Item"]}


def test_other_objects_are_pickled_as_before(monkeypatch):
    monkeypatch.setattr(
        ForkingPickler, "reducer_override", serialization._reduce_by_value, raising=False
    )
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    for value in (torch.ones(2), DataLoader, len, [str]):
        queue.put(value)
        assert str(queue.get()) == str(value)
