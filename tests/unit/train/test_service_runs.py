"""Runs of other services in a training function."""

import weakref

import torch

from raysgd.train.runner import _on_worker_0


def test_a_run_that_ignores_everything_keeps_nothing(run):
    run(rank=1, size=2)
    ignored, loss = _on_worker_0(lambda: None), torch.ones(1)
    with ignored as inner:
        inner.log({"loss": loss}).more[0] = loss
    kept = weakref.ref(loss)
    del loss
    assert kept() is None
