"""The names that users know, at the home where they look for them."""

import random

import numpy as np
import torch

import raysgd
from raysgd import metrics, utils
from raysgd._internal import config, timers
from raysgd.torch.seeding import seeded


def test_the_names_are_the_objects_themselves():
    assert utils.BATCH_SIZE is config.BATCH_SIZE
    assert utils.NUM_SAMPLES is metrics.NUM_SAMPLES == "num_samples"
    assert utils.BATCH_COUNT is metrics.BATCH_COUNT == "batch_count"
    assert utils.AverageMeter is metrics.AverageMeter
    assert utils.AverageMeterCollection is metrics.AverageMeterCollection
    assert utils.TimerStat is timers.TimerStat
    assert utils.TimerCollection is timers.TimerCollection


def test_one_seed_makes_all_generators_begin_alike():
    with seeded(0):  # which puts them back
        drawn = []
        for _ in range(2):
            raysgd.seed_everything(7)
            drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
        assert drawn[0] == drawn[1]
