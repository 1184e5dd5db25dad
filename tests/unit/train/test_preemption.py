"""What a training function is told of workers that are going to be taken away."""

import pytest
import torch.distributed as dist

from raysgd import train
from raysgd._internal.context import Preemption
from raysgd.train.runner import FunctionRunner


@pytest.fixture
def runner():
    """What hosts a function, and is told that workers are going."""
    runner = FunctionRunner(False)
    runner.announce(Preemption(deadline=12.5, ranks_by_node={"b": [3, 1], "a": [0]}))
    yield runner
    runner.announce(None)


@pytest.mark.parametrize("has_group", [False, True])
def test_a_function_is_told_of_nodes_ranks_and_the_time(run, runner, tmp_path, has_group):
    run()
    if has_group:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/it", rank=0, world_size=1)
    try:
        info = train.get_preemption_info()
    finally:
        if has_group:
            dist.destroy_process_group()
    assert info == train.PreemptionInfo(12500, {"b": [1, 3], "a": [0]})
    assert (info.preempted_node_ids, info.preempted_ranks) == (["a", "b"], [0, 1, 3])
    runner.announce(None)
    assert train.get_preemption_info() is None
