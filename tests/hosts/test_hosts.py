"""Hosts become unreachable and come back while a group trains on them."""

import contextlib
import itertools
import json
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.conftest import IN_SOAK, wait_until
from tests.hosts.network import Hosts, why_not

NUM_WORKERS = 2
CPUS = [0, 1, 2]
"""Number of CPUs of each host. There is room for one more worker."""
SAMPLES_PER_WORKER = 4 * 50
GRACE_S = 40.0 if IN_SOAK else 6.0
LOST_S = 5.0
"""Most seconds from the cut of a host's network to the next step, on the idle machine of a soak."""
ELASTIC = {"backoff_initial_s": 0.2, "backoff_max_s": 2.0, "resize_cooldown_s": 0.5}

pytestmark = pytest.mark.slow("Ray starts on three hosts, and each fault takes seconds")


class Run:
    """A group of workers, and its driver on host 0."""

    def __init__(self, hosts, grace_s=GRACE_S, num_workers=NUM_WORKERS):
        self.hosts = hosts
        self.folder = hosts.folder / "steps"
        self.folder.mkdir()
        self.log = hosts.folder / "driver.log"
        self._errors = self.log.open("w")
        self._is_training = False
        self._read = {}
        self._steps = []
        self._process = hosts.spawn(
            0,
            [sys.executable, "-m", "tests.hosts.drive"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        elastic = {**ELASTIC, "driver_grace_s": grace_s}
        self.num_workers, self.num_samples = num_workers, SAMPLES_PER_WORKER * num_workers
        self.call(
            "start", hosts.address(0), str(self.folder), num_workers, self.num_samples, elastic
        )

    def close(self):
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def call(self, name, *arguments):
        print(json.dumps([name, arguments]), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self):
        line = self._process.stdout.readline()
        assert line, self.log.read_text()
        answer = json.loads(line)
        assert "value" in answer, answer["error"] + self.log.read_text()
        return answer["value"]

    def train(self):
        """Start training until `end`. Return after the first steps."""
        (self.folder / "enough").unlink(missing_ok=True)
        self.workers = self.call("workers")
        began = time.time()
        print(json.dumps(["train", []]), file=self._process.stdin, flush=True)
        self._is_training = True
        wait_until(lambda: len(self.steps(began)) > 10 * self.num_workers)

    def end(self):
        """End the training with all workers, and return the events since it began."""
        (self.folder / "enough").touch()
        self._is_training = False
        return self._answer()

    def settle(self):
        """Reconnect all hosts and end the training, in case the last test failed."""
        for host in range(len(self.hosts.cpus)):
            self.hosts.heal(host)
        if self._is_training:
            self.end()

    def alone(self):
        """Return the workers that are alone on their host, by host."""
        others = range(1, len(self.hosts.cpus))
        found = {host: self.hosts.processes(host, "ray::Worker") for host in others}
        return {host: workers[0] for host, workers in found.items() if len(workers) == 1}

    def steps(self, since):
        """Return the steps of all workers since a time, sorted, as (time, group size, step)."""
        for path in self.folder.glob("steps-*"):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self._steps += map(json.loads, whole.splitlines())
        self._steps.sort()
        return [step for step in self._steps if step[0] > since]

    def await_size(self, size, since):
        """Wait for a step of a group of this size since a time. Return the time of the step."""
        wait_until(lambda: any(num == size for _, num, _ in self.steps(since)), 60)
        return next(moment for moment, num, _ in self.steps(since) if num == size)

    def await_epochs(self, number):
        """Wait for the steps of this many epochs."""
        began, num_samples = time.time(), number * self.num_samples
        wait_until(lambda: 4 * len(self.steps(began)) > num_samples, 60)

    def redone(self, since):
        """Return the number of steps that the group has repeated since a time."""
        ahead, most = 0, 0
        for _, _, step in self.steps(since):
            most, ahead = max(most, ahead - step), max(ahead, step)
        return max(0, most - 1)  # workers are up to one step apart

    def pause(self, since):
        """Return the longest time without a step since a time, in seconds."""
        times = [since, *(moment for moment, *_ in self.steps(since))]
        return max(after - before for before, after in itertools.pairwise(times))


@pytest.fixture(scope="module")
def shared():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Hosts(CPUS) as hosts, contextlib.closing(Run(hosts)) as run:
        yield run


@pytest.fixture
def run(shared):
    """A group that trains, and hosts that all reach each other."""
    shared.settle()
    shared.train()
    return shared


def kinds(events):
    return [kind for kind, _ in events]


def test_a_silent_host_costs_five_seconds_and_its_worker_ends(run):
    """The host comes back, but its worker does not leave the failed step."""
    back = run.workers[run.hosts.address(2)]
    (run.folder / f"stubborn-{back}").touch()
    cut = time.time()
    run.hosts.cut(2)
    assert run.await_size(1, cut) - cut <= LOST_S or not IN_SOAK
    assert run.redone(cut) == 0
    run.hosts.heal(2)
    wait_until(lambda: not psutil.pid_exists(back))
    run.await_size(NUM_WORKERS, cut)
    events = run.end()
    assert kinds(events).count("lost") == 1
    where, said = re.escape(run.hosts.address(2)), run.log.read_text()
    cause = rf"its host {where} has not answered the driver for \d+\.\d s"
    assert re.search(cause, str(events))
    assert re.search(rf"Lost worker \d on node \w+ \({where}\): process \d+: {cause}", said)
    assert "cut off" not in said


def test_short_cuts_and_stopped_processes_are_not_losses(run):
    """The Ray head is stopped all the time. The driver still detects a worker that dies."""
    (head,) = run.hosts.processes(0, "gcs_server")
    began = time.time()
    head.send_signal(signal.SIGSTOP)
    for down_s in [1.5] + [1.0, 1.5, 2.0] * 10 * IN_SOAK:  # commands take longer on busy cores
        run.hosts.cut(2)
        time.sleep(down_s)
        run.hosts.heal(2)
        healed = time.time()
        run.await_size(NUM_WORKERS, healed)
        time.sleep(max(0.0, healed + 1.0 - time.time()))
    stopped = psutil.Process(run.workers[run.hosts.address(1)])
    stopped.send_signal(signal.SIGSTOP)
    time.sleep(60 if IN_SOAK else LOST_S + 1)
    stopped.send_signal(signal.SIGCONT)
    run.await_epochs(1)  # at its end, workers need the driver
    assert run.pause(began) > LOST_S
    killed = time.time()
    send([next(iter(run.alone().values()))], signal.SIGKILL)
    alone = run.await_size(NUM_WORKERS - 1, killed)
    head.send_signal(signal.SIGCONT)
    run.await_size(NUM_WORKERS, alone)
    events = run.end()
    assert kinds(events) == ["lost", "regrouped", "grown"], events
    assert "its host closed the connection" in events[0][1]  # because its process has died
    assert "The Ray head does not answer" in run.log.read_text()
    assert run.call("workers").keys() == run.workers.keys()


@pytest.mark.skipif(not IN_SOAK, reason="it starts Ray on three hosts")
def test_restarted_ray_head_costs_no_worker():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Hosts(CPUS, keeps_tables=True) as hosts, contextlib.closing(Run(hosts)) as run:
        run.train()
        began = time.time()
        hosts.restart_head()
        time.sleep(90)  # Ray nodes try to reconnect for a minute
        assert run.pause(began) < 3.0
        killed = time.time()
        send([run.alone()[1]], signal.SIGKILL)
        run.await_size(NUM_WORKERS, run.await_size(NUM_WORKERS - 1, killed))
        assert kinds(run.end()) == ["lost", "regrouped", "grown"]


def send(processes, number):
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@pytest.mark.ends_shared  # a node
def test_preempted_workers_leave_early_at_no_cost(run):
    """First Ray drains a node, with room elsewhere. Then a worker gets SIGTERM, without room."""
    began = time.time()
    drained = 1  # it has one CPU, and the other host has one free CPU
    run.hosts.drain(drained, 600)  # the worker waits for its successor
    wait_until(lambda: not run.hosts.processes(drained, "ray::Worker"), 120)
    moved = run.await_size(NUM_WORKERS, time.time())
    (worker, _) = run.hosts.processes(2, "ray::Worker")
    worker.send_signal(signal.SIGTERM)
    wait_until(lambda: not worker.is_running(), 30)
    run.await_size(NUM_WORKERS - 1, moved)
    events = run.end()
    assert kinds(events) == ["draining", "drained", "draining", "regrouped", "grown"]
    causes = [cause for kind, cause in events if kind == "draining"]
    assert causes == ["Ray drains its node", "its process was sent SIGTERM"]
    assert run.redone(began) == 0
    assert run.call("workers").keys() == {run.hosts.address(2)}


@pytest.mark.ends_shared(place=2)  # the head
def test_workers_wait_for_a_driver_that_is_cut_off_and_exit_without_it(run):
    if IN_SOAK:  # a Ray call is in flight only from the second training on
        run.end()
        run.train()
    cut, said_before = time.time(), run.log.read_text()
    run.hosts.cut(0)
    wait_until(
        lambda: "own host is probably cut off" in run.log.read_text().removeprefix(said_before)
    )
    time.sleep(20 if IN_SOAK else 0)
    healed = time.time()
    run.hosts.heal(0)
    run.await_size(NUM_WORKERS, healed)
    assert "lost" not in kinds(run.end())
    said = run.log.read_text()
    assert re.search(r"No worker's host \(10\.123.*\) answers the driver, so .* cut off", said)
    late = [moment for moment, *_ in run.steps(cut) if cut + LOST_S < moment < healed]
    assert not (IN_SOAK and late)
    before = run.workers
    run.train()
    assert run.workers == before
    run.hosts.power_off(0)
    every = range(1, len(CPUS))
    wait_until(
        lambda: not any(run.hosts.processes(host, "ray::Worker") for host in every), GRACE_S + 10
    )
