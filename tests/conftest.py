"""Shared helpers and fixtures: one Ray cluster per process, and a check for leftovers."""

import contextlib
import gc
import importlib.metadata
import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback

# Some virtual machines report AMX but kill processes that use it. PyTorch and TensorFlow use it
# to multiply bfloat16 matrices.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# Like workers with one CPU: another number of threads rounds sums differently.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# By default, Ray gives its workers a low priority: on a busy machine, their imports take minutes.
os.environ.setdefault("RAY_worker_niceness", "0")

import psutil
import pytest

from tests.forked_worker import forked_workers

with contextlib.suppress(ImportError):  # see `load_triton_first`
    import triton  # noqa: F401

CI_EXAMPLES = 25


def _version(name):
    major, minor, *_ = importlib.metadata.version(name).split(".")
    return int(major), int(minor)


TORCH = _version("torch")
RAY = _version("ray")
HAS_FULL_SHARDING = TORCH >= (2, 13)
needs_full_sharding = pytest.mark.skipif(
    not HAS_FULL_SHARDING, reason='sharding="full" needs PyTorch 2.13'
)
SHARDINGS = ["optimizer", pytest.param("full", marks=needs_full_sharding)]

IN_SOAK = "RAYSGD_SOAK" in os.environ
"""Whether this is a soak run, which includes slow tests of rare combinations."""
NUM_CPUS = 4
RAY_DATAS_OWN = ("AutoscalingCoordinatorActor", "StatsActor")
"""Actors of Ray Data that live as long as the cluster and use no CPU."""


SOON_S = 30.0
"""Seconds in which a failure must be seen: a busy machine needs less, and timeouts are longer."""


