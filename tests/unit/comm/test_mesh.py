"""Reductions of small tensors between ranks that are connected each to each."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.comm.mesh import Mesh
from tests.conftest import wait_until

PATIENCE_S = 30


def make_mesh(rank, timeout_s=PATIENCE_S):
    return Mesh(rank, "127.0.0.1", "key", timeout_s)


@contextlib.contextmanager
def meshes(size):
    """Yield one mesh a rank, all in this process."""
    made = [make_mesh(rank) for rank in range(size)]
    try:
        on_all(made, lambda mesh: mesh.connect([each.address for each in made]))
        yield made
    finally:
        for mesh in made:
            mesh.close()


def on_all(made, call):
    """Call on each mesh, in a thread of its own."""
    with ThreadPoolExecutor(len(made)) as threads:
        return [future.result(PATIENCE_S) for future in [threads.submit(call, m) for m in made]]


def reduced(made, tensors, combine=torch.add):
    """Reduce one tensor of each rank, and return them."""

    def reduce(mesh):
        mesh.finish(mesh.start(tensors[made.index(mesh)], combine, lambda: None), PATIENCE_S / 2)

    on_all(made, reduce)
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


def test_tensors_need_not_be_contiguous_and_may_need_gradients(pair):
    tensors = [torch.ones(4, 6, requires_grad=True).t(), torch.ones(12, 4)[::2]]
    reduced(pair, tensors)
    assert [tensor.tolist() for tensor in tensors] == [[[2.0] * 4] * 6] * 2


def test_many_are_under_way_at_once_and_finished_in_any_order(pair):
    ended = []

    def reduce(mesh):
        rank = pair.index(mesh)
        tensors = [torch.full((1000,), float(n + rank)) for n in range(200)]
        started = [mesh.start(t, torch.add, lambda: ended.append(rank)) for t in tensors]
        for one in reversed(started) if rank else started:
            mesh.finish(one, PATIENCE_S)
        return [tensor[7].item() for tensor in tensors]

    assert on_all(pair, reduce) == [[2.0 * n + 1 for n in range(200)]] * 2
    assert sorted(ended) == [0] * 200 + [1] * 200


def test_look_completes_a_reduction(pair):
    first, second = pair
    mine, ended = torch.ones(3), []
    started = first.start(mine, torch.add, lambda: ended.append(True))
    first.look()
    assert not started.done
    assert not ended
    second.start(torch.ones(3), torch.add, lambda: None)
    wait_until(lambda: first.look() or started.done, PATIENCE_S)
    assert (mine.tolist(), ended) == ([2.0] * 3, [True])
    second.look()


def test_different_reductions_are_an_error_on_all_ranks():
    with meshes(2) as made:

        def reduce(mesh):
            mine = torch.ones(3 + made.index(mesh))
            with pytest.raises(RuntimeError, match=r"gloo/ .*(12|16) bytes.*(12|16) bytes"):
                mesh.finish(mesh.start(mine, torch.add, lambda: None), PATIENCE_S)

        on_all(made, reduce)


def test_threads_wait_for_several_at_once():
    with meshes(2) as made:
        first, second = made
        tensors = [torch.ones(3), torch.ones(3)]
        early = first.start(tensors[0], torch.add, lambda: None)
        with ThreadPoolExecutor(2) as threads:
            waits = [threads.submit(first.finish, early, PATIENCE_S)]
            wait_until(lambda: first._reads, PATIENCE_S)
            # the thread that waits does not keep another from beginning
            late = first.start(tensors[1], torch.add, lambda: None)
            waits.append(threads.submit(first.finish, late, PATIENCE_S))
            for _ in range(2):
                second.finish(second.start(torch.ones(3), torch.add, lambda: None), PATIENCE_S)
            for waited in waits:
                waited.result(PATIENCE_S)
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 3] * 2


def waiting(mesh):
    """Start a reduction that others do not take part in, and a thread that waits for it."""
    ended, errors = [], []
    started = mesh.start(torch.ones(3), torch.add, lambda: ended.append(True))

    def wait():
        with pytest.raises(RuntimeError) as caught:
            mesh.finish(started, PATIENCE_S)
        errors.append(str(caught.value))

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: mesh._reads, PATIENCE_S)
    return thread, errors, ended


def test_an_interruption_ends_the_wait_and_refuses_all_later_calls():
    with meshes(3) as made:
        thread, errors, ended = waiting(made[0])
        made[0].interrupt()
        thread.join(PATIENCE_S)
        assert errors == ["gloo/ The driver interrupted this collective."]
        with pytest.raises(RuntimeError, match=r"gloo/ The driver interrupted"):
            made[0].start(torch.ones(3), torch.add, lambda: ended.append("never"))
        assert not ended
    assert ended == [True]


def test_closed_rank_ends_waits_of_others():
    with meshes(3) as made:
        thread, errors, _ = waiting(made[0])
        made[2].close()
        thread.join(PATIENCE_S)
        assert errors[0].startswith("gloo/ The connection to rank 2 broke")


def test_a_wait_may_be_longer_than_the_system_counts(pair):
    first, second = pair
    started = first.start(torch.ones(3), torch.add, lambda: None)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(first.finish, started, 1e9)
        wait_until(lambda: first._reads, PATIENCE_S)
        second.finish(second.start(torch.ones(3), torch.add, lambda: None), 1e9)
        waiting.result(PATIENCE_S)


def test_waits_are_bounded():
    with meshes(2) as made:
        started = made[0].start(torch.ones(3), torch.add, lambda: None)
        for give_up in (False, True):
            with pytest.raises(RuntimeError, match=r"gloo/ Timed out after 0\.1 s.*ranks \[1\]"):
                made[0].finish(started, 0.1, give_up)
            assert made[0].broken is give_up


def test_connecting_is_given_up_after_a_while():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mesh = make_mesh(0, 0.1)
        with pytest.raises(RuntimeError, match=r"gloo/ .*timed out, waiting for ranks \[1\]"):
            mesh.connect([mesh.address, silent.getsockname()])
        other = make_mesh(1, 0.1)
        with pytest.raises(RuntimeError, match=r"gloo/ Workers cannot connect.*timed out"):
            other.connect([silent.getsockname(), other.address])
        other.close()
        mesh.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_connecting_is_interrupted(rank):
    """Where a rank waits for the others, and where it waits for the answer of one."""
    mesh = make_mesh(rank)
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(mesh.connect, [silent.getsockname()] * 2)
        time.sleep(0.05)  # whether it waits already or not must not matter
        mesh.interrupt()
        with pytest.raises(RuntimeError, match=r"gloo/ The driver interrupted"):
            connecting.result(PATIENCE_S / 2)  # before its own timeout
    mesh.close()
