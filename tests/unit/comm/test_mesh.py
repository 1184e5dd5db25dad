"""Reductions of small tensors over direct connections between all ranks."""

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from raysgd.comm.gloo import _COMBINATIONS
from raysgd.comm.mesh import PeerMesh

HOST, PATIENCE_S = "127.0.0.1", 30


@contextlib.contextmanager
def meshes(size):
    """Yield one connected mesh per rank, all in this process."""
    made = [PeerMesh(rank, HOST, "key", PATIENCE_S) for rank in range(size)]
    try:
        on_all(made, lambda mesh: mesh.connect([each.address for each in made]))
        yield made
    finally:
        for mesh in made:
            mesh.close()


def on_all(made, call):
    """Call a function with each mesh, in parallel, and return the results."""
    with ThreadPoolExecutor(len(made)) as threads:
        return [future.result(PATIENCE_S) for future in [threads.submit(call, m) for m in made]]


def begin(mesh, tensor, combine=torch.add, timeout_s=PATIENCE_S / 2, in_thread=True):
    return mesh.all_reduce(tensor, combine, timeout_s, in_thread)


def reduced(made, tensors, combine=torch.add):
    """Reduce one tensor per rank in place, and return the tensors."""
    on_all(made, lambda m: begin(m, tensors[made.index(m)], combine, in_thread=False).result())
    return tensors


@pytest.fixture(scope="module")
def pair():
    with meshes(2) as made:
        yield made


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_results_are_those_of_adding_in_the_order_of_the_ranks(size, dtype):
    with meshes(size) as made:
        tensors = [(torch.randn(3, 7) * 100).to(dtype) for _ in made]
        expected = torch.stack(tensors)[0].clone()
        for tensor in tensors[1:]:
            expected = expected + tensor
        assert all(torch.equal(tensor, expected) for tensor in reduced(made, tensors))


@given(values=st.lists(st.tuples(st.integers(), st.integers()), max_size=50), data=st.data())
def test_any_content_is_reduced(pair, values, data):
    combine = data.draw(st.sampled_from([torch.add, torch.minimum, torch.maximum]))
    bounded = [[int(v) % 2**40 for v in pair_of] for pair_of in values]
    tensors = [torch.tensor([each[rank] for each in bounded], dtype=torch.int64) for rank in (0, 1)]
    expected = combine(*tensors)
    assert all(torch.equal(tensor, expected) for tensor in reduced(pair, tensors, combine))


def test_tensors_may_be_not_contiguous_need_gradients_and_be_negated_lazily(pair):
    tensors = [torch.ones(4, 6, requires_grad=True).t(), torch.ones(12, 4)[::2]]
    assert [each.tolist() for each in reduced(pair, tensors)] == [[[2.0] * 4] * 6] * 2
    tensors = [torch.tensor([1 + 2j]).conj().imag, torch.ones(1)]
    assert [each.tolist() for each in reduced(pair, tensors)] == [[-1.0]] * 2


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("operation", [dist.ReduceOp.MIN, dist.ReduceOp.MAX])
def test_a_nan_of_any_rank_stays(pair, operation, owner, size):
    tensors = [torch.full((size,), float("nan") if rank == owner else 0.0) for rank in (0, 1)]
    reduced(pair, tensors, _COMBINATIONS[operation])
    assert all(bool(tensor.isnan().all()) for tensor in tensors)


def test_reductions_run_in_the_order_of_their_start(pair):
    def reduce(mesh):
        rank = pair.index(mesh)
        tensors = [torch.full((1000,), float(n + rank)) for n in range(100)]
        started = [begin(mesh, t, in_thread=n % 3 != rank) for n, t in enumerate(tensors)]
        for one in reversed(started) if rank else started:
            one.result()
        return [tensor[7].item() for tensor in tensors]

    assert on_all(pair, reduce) == [[2.0 * n + 1 for n in range(100)]] * 2


def test_messages_may_be_longer_than_the_buffers_of_the_system(pair):
    tensors = reduced(pair, [torch.ones(10_000_000) for _ in pair])
    assert all(bool((tensor == 2).all()) for tensor in tensors)


@pytest.mark.parametrize(
    ("size", "device", "said"),
    [(4, "cpu", "gloo/ .*(12|16) bytes.*(12|16) bytes"), (3, "meta", "rank 1 broke|meta")],
)
def test_different_or_failed_reductions_are_an_error_on_all_ranks(size, device, said):
    with meshes(2) as made:

        def reduce(mesh):
            tensors = [torch.ones(3), torch.ones(size, device=device)]
            with pytest.raises((RuntimeError, TypeError), match=said):
                begin(mesh, tensors[made.index(mesh)]).result()

        on_all(made, reduce)


def test_an_interruption_ends_the_wait_and_refuses_all_later_calls():
    with meshes(3) as made:
        started, waiting = (begin(mesh, torch.ones(3)) for mesh in made[:2])
        made[0].interrupt()
        for each in (started, begin(made[0], torch.ones(3), in_thread=False)):
            with pytest.raises(RuntimeError, match=r"gloo/ The driver interrupted"):
                each.result(PATIENCE_S)
        made[2].interrupt()
        with pytest.raises(RuntimeError, match=r"gloo/ The connection to rank [02] broke"):
            waiting.result(PATIENCE_S)


def test_waits_time_out_and_accept_huge_timeouts(pair):
    started = begin(pair[0], torch.ones(3), timeout_s=1e9)
    begin(pair[1], torch.ones(3)).result(PATIENCE_S)
    started.result(PATIENCE_S)
    late = r"gloo/ Timed out after 0\.1 s.*ranks \[0\]"
    with meshes(2) as made, pytest.raises(RuntimeError, match=late):
        begin(made[1], torch.ones(3), timeout_s=0.1).result(PATIENCE_S)


def test_connecting_times_out():
    with socket.create_server((HOST, 0)) as silent:
        mesh = PeerMesh(0, HOST, "key", 0.1)
        with pytest.raises(RuntimeError, match=r"gloo/ .*timed out, waiting for ranks \[1\]"):
            mesh.connect([mesh.address, silent.getsockname()])
        other = PeerMesh(1, HOST, "key", 0.1)
        with pytest.raises(RuntimeError, match=r"gloo/ Workers cannot connect.*timed out"):
            other.connect([silent.getsockname(), other.address])
        other.close()
        mesh.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_waiting_for_a_connection_can_be_interrupted(ahead):
    mesh = PeerMesh(0, HOST, "key", PATIENCE_S)
    if ahead:
        mesh.interrupt()
    with socket.create_server((HOST, 0)) as silent, ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(mesh.connect, [silent.getsockname()] * 2)
        time.sleep(0.05)  # the wait may or may not have begun
        mesh.interrupt()
        with pytest.raises(RuntimeError, match=r"gloo/ The driver interrupted"):
            connecting.result(PATIENCE_S / 2)  # before its own timeout
    mesh.close()
