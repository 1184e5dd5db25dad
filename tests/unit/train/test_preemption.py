"""Announced preemption, as a training function sees it."""

import pytest
import torch.distributed as dist

from raysgd import train
from raysgd._internal.context import Preemption
from raysgd.train.session import here


@pytest.mark.parametrize("has_group", [False, True])
def test_a_function_gets_the_nodes_the_ranks_and_the_time(run, tmp_path, monkeypatch, has_group):
    run()
    assert train.get_preemption_info() is None
    preemption = Preemption(deadline=12.5, ranks_by_node={"b": [3, 1], "a": [0]})
    monkeypatch.setattr(here, "preemption", preemption)
    if has_group:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/it", rank=0, world_size=1)
    try:
        info = train.get_preemption_info()
    finally:
        if has_group:
            dist.destroy_process_group()
    assert info == train.PreemptionInfo(12500, {"b": [1, 3], "a": [0]})
    assert (info.preempted_node_ids, info.preempted_ranks) == (["a", "b"], [0, 1, 3])
