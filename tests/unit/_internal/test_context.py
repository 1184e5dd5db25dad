"""The place of a worker, and what a runner is."""

import dataclasses
import pickle

import pytest

from raysgd._internal.context import Progress, WorkerContext


def test_a_worker_alone_is_rank_zero_of_one_without_a_process_group():
    context = WorkerContext()
    assert (context.world_rank, context.world_size, context.local_rank) == (0, 1, 0)
    assert not context.distributed
    assert context.gpu_index is None


@pytest.mark.parametrize("value", [WorkerContext(world_rank=1, world_size=2), Progress(epoch=3)])
def test_contexts_and_progress_travel_and_do_not_change(value):
    assert pickle.loads(pickle.dumps(value)) == value
    field = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, 7)