def examples(number):
    """Return Hypothesis settings with this number of examples, which a soak run scales up."""
    from hypothesis import settings

    return settings(max_examples=number * settings.default.max_examples // CI_EXAMPLES)


def wait_until(condition, timeout_s=20.0):
    """Wait until a condition holds. Tests wait for conditions, never for a fixed time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {condition}"
        time.sleep(0.02)


def has_ended(pid):
    """Return whether a process has ended, also if nobody has waited for it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def run_python(*arguments, cwd=None, **variables):
    """Run Python in a process of its own, with more environment variables. It must succeed."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=cwd,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def assert_names(error, words):
    """Check that the message of an error contains all words."""
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{missing} not in: {error}"


needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"
)
needs_runtime_env = pytest.mark.skipif(
    " " in sys.executable,
    reason="Ray cannot start workers with a runtime_env if the path of Python has a space",
)
needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


def import_horovod(module="horovod"):
    """Return a module of Horovod. Skip the test or the file if Horovod is missing."""
    return pytest.importorskip(
        module, reason="Horovod is not built here: it needs a C++ compiler and cmake 3"
    )


FORKS = multiprocessing.get_context("forkserver")
"""Forks a server process that has preloaded modules. Their import takes three CPU seconds."""
FORKS.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "raysgd.comm.torch", "raysgd.torch"]
)


class Script:
    """A script in a child process. Its standard input and output are pipes to this process."""

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
        """Wait for the end of the script and return its exit code."""
        self._process.join(timeout_s)
        assert not self._process.is_alive(), f"not within {timeout_s} s: the end of the script"
        return self._process.exitcode

    def close(self):
        """Kill the script and close the streams."""
        self._process.kill()
        self._process.join()
        for stream in (self.stdout, self.stdin, *self._streams):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _run_script(code, arguments, environment, into, out):
    os.dup2(into.fileno(), 0)
    into.close()
    # Only what Python prints: gloo before PyTorch 2.10 writes to the file descriptor 1.
    stdout = os.fdopen(os.dup(out.fileno()), "w")
    out.close()
    sys.stdin, sys.stdout, sys.argv = os.fdopen(0, closefd=False), stdout, arguments
    os.environ.clear()
    os.environ.update(environment)
    measure(os.environ.get("PYTEST_CURRENT_TEST", ""))  # the server began in another test
    try:
        exec(compile(code, "script", "exec"), {"__name__": "__main__"})
    except Exception:
        traceback.print_exc(file=sys.stdout)  # a failing test shows this stream
        raise


def measure(test):
    """Let coverage, if it runs, store its data so far, and record what this test executes."""
    coverage = sys.modules.get("coverage")
    if coverage and (measured := coverage.Coverage.current()):
        measured.save()
        measured.switch_context(test)


RANK = """
import sys
import torch.distributed as dist

rank = int(sys.argv[1])

def join(name="all", rank=rank, size=int(sys.argv[2])):
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", int(sys.argv[-1])))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
"""


def run_ranks(script, size):
    """Run a script on each rank of a group. Each rank must print "good".

    The script can use `rank` and `join` of `RANK`. Its last argument is the port of a TCPStore.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [Script(RANK + script, rank, size, store.port) for rank in range(size)]
    try:
        for rank in ranks:
            rank.wait(90)
        assert [rank.stdout.read() for rank in ranks] == ["good\n"] * size
    finally:
        for rank in ranks:
            rank.close()


@pytest.fixture(autouse=True)
def sigint():
    """Restore the SIGINT handler, because Ray Tune leaves one that ignores the next Ctrl-C."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(autouse=True)
def inboxes():
    """Close the inboxes of simulated drivers that a test does not shut down."""
    yield
    seam = sys.modules.get("tests.blackbox.simulation.seam")
    while seam and seam.DRIVERS:
        seam.DRIVERS.pop().controller.snapshots.replace_with()


@pytest.fixture(scope="session")
def cluster():
    """A local Ray cluster with four CPUs, which all tests of this process share."""
    import ray

    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_DATA_PARQUET_FOOTER_NUM_ACTORS"] = "1"  # enough for small files; default 32
    with forked_workers():
        ray.init("local", num_cpus=NUM_CPUS, include_dashboard=False, log_to_driver=False)
        node = ray._private.worker._global_node
        processes = [info.process for infos in node.all_processes.values() for info in infos]
        # the log monitor polls all the time for output of workers that no test reads
        node.kill_log_monitor(check_alive=False)
        yield ray
        ray.shutdown()
        for process in processes:  # Ray waits for a second only, and a busy machine needs more
            process.wait(60)


def all_actors():
    """Return the IDs of all actors, dead ones included, or None if Ray is not running."""
    import ray
    from ray._private.state import actors

    return set(actors()) if ray.is_initialized() else None


def alive_actors():
    """Return the actors that are alive, except those that Ray Data keeps."""
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
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if process.status() != psutil.STATUS_ZOMBIE:
                children.add(process.pid)
    return children


@contextlib.contextmanager
def nothing_left(cluster):
    """Fail if the block leaves an actor, a placement group, a used CPU, or a child process."""
    children = _children()
    yield cluster
    wait_until(lambda: not _leftovers())
    wait_until(lambda: cluster.available_resources().get("CPU", 0) == NUM_CPUS)
    wait_until(lambda: _children() <= children)


@pytest.fixture
def ray_cluster(cluster):
    """The shared cluster, for one test. The test fails if it leaves something behind."""
    with nothing_left(cluster):
        yield cluster


@pytest.fixture(scope="module")
def module_cluster(cluster):
    """The shared cluster, for the trainers of a module. The module must leave nothing behind."""
    with nothing_left(cluster):
        yield cluster


@pytest.fixture
def fresh(module_workers):
    """The workers that the tests of a module share, in their initial state."""
    return module_workers.fresh()


FIRST = (
    "test_tune.py",
    "test_tensorflow.py",
    "test_nodes.py",
)
"""Files of `distributed` to run early. They mostly wait, so other tests should run in parallel."""


def pytest_xdist_auto_num_workers():
    """Return the number of processes for `make test`: one more than CPUs, as some tests wait."""
    return psutil.cpu_count() + 1


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items):
    """Move the tests of hosts to the start, and those of `distributed` to the end.

    The former mostly wait, and take longer than any other file. Files in `FIRST` stay between.

    In each file, the tests that need a free cluster come first. Tests that end shared workers come
    after those that share them, and before those that start workers of their own, for which there
    is no room earlier.
    """
    yield
    files = {path: number for number, path in enumerate(dict.fromkeys(i.path for i in items))}
    enders = {i.path for i in items if i.get_closest_marker("ends_shared")}

    def place(item):
        is_early = "hosts" in item.path.parts
        is_late = "distributed" in item.path.parts and item.path.name not in FIRST
        starts_own = item.path in enders and "module_cluster" in item._fixtureinfo.argnames
        marker = item.get_closest_marker("ends_shared")
        ends_shared = 0 if marker is None else marker.kwargs.get("place", 1)
        shares = "ray_cluster" not in item.fixturenames
        return is_late - is_early, files[item.path], shares, starts_own, ends_shared

    items.sort(key=place)


def pytest_collection_finish(session):
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def frozen_modules():
    """Exempt what is loaded from garbage collection: each trainer collects when it shuts down."""
    yield
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    """Handle SIGINT here and in child processes, because shells ignore it in background jobs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # until the tests are collected, which loads modules
    if RAY < (2, 60):  # it keeps child processes and files open, and warns of its next releases
        for ignored in (
            ":ResourceWarning",
            ":pytest.PytestUnraisableExceptionWarning",
            "Tip. In future versions of Ray:FutureWarning",
        ):
            config.addinivalue_line("filterwarnings", f"ignore:{ignored}")
    _register_profiles()


def _register_profiles():
    """Register the profiles of Hypothesis. Workers import this file, but not Hypothesis."""
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "ci",
        max_examples=CI_EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        # the fixtures of property tests are factories, so examples share no state
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
