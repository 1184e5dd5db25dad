"""The names that users know, at the home where they look for them."""

from raysgd import metrics, utils
from raysgd._internal import config, timers


def test_the_names_are_the_objects_themselves():
    assert utils.BATCH_SIZE is config.BATCH_SIZE
    assert utils.NUM_SAMPLES is metrics.NUM_SAMPLES == "num_samples"
    assert utils.BATCH_COUNT is metrics.BATCH_COUNT == "batch_count"
    assert utils.AverageMeter is metrics.AverageMeter
    assert utils.AverageMeterCollection is metrics.AverageMeterCollection
    assert utils.TimerStat is timers.TimerStat
    assert utils.TimerCollection is timers.TimerCollection
