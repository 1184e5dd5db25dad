"""Hosts that vanish, come back, or cannot reach each other, while a group trains on them."""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.conftest import IN_SOAK, wait_until
from tests.hosts.network import Hosts, why_not

NUM_WORKERS = 3
NUM_SAMPLES = 4 * NUM_WORKERS * 200
GRACE_S = 12.0
ELASTIC = {"driver_grace_s": GRACE_S, "initial_s": 0.2, "max_s": 2.0, "warm_spares": False}

pytestmark = pytest.mark.slow("Ray starts on four hosts, and each fault takes seconds")


class Run:
    """A group of workers on hosts 1 to 3, and its driver on host 0."""

    def __init__(self, hosts):
        self.hosts = hosts
        self.folder = hosts.folder / "steps"
        self.folder.mkdir()
        self.log = hosts.folder / "driver.log"
        self._errors = self.log.open("w")
        self._process = hosts.spawn(
            0,
            [sys.executable, "-m", "tests.hosts.drive"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.call("start", hosts.address(0), str(self.folder), NUM_WORKERS, NUM_SAMPLES, ELASTIC)

    def close(self):
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def begin(self, name, *arguments):
        self._is_answered = False
        print(json.dumps([name, arguments]), file=self._process.stdin, flush=True)

    def end(self):
        line = self._process.stdout.readline()
        assert line, self.log.read_text()
        self._is_answered = True
        answer = json.loads(line)
        assert "value" in answer, answer["error"] + self.log.read_text()
        return answer["value"]

    def settle(self):
        """Have all hosts and all workers again, whatever a test that failed has left."""
        for host in range(1 + NUM_WORKERS):
            self.hosts.heal(host)
        self.hosts.part(range(1, 1 + NUM_WORKERS), parted=False)
        if not self._is_answered:
            self._process.stdout.readline()
        self.call("grow", 60)

    def call(self, name, *arguments):
        self.begin(name, *arguments)
        return self.end()

    def epoch(self):
        """Begin an epoch, and return when it is well under way."""
        num_before = len(self.steps())
        self.begin("epoch")
        wait_until(lambda: len(self.steps()) > num_before + 60)

    def steps(self):
        """When each worker had done each step, and how many they were then; in this order."""
        lines = [line for path in self.folder.iterdir() for line in path.read_text().splitlines()]
        return sorted(json.loads(line) for line in lines)

    def pause(self, since):
        """The longest time without a step since then, in seconds, and when it was over."""
        times = [since, *(moment for moment, _ in self.steps() if moment > since)]
        return max((after - before, after) for before, after in itertools.pairwise(times))


@pytest.fixture(scope="module")
def shared():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Hosts([0, 1, 1, 1]) as hosts, contextlib.closing(Run(hosts)) as run:
        yield run


@pytest.fixture
def run(shared):
    """All hosts reach each other, and each has its worker."""
    shared.settle()
    return shared


def kinds(events):
    return [kind for kind, _ in events]


def test_a_host_that_vanishes_costs_three_seconds_and_its_worker_ends(run):
    pid = run.call("workers")[run.hosts.address(3)]
    run.epoch()
    run.hosts.cut(3)
    cut = time.time()
    wait_until(lambda: not psutil.pid_exists(pid), 10)
    assert time.time() - cut < 10
    events = run.end()
    assert run.pause(cut)[0] <= 3.0
    assert kinds(events) == ["lost", "resumed"]
    assert f"its host {run.hosts.address(3)} is unreachable: the driver has heard" in events[0][1]
    run.hosts.heal(3)
    run.call("grow", 60)
    assert run.hosts.address(3) in run.call("workers")


def test_a_link_that_is_down_for_less_costs_its_pause(run):
    run.epoch()
    began = time.time()
    for down_s in (1.0, 1.0, 1.0, 1.8):
        run.hosts.cut(2)
        time.sleep(down_s)
        run.hosts.heal(2)
        time.sleep(1.0)
    assert kinds(run.end()) == []
    assert run.pause(began)[0] < 5.0  # what is lost is sent again after up to twice the time


def test_a_process_that_stands_still_is_on_a_host_that_lives(run):
    pid = run.call("workers")[run.hosts.address(1)]
    run.epoch()
    psutil.Process(pid).send_signal(signal.SIGSTOP)
    time.sleep(5)
    psutil.Process(pid).send_signal(signal.SIGCONT)
    assert kinds(run.end()) == []


def test_workers_hold_still_until_a_driver_that_was_cut_off_comes_back(run):
    before = run.call("workers")
    run.epoch()
    run.hosts.cut(0)
    cut = time.time()
    time.sleep(8)
    run.hosts.heal(0)
    healed = time.time()
    events = run.end()
    assert "lost" not in kinds(events)
    assert run.call("workers") == before
    assert not [moment for moment, _ in run.steps() if cut + 4 < moment < healed]


def test_training_goes_on_while_rays_head_stands_still(run):
    (head,) = run.hosts.processes(0, "gcs_server")
    run.epoch()
    stopped = time.time()
    head.send_signal(signal.SIGSTOP)
    time.sleep(5)
    head.send_signal(signal.SIGCONT)
    assert kinds(run.end()) == []
    assert run.pause(stopped)[0] < 1.0


def test_of_two_that_do_not_reach_each_other_one_is_given_up(run):
    run.epoch()
    run.hosts.part([1, 2])
    parted = time.time()
    events = run.end()
    assert kinds(events)[:2] == ["lost", "resumed"]
    assert "it and these do not reach each other: worker" in events[0][1]
    assert run.pause(parted)[0] < 15
    run.hosts.part([1, 2], parted=False)


def faults(hosts, draw):
    """One fault at random, and its end."""
    host, seconds = draw.randrange(len(hosts.cpus)), draw.choice([0.5, 1.5, 4.0])
    kind = draw.choice(["cut", "stop", "kill"]) if host else "cut"
    if kind == "cut":
        hosts.cut(host)
        time.sleep(seconds)
        hosts.heal(host)
        return
    for process in hosts.processes(host, "ray::Worker"):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            time.sleep(seconds)
            process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("seed", range(int(os.environ.get("RAYSGD_SOAK", "1"))))
def test_whatever_happens_each_sample_counts_once(run, seed):
    draw = random.Random(int(os.environ.get("RAYSGD_SEED", "0")) + seed)
    for _ in range(10 if IN_SOAK else 1):
        run.epoch()
        for _ in range(4):
            faults(run.hosts, draw)
            time.sleep(draw.random())
        run.end()


def test_a_driver_that_is_gone_for_good_leaves_nothing_behind(run):
    pids = run.call("workers").values()
    run.epoch()
    run.hosts.power_off(0)
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), GRACE_S + 10)
