"""The cases of the golden orders: loaders, seeds, sizes, epochs, workers, and offsets.

    python -m tests.blackbox.golden.cases

This records the orders again. Use it only to change an order, and announce the change in
CHANGELOG: resumed runs then continue in another order.
"""

import hashlib
import itertools
import json
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.blackbox.golden import seam

FOLDER = Path(__file__).parent

SEGMENTS = {
    "1": [(1, None)],
    "2": [(2, None)],
    "3": [(3, None)],
    "5": [(5, None)],
    "2 lose 1": [(2, 2), (1, None)],
    "4 lose 1": [(4, 1), (3, None)],
    "1 gains 2": [(1, 3), (3, None)],
    "3 to 2 to 4": [(3, 1), (2, 2), (4, None)],
}
"""Pairs (number of workers, number of steps) within an epoch. None means all remaining steps."""


def numbers(total):
    return TensorDataset(torch.arange(float(total)).reshape(-1, 1))


class Backwards(torch.utils.data.Sampler):
    """A custom sampler, which uses the epoch and has another length than its data."""

    def __init__(self, total):
        self.total, self.epoch = total, 0

    def __len__(self):
        return self.total // 2 + 1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(self.epoch - index) % self.total for index in range(len(self))])


def in_order(total, size):
    return DataLoader(numbers(total), batch_size=size)


def shuffled(total, size):
    return DataLoader(numbers(total), batch_size=size, shuffle=True)


def shuffled_full_batches(total, size):
    return DataLoader(numbers(total), batch_size=size, shuffle=True, drop_last=True)


def shuffled_by_generator(total, size):
    generator = torch.Generator().manual_seed(total + 77)
    return DataLoader(numbers(total), batch_size=size, shuffle=True, generator=generator)


def weighted(total, size):
    weights = torch.arange(1.0, total + 1)
    return DataLoader(
        numbers(total), batch_size=size, sampler=WeightedRandomSampler(weights, total + 3)
    )


def drawn_again(total, size):
    data = numbers(total)
    sampler = RandomSampler(data, replacement=True, num_samples=total + 1)
    return DataLoader(data, batch_size=size, sampler=sampler)


def own_sampler(total, size):
    return DataLoader(numbers(total), batch_size=size, sampler=Backwards(total))


def subset(total, size):
    part = Subset(numbers(2 * total), range(1, 2 * total, 2))
    return DataLoader(part, batch_size=size, shuffle=True)


def single_items(total, size):
    return DataLoader(numbers(total), batch_size=None, sampler=SequentialSampler(range(total)))


LOADERS = {
    made.__name__: made
    for made in (
        in_order,
        shuffled,
        shuffled_full_batches,
        shuffled_by_generator,
        weighted,
        drawn_again,
        own_sampler,
        subset,
        single_items,
    )
}


def read_operator(kind, total, size, segments, training=True, seed=0, epoch=0, global_batch=None):
    return seam.operator_epoch(
        lambda share: LOADERS[kind](total, share or size),
        training=training,
        seed=seed,
        epoch=epoch,
        segments=SEGMENTS[segments],
        global_batch=global_batch,
    )


def operator_cases():
    """Yield (name, function that reads the order) for loaders of operators."""
    sizes = [(23, 4), (8, 3), (3, 2), (1, 1)]
    for kind, segments, (total, size) in itertools.product(LOADERS, SEGMENTS, sizes):
        for seed, epoch in [(0, 0), (12345, 3)]:
            if seed and kind == "in_order":
                continue
            name = f"operator, {kind} {total} by {size}, seed {seed}, epoch {epoch}, {segments}"
            yield name, partial(read_operator, kind, total, size, segments, seed=seed, epoch=epoch)
    for kind, segments, (total, size) in itertools.product(
        ("in_order", "shuffled_full_batches"), SEGMENTS, sizes
    ):
        name = f"validation, {kind} {total} by {size}, {segments}"
        yield name, partial(read_operator, kind, total, size, segments, training=False)
    for segments, seed in itertools.product(SEGMENTS, (1, 7)):
        name = f"operator, shuffled 101 by BATCH_SIZE 12, seed {seed}, epoch 1, {segments}"
        given = {"seed": seed, "epoch": 1, "global_batch": 12}
        yield name, partial(read_operator, "shuffled", 101, None, segments, **given)
    for kind, segments in itertools.product(
        ("shuffled", "shuffled_full_batches", "weighted"), ("1", "3", "3 to 2 to 4")
    ):
        name = f"operator, {kind}, 180 seeds, epochs and sizes, {segments}: sha256"
        yield name, partial(_digest_of_many, kind, segments)


def _digest_of_many(kind, segments):
    """Return a digest of the orders of many seeds, epochs and sizes."""
    digest = hashlib.sha256()
    for seed, epoch, (total, size) in itertools.product(
        range(20), (0, 1, 40), [(64, 8), (97, 5), (1003, 32)]
    ):
        read = read_operator(kind, total, size, segments, seed=seed, epoch=epoch)
        digest.update(json.dumps(read).encode())
    return digest.hexdigest()


def function_cases():
    """Yield (name, function that reads the order) for loaders that training functions prepare."""
    for kind, world_size, seed in itertools.product(LOADERS, (1, 2, 3), (0, 9)):
        if world_size == 1 and kind not in ("in_order", "shuffled_by_generator", "own_sampler"):
            continue  # unchanged: the order of PyTorch, from the global generator
        name = f"function, {kind} 23 by 4, seed {seed}, {world_size} workers, two passes"
        make = partial(LOADERS[kind], 23, 4)
        yield name, partial(seam.prepared_passes, make, world_size=world_size, seed=seed)


def keras_cases():
    """Yield (name, function that reads the order) for data of Keras operators."""
    import numpy as np
    import tensorflow as tf

    for segments, total, training in itertools.product(SEGMENTS, (23, 3), (True, False)):
        what = "training" if training else "validation"
        read = partial(seam.keras_epoch, training=training, segments=SEGMENTS[segments])
        for seed, epoch in [(0, 0), (12345, 3)]:
            name = f"keras, arrays {total} by 4, {what}, seed {seed}, epoch {epoch}, {segments}"
            yield name, partial(read, np.arange(total), seed=seed, epoch=epoch, batch_size=4)
        data = tf.data.Dataset.range(total).batch(4)
        yield (
            f"keras, data set {total} by 4, {what}, {segments}",
            partial(read, data, seed=0, epoch=0),
        )


FAMILIES = {"operator": operator_cases, "function": function_cases, "keras": keras_cases}


def kept(family):
    """Return the recorded orders of a family."""
    return json.loads((FOLDER / f"{family}.json").read_text())


def write():
    """Record all orders, one per line."""
    for family, cases in FAMILIES.items():
        lines = (f"{json.dumps(name)}: {json.dumps(read())}" for name, read in cases())
        (FOLDER / f"{family}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write()
