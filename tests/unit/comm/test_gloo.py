"""The gloo group whose collectives can be interrupted."""

import contextlib
import datetime
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from raysgd._internal.step_timing import BACKWARD, WAIT, StepTiming
from raysgd.comm.gloo import GlooGroup
from raysgd.comm.mesh import PeerMesh
from tests.conftest import TORCH, Script, run_ranks, wait_until

TIMEOUT = datetime.timedelta(seconds=30)


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    group = GlooGroup.init(HashStore(), 0, 1, TIMEOUT)
    yield group
    group.release()
    dist.destroy_process_group()


def test_collectives_do_what_they_do_in_gloo(group):
    ones = torch.ones(3)
    dist.all_reduce(ones)
    dist.broadcast(ones, 0)
    dist.reduce(ones, 0)
    dist.barrier()
    gathered = [torch.zeros(3)]
    dist.all_gather(gathered, ones)
    dist.gather(ones, gathered)
    scattered = torch.zeros(3)
    dist.scatter(scattered, [ones])
    flat = torch.zeros(3)
    # PyTorch has the shorter name since 2.13, and warns of the older one.
    (dist.all_gather_single if TORCH >= (2, 13) else dist.all_gather_into_tensor)(flat, ones)
    swapped = torch.zeros(3)
    dist.all_to_all_single(swapped, ones)
    for result in (*gathered, scattered, flat, swapped):
        assert result.tolist() == [1, 1, 1]
    objects = [None]
    dist.all_gather_object(objects, {"a": 1})
    dist.broadcast_object_list(objects, 0)
    assert objects == [{"a": 1}]


def test_an_all_gather_of_different_sizes_is_refused_on_all_ranks(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = HashStore()

    def gather(rank):
        group = GlooGroup(store, rank, 2, TIMEOUT)
        uneven, even = torch.ones(3 + rank), torch.full((2,), float(rank))
        with pytest.raises(ValueError, match=r"passed 12 to 16 bytes .*drop_last=True"):
            group.allgather([[torch.zeros_like(uneven)] * 2], [uneven])
        gathered = [torch.zeros(2), torch.zeros(2)]
        group.allgather([gathered], [even]).wait()
        group.release()
        return [each.tolist() for each in gathered]

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(gather, range(2))] == [[[0, 0], [1, 1]]] * 2


@pytest.mark.parametrize("is_meshed", [False, True])
def test_the_wait_for_another_rank_is_a_phase_of_the_step(is_meshed, monkeypatch):
    """The other rank joins when this one waits."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, timing = HashStore(), StepTiming()
    made = [PeerMesh(rank, "127.0.0.1", "key", 30.0) for rank in range(2)]

    def reduce(rank):
        mesh, group = made[rank], GlooGroup(store, rank, 2, TIMEOUT)
        with contextlib.closing(mesh), contextlib.ExitStack() as stack:
            stack.callback(group.release)
            if is_meshed:
                mesh.connect([each.address for each in made])
                group.mesh = mesh
            options = dist.AllreduceOptions()
            options.asyncOp = False
            tensor = torch.ones(2)
            if rank == 1:
                wait_until(lambda: timing.phase == WAIT)
                group.allreduce([tensor], options).wait()
                return tensor.tolist()
            with timing.running():
                timing.begin(BACKWARD)
                group.allreduce([tensor], options).wait()
                assert timing.phase == BACKWARD
            return tensor.tolist()

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(reduce, range(2))] == [[2, 2], [2, 2]]
    assert timing.totals.phase_s[WAIT] > 0


def test_errors_of_gloo_reach_the_caller(group):
    with pytest.raises(RuntimeError, match=r"BAND"):
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND)
    future = dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND, async_op=True).get_future()
    with pytest.raises(RuntimeError, match=r"BAND"):
        future.wait()
    with pytest.raises(RuntimeError, match="dense"):
        dist.broadcast(torch.ones(2).to_sparse(), 0)  # refused before it starts
    assert group.current_collective() is None


@pytest.mark.parametrize(
    "wait",
    [
        lambda group: group.allreduce([torch.ones(2)]).wait(),
        lambda group: group.barrier().get_future().wait(),
        lambda group: group.recv([torch.ones(2)], 1, 0).wait(),
        lambda group: group.recv([torch.ones(2)], 1, 0).result(),
        lambda group: group.send([torch.ones(10**8)], 1, 0).get_future().wait(),
    ],
)
def test_operations_without_their_peer_time_out(monkeypatch, wait):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, timeout = HashStore(), datetime.timedelta(seconds=1)  # also to connect
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: GlooGroup(store, rank, 2, timeout), range(2)))
    with pytest.raises(RuntimeError, match="imed out"):
        wait(groups[0])
    assert groups[0].current_collective() is None
    for group in groups:
        assert group._running.wait_for_end(20)
        group.release()


@pytest.mark.parametrize(
    ("name", "more"),
    [("all_gather_single", ()), ("reduce_scatter_single", ()), ("all_to_all_single", ([], []))],
)
def test_names_that_newer_versions_of_pytorch_call_can_be_interrupted(group, name, more):
    result = torch.zeros(2)
    getattr(group, name)(result, torch.ones(2), *more).wait()
    assert result.tolist() == [1, 1]
    group.interrupt()
    with pytest.raises(RuntimeError, match="interrupted"):
        getattr(group, name)(result, torch.ones(2), *more)


def test_an_operation_that_never_ends_does_not_block_the_release(group):
    """The destructor of gloo would wait for it."""

    def ending():
        return [each for each in threading.enumerate() if each.name == "raysgd-gloo-end"]

    wait_until(lambda: not ending())  # of earlier tests
    group.release()
    assert not ending()
    group._running.begin(0, print, is_collective=True)
    group.release()
    (thread,) = ending()
    assert thread.daemon
    group._running.finish(0)
    thread.join(10)
    assert not thread.is_alive()


PEER = """
import datetime, os, signal, sys, threading, time
import torch, torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from raysgd.comm.gloo import GlooGroup

