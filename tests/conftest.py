"""One Ray cluster a process for all tests that need one, and a check that none leaves a thing."""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback

# Some virtual machines announce AMX and end processes that use it, as those do that multiply
# matrices of bfloat16 in torch and TensorFlow.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores: one thread for each
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import pytest

CI_EXAMPLES = 25

IN_SOAK = "RAYSGD_SOAK" in os.environ
"""Whether what another test shows as well, with another framework, is to be shown here too."""
NUM_CPUS = 4
RAY_DATAS_OWN = ("AutoscalingCoordinatorActor", "StatsActor")
"""Actors that Ray Data keeps as long as the cluster lives; they take no CPU."""


SOON_S = 2.0
"""Within how many seconds a failure has to reach the caller, or a death the driver."""


def examples(number):
    """Settings of a property that needs another number of examples than most; a soak scales it."""
    from hypothesis import settings

    return settings(max_examples=number * settings.default.max_examples // CI_EXAMPLES)


def wait_until(condition, timeout_s=20.0):
    """Wait for a condition, which is what tests wait for, never for a time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {condition}"
        time.sleep(0.02)


def assert_names(error, words):
    """Check that an error's text has all the words, which are what it is to name."""
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{missing} not in: {error}"


def own_memory():
    """Return how many bytes this process has allocated, in memory or in swap.

    What else is resident are pages of files, libraries above all. The system takes those back and
    reads them in again as it likes, by hundreds of megabytes.
    """
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return sum(1024 * int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))


def import_horovod(module="horovod"):
    """Return a module of Horovod; skip the test, or the file, where there is none."""
    return pytest.importorskip(
        module, reason="Horovod is not built here: it needs a C++ compiler and cmake 3"
    )


FORKS = multiprocessing.get_context("forkserver")
"""Forks processes of one that has imported what takes three seconds of a processor."""
FORKS.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "raysgd.comm.torch", "raysgd.torch"]
)


class Script:
    """A script in a process of its own, which talks to this one by its standard streams."""

    def __init__(self, code, *arguments):
        from_it, out = FORKS.Pipe(duplex=False)
        into, to_it = FORKS.Pipe(duplex=False)
        arguments = ["-c", *map(str, arguments)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        self._process = FORKS.Process(
            target=_run_script, args=(code, arguments, environment, into, out), daemon=True
        )
        self._process.start()
        into.close()
        out.close()
        self._streams = from_it, to_it
        self.stdout = os.fdopen(os.dup(from_it.fileno()))
        self.stdin = os.fdopen(os.dup(to_it.fileno()), "w")

    def wait(self, timeout_s):
        """Wait for its end, and return its exit code."""
        self._process.join(timeout_s)
        assert not self._process.is_alive(), f"not within {timeout_s} s: the end of the script"
        return self._process.exitcode

    def close(self):
        """End it, if it has not ended."""
        self._process.kill()
        self._process.join()
        for stream in (self.stdout, self.stdin, *self._streams):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _run_script(code, arguments, environment, into, out):
    os.dup2(into.fileno(), 0)
    os.dup2(out.fileno(), 1)
    into.close()
    out.close()
    sys.stdin, sys.stdout, sys.argv = os.fdopen(0, closefd=False), os.fdopen(1, "w"), arguments
    os.environ.clear()
    os.environ.update(environment)
    try:
        exec(compile(code, "script", "exec"), {"__name__": "__main__"})
    except Exception:
        traceback.print_exc(file=sys.stdout)  # which is what a test looks at when it fails
        raise


RANK = """
import sys
import torch.distributed as dist

rank = int(sys.argv[1])

def join(name="all", rank=rank, size=int(sys.argv[2])):
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", int(sys.argv[-1])))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
"""


def run_ranks(script, size):
    """Run a script as each rank of a group; each must print "good".

    A script has its `rank`, may `join` a group, and is told the port of a TCPStore last.
    """
    with running_ranks(script, size):
        pass


@contextlib.contextmanager
def running_ranks(script, size):
    """Run a script as `run_ranks` does, beside what follows, which has the store."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [Script(RANK + script, rank, size, store.port) for rank in range(size)]
    try:
        yield store
        for rank in ranks:
            rank.wait(90)
        assert [rank.stdout.read() for rank in ranks] == ["good\n"] * size
    finally:
        for rank in ranks:
            rank.close()


@pytest.fixture(autouse=True)
def sigint():
    """Ray Tune leaves a handler behind that swallows the next Ctrl-C."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="session")
def cluster():
    """A local Ray with four CPUs, of which two workers or four take all."""
    import ray

    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_DATA_PARQUET_FOOTER_NUM_ACTORS"] = "1"  # of 32, to look at a few small files
    ray.init("local", num_cpus=NUM_CPUS, include_dashboard=False, log_to_driver=False)
    # what passes on the lines that workers print looks for them all the time, and nobody reads them
    ray._private.worker._global_node.kill_log_monitor(check_alive=False)
    yield ray
    ray.shutdown()


def alive_actors():
    """The actors of the cluster that live, but for those that Ray Data keeps."""
    from ray._private.state import actors

    return [
        a
        for a in actors().values()
        if a["State"] != "DEAD" and a["ActorClassName"].lstrip("_") not in RAY_DATAS_OWN
    ]


def _leftovers():
    from ray.util import placement_group_table

    groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
    return alive_actors() + groups


def _children():
    children = set()
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
            if process.status() != psutil.STATUS_ZOMBIE:
                children.add(process.pid)
    return children


@contextlib.contextmanager
def nothing_left(cluster):
    """Fail at the end if an actor, a placement group, a CPU or a child process is left behind."""
    children = _children()
    yield cluster
    wait_until(lambda: not _leftovers())
    wait_until(lambda: cluster.available_resources().get("CPU", 0) == NUM_CPUS)
    wait_until(lambda: _children() <= children)


@pytest.fixture
def ray_cluster(cluster):
    """The shared cluster for one test, which fails if it leaves something."""
    with nothing_left(cluster):
        yield cluster


@pytest.fixture(scope="module")
def module_cluster(cluster):
    """The shared cluster for trainers that a module shares: nothing may be left at its end."""
    with nothing_left(cluster):
        yield cluster


FIRST = (
    "test_tune.py",
    "test_tensorflow.py",
    "test_nodes.py",
    "test_under_fire.py",
)
"""Of the files with workers those that wait most: near the end nothing else would go on beside."""


def pytest_collection_modifyitems(items):
    """Bring them to the front of their folder, which is the last one."""
    items.sort(key=lambda item: "distributed" in item.path.parts and item.path.name not in FIRST)


def pytest_collection_finish(session):
    """Spare the garbage collector what is loaded now: it takes a seventh of the units' time."""
    gc.collect()
    gc.freeze()


def pytest_configure():
    """Take SIGINT, here and in child processes: shells ignore it in what runs in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _register_profiles()


def _register_profiles():
    """Say how many examples to make. Workers import this file too, and load no Hypothesis."""
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "ci",
        max_examples=CI_EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        # the fixtures that properties use are factories: one example leaves nothing to the next
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    settings.register_profile(
        "soak",
        parent=settings.get_profile("ci"),
        max_examples=100 * CI_EXAMPLES,
        derandomize=False,
        print_blob=True,
    )
    settings.load_profile("ci")