rank, port, operation = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = TCPStore("127.0.0.1", port, is_master=False)
group = GlooGroup.init(store, rank, 2, datetime.timedelta(seconds=200))
large = torch.zeros(100_000_000)
operations = {
    "coalesced": lambda: dist._broadcast_coalesced(group, [large], 2**30, 0),
    "point_to_point": lambda: dist.recv(large, 0) if rank else dist.send(large, 1),
    "future": lambda: dist.broadcast(large, 0, async_op=True).get_future().wait(),
}
dist.barrier()
if rank == 1:
    def interrupt():
        sys.stdin.readline()
        group.interrupt()
    threading.Thread(target=interrupt, daemon=True).start()
print("ready", flush=True)
if rank == 0:  # in the midst of it
    threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
try:
    while True:
        operations[operation]()
except RuntimeError as error:
    print("RuntimeError", str(error).replace("\\n", " "), flush=True)
started = time.monotonic()
group.release()
dist.destroy_process_group()
print("left" if time.monotonic() - started < 20 else "late", flush=True)
"""


@pytest.mark.parametrize("operation", ["coalesced", "point_to_point", "future"])
def test_interrupt_wakes_a_wait_for_half_a_message(operation):
    """If a peer dies within a message, even shutting down the sockets wakes no thread."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    peers = [Script(PEER, rank, store.port, operation) for rank in range(2)]
    try:
        assert [peer.stdout.readline() for peer in peers] == ["ready\n"] * 2
        peers[0].wait(30)
        said = []
        reader = threading.Thread(target=lambda: said.append(peers[1].stdout.readline()))
        reader.start()
        with contextlib.suppress(BrokenPipeError):  # it may have noticed the death already
            peers[1].stdin.write("\n")
            peers[1].stdin.flush()
        wait_until(lambda: said, 20)
        assert said[0].startswith("RuntimeError")
        assert "gloo/" in said[0]
        assert peers[1].stdout.readline() == "left\n"
    finally:
        for peer in peers:
            peer.close()


MESHED = """
import datetime, json, os, sys
import pytest, torch, torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel
from raysgd.comm import gloo
from raysgd.comm.gloo import GlooGroup
from raysgd.comm.mesh import PeerMesh

store = TCPStore("127.0.0.1", int(sys.argv[-1]), is_master=False)
patience = datetime.timedelta(seconds=60)
group = GlooGroup.init(store, rank, 2, patience)
mesh = PeerMesh(rank, "127.0.0.1", "key", 60)
store.set(f"mesh/{rank}", json.dumps(mesh.address))
addresses = [tuple(json.loads(store.get(f"mesh/{r}"))) for r in range(2)]

def trained():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(20)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        features = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        model(features).square().sum().backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

by_gloo = trained()
mesh.connect(addresses)
group.mesh = mesh
by_mesh = trained()
assert torch.equal(by_gloo, by_mesh)
assert mesh._num_started >= 5 * 2, mesh._num_started  # several buckets a step

class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used = torch.nn.ModuleList(torch.nn.Linear(8, 1) for _ in range(3))

    def forward(self, features):
        return self.used[rank](features)  # the third layer by nobody

half = DistributedDataParallel(Half(), find_unused_parameters=True)
half(torch.ones(2, 8)).sum().backward()
used, other, unused = (layer.weight.grad for layer in half.module.used)
assert used.tolist() == other.tolist() == [[1.0] * 8] and unused is None

before = mesh._num_started
small, large = torch.full((3,), rank + 1.0), torch.full((gloo.SMALL_BYTES,), rank + 1.0)
works = [dist.all_reduce(each, async_op=True) for each in (small, large)]
for work in reversed(works):
    work.wait()
assert small.tolist() == [3.0] * 3 and bool((large == 3).all())
assert all(work.is_completed() for work in works)
assert works[0].result()[0] is small
assert works[1].result()[0].data_ptr() == large.data_ptr()
assert mesh._num_started == before + 1
assert group.current_collective() is None

future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
assert future.wait()[0].tolist() == [2.0] * 3
for op, expected in [("MIN", 1), ("MAX", 2), ("PRODUCT", 2)]:
    number = torch.tensor([rank + 1])
    dist.all_reduce(number, op=getattr(dist.ReduceOp, op))
    assert number.item() == expected
group.allreduce([number]).wait()  # without options
assert number.item() == 4
dist.all_reduce(number.to(torch.uint8))
options, eighth = dist.AllreduceOptions(), large[: len(large) // 8]
assert [gloo._combination(size, [eighth], options) for size in (3, 4)] == [torch.add, None]
average = torch.tensor([rank + 1.0])
dist.all_reduce(average, op=dist.ReduceOp.AVG)
assert average.item() == 1.5
assert mesh._num_started == before + 4

# the other rank receives an operation that this rank does not wait for
for _ in range(5):
    if rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True)
        dist.recv(small, 1)
    else:
        dist.all_reduce(torch.ones(3))
        dist.send(small, 0)
    dist.barrier()

if rank == 0:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    mesh.interrupt()
    future = work.get_future()
    for wait in (work.wait, future.wait):
        with pytest.raises(RuntimeError, match="gloo/"):
            wait()
    assert work.is_completed()
    store.set("interrupted", "")
else:
    store.wait(["interrupted"])
    with pytest.raises(RuntimeError, match="gloo/ The connection to rank 0 broke"):
        dist.all_reduce(torch.ones(3))  # to which what the other rank said before may have come
        dist.all_reduce(torch.ones(3))
mesh.close()
group._running.wait_for_end()  # threads record their ends shortly after the results
group.release()
dist.destroy_process_group()
print("good", flush=True)
"""


def test_small_reductions_go_by_the_mesh_with_the_same_bits():
    run_ranks(MESHED, 2)


SCATTERED = """
import datetime, sys
import pytest, torch, torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    reduce_scatter_tensor,
    reduce_scatter_tensor_coalesced,
)
from raysgd.comm.gloo import GlooGroup

store = TCPStore("127.0.0.1", int(sys.argv[-1]), is_master=False)
group = GlooGroup.init(store, rank, 2, datetime.timedelta(seconds=60))
part = torch.zeros(2)
dist.reduce_scatter_tensor(part, torch.arange(4.0))
assert part.tolist() == [[0, 2], [4, 6]][rank]
given = (rank + 1) * torch.arange(4.0)
work = dist.reduce_scatter_tensor(part, given, dist.ReduceOp.AVG, async_op=True)
assert work.get_future().wait()[0] is part is work.result()[0]
assert part.tolist() == [[0, 1.5], [3, 4.5]][rank]
dist.reduce_scatter_tensor(part, rank * torch.arange(4.0), dist.ReduceOp.MAX)
assert part.tolist() == [[0, 1], [2, 3]][rank]
found = reduce_scatter_tensor(torch.arange(4.0), "sum", 0, group)
assert found.tolist() == [[0, 2], [4, 6]][rank]
given = [torch.arange(4.0), torch.ones(2)]
found = reduce_scatter_tensor_coalesced(given, "sum", [0, 0], group)
assert [each.tolist() for each in found] == [[[0, 2], [4, 6]][rank], [2]]
work = dist.reduce_scatter(part, [torch.ones(2), torch.full((2,), 3.0)], async_op=True)
assert work.get_future().wait()[0] is part and part.tolist() == [2.0 + 4 * rank] * 2

mine, theirs = torch.full((3,), float(rank)), torch.zeros(3)
num_collectives = group._running._num_collectives
works = [dist.isend(mine, 1 - rank), dist.irecv(theirs, 1 - rank)]
for work in works:
    assert work.wait(datetime.timedelta(seconds=60))
assert theirs.tolist() == [1.0 - rank] * 3 and all(work.is_completed() for work in works)
if rank:
    dist.send(mine, 0)
else:
    assert dist.recv(mine) == 1 and mine.tolist() == [1.0] * 3  # from any rank
assert group._running._num_collectives == num_collectives

if rank == 0:
    works = [
        dist.reduce_scatter_tensor(part, torch.arange(4.0), async_op=True),
        all_gather_tensor(part, 0, group),
        reduce_scatter_tensor(torch.arange(4.0), "sum", 0, group),
    ]
    with pytest.raises(RuntimeError, match=r"gloo/ Timed out after 0\\.1 s\\."):
        works[0].wait(datetime.timedelta(seconds=0.1))
    group.interrupt()
    for waits in works:
        with pytest.raises(RuntimeError, match="interrupted"):
            waits.wait()
    store.set("interrupted", "")
else:
    store.wait(["interrupted"])
print("good", flush=True)
"""


@pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")
def test_reduce_scatter_and_send_recv_work_and_can_be_interrupted():
    run_ranks(SCATTERED, 2)
