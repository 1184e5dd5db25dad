"""Recoveries from injected faults: `make soak ARGS="--only recoveries"` counts them.

A round injects faults of one kind at steps that its seed draws. After each fault, the epoch ends
with all workers. It must have trained on each sample once, and the models and optimizers of all
workers must be, to the last bit, those of a run without faults. All sums are exact, so the number
of workers does not change them.
"""

import argparse
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ray
import torch

from raysgd import ElasticConfig, TorchTrainer
from raysgd.callbacks import CheckpointCallback
from raysgd.checkpoint import read_file
from raysgd.loop import operator_runner
from raysgd.utils import BATCH_SIZE
from tests.conftest import wait_until
from tests.hosts.network import Hosts
from tests.ledger import Ledger, Weights
from tests.operators import local, plain, replica_hash
from tests.soak import RECOVERIES

NUM_RECOVERIES = 10
"""Number of faults in a round."""
NUM_STEPS, NUM_SAMPLES_PER_STEP = 60, 12
SHORT_STEP_S = 0.5
"""Duration of a step of a group that lacks a worker, so that replacements join within the epoch."""
SAVE_EVERY = 10
POINTS = ("before the forward pass", "after the backward pass", "between two optimizers")
SOON_S = 120.0
"""Limit of each wait, for a busy machine."""


class Recovering(Ledger):
    """Has a ledger, and a model that depends on the order of all batches. Obeys orders at steps.

    An order is the file RANK-STEP-POINT. It holds a word and its arguments.
    """

    def setup(self, config):
        self.folder = Path(config["folder"])
        if (self.folder / "hold").exists():
            self.obey("replacement")
            (self.folder / "replacement waits").touch()
            wait_until(lambda: not (self.folder / "hold").exists(), SOON_S)
        torch.manual_seed(config["seed"])
        models = [Weights(config["num_samples"]).double(), Weights(1).double()]
        optimizers = [
            torch.optim.SGD(models[0].parameters(), lr=1.0),
            torch.optim.SGD(models[1].parameters(), lr=0.5, momentum=0.5, weight_decay=2**-8),
        ]
        (self.ledger, self.trace), (self.first, self.second) = self.register(
            models=models, optimizers=optimizers
        )
        self.register_data(train_loader=self.make_loader(config))
        self.ballast = torch.zeros(config["ballast"])

    def state_dict(self):
        return {"ballast": self.ballast}

    def load_state_dict(self, state):
        self.ballast = state["ballast"]

    def train_batch(self, batch, batch_info):
        now = f"{self.world_rank}-{self.global_step}"
        self.obey(f"{now}-0")
        if self.world_size < self.config["until_size"]:
            (self.folder / "short").touch()
            time.sleep(SHORT_STEP_S)
        if (self.folder / f"lose-{now}").exists():  # also if the step runs again
            batch = batch[:-1]
        trace = self.trace(torch.zeros(1, dtype=torch.long)).sum() * batch.sum()
        self.first.zero_grad()
        self.second.zero_grad()
        ((trace - self.ledger(batch).sum()) * self.world_size).backward()
        self.obey(f"{now}-1")
        self.first.step()
        self.obey(f"{now}-2")
        self.second.step()
        return {"num_samples": len(batch)}

    def obey(self, name):
        """Carry out the order with this name, if there is one, and return it."""
        path = self.folder / name
        if not path.exists():
            return None
        word, *arguments = path.read_text().split()
        path.unlink()
        if word == "signal":
            number, pid = map(int, arguments)
            (self.folder / "hit").write_text(str(self.global_step))
            os.kill(pid or os.getpid(), number)
        elif word == "cut":
            (self.folder / "cut").write_text(arguments[0] if arguments else socket.gethostname())
        elif word == "release":
            wait_until((self.folder / "replacement waits").exists, SOON_S)
            (self.folder / "hold").unlink()
        return word


class Round:
    """A trainer, the same run without faults in this process, and faults that a seed draws."""

    def __init__(self, kind, seed, folder, loses, life=0):
        self.kind, self.seed, self.folder, self.loses = kind, seed, folder, loses
        self.draw = random.Random(f"{kind} {seed} {life}")
        config = {
            "num_samples": NUM_STEPS * NUM_SAMPLES_PER_STEP,
            BATCH_SIZE: NUM_SAMPLES_PER_STEP,
            "seed": seed,
            "ballast": 10**6 if kind == "saves" else 0,
        }
        (nothing := folder / "undisturbed").mkdir(exist_ok=True)
        alone = {"folder": str(nothing), "until_size": 1}
        self.undisturbed = local(Recovering, {**config, **alone})
        num_workers, callbacks = 3 if kind in IN_ONE_PROCESS else 2, []
        if kind == "drivers":
            callbacks.append(CheckpointCallback(folder / "checkpoints", every=SAVE_EVERY))
        self.trainer = TorchTrainer(
            training_operator_cls=Recovering,
            config={**config, "folder": str(folder), "until_size": num_workers},
            num_workers=num_workers,
            min_workers=1,
            use_gpu=False,
            elastic=ElasticConfig(backoff_initial_s=0.2, backoff_max_s=2.0, resize_cooldown_s=0.0),
            callbacks=callbacks,
        )
        self.num_seen = len(self.trainer.events)

    def draw_step(self, least=1, most=NUM_STEPS // 2):
        """Return a step in the first half of the epoch that comes next."""
        return self.trainer.global_step + self.draw.randint(least, most)

    def order(self, rank, step, text, point=0):
        (self.folder / f"{rank}-{step}-{point}").write_text(text)

    def lose(self, step):
        """Plant the loss of a sample at a step, if this round must fail."""
        if self.loses:
            (self.folder / f"lose-0-{step}").touch()

    def train(self):
        """Train to the end of an epoch with all workers."""
        trainer = self.trainer
        while True:
            trainer.train(max_retries=100)
            if trainer.num_workers == trainer.max_workers:
                return

    def pids(self):
        """Return the processes of all workers, by rank."""
        while len(found := self.trainer.apply_all_workers(os.getpid)) < self.trainer.max_workers:
            self.train()
        return found

    def events(self):
        """Return the kinds of events since the last call."""
        events = self.trainer.events[self.num_seen :]
        self.num_seen += len(events)
        return [event.kind for event in events if event.kind not in ("slow", "recovered")]

    def catch_up(self, step):
        """Bring the run without faults to a step."""
        while self.undisturbed.global_step < step:
            self.undisturbed.train(num_steps=step - self.undisturbed.global_step)

    def check(self, step, what, expected=None):
        """Check the state after a fault, and print a line."""
        left = [path.name for path in self.folder.glob("[0-9]-*")]
        assert not left, f"no worker obeyed {left}"
        trainer, kinds = self.trainer, self.events()

        def happened():
            if expected in (None, *kinds):
                return True
            self.train()  # on a busy machine, a fault may come after the epoch
            kinds.extend(self.events())
            return False

        wait_until(happened, SOON_S)
        self.catch_up(trainer.global_step)
        done = trainer.get_model()[0].weights.detach()
        right = self.undisturbed.get_model()[0].weights.detach()
        wrong = {
            n: (int(done[n]), int(right[n])) for n in (done != right).nonzero().view(-1).tolist()
        }
        hashes = {*trainer.apply_all_operators(replica_hash)}
        verdict = "good"
        if wrong:
            verdict = f"LEDGER samples {wrong} (times trained, right)"
        elif hashes != {*self.undisturbed.apply_all_operators(replica_hash)}:
            verdict = f"HASH {len(hashes)} states of {trainer.num_workers} workers"
        print(
            f"recovery {self.kind} seed {self.seed} step {step} {what} "
            f"({', '.join(kinds)}): {verdict}",
            flush=True,
        )
        if verdict != "good":
            sys.exit(1)


KILL = f"signal {signal.SIGKILL:d} 0"


def workers(each):
    """Kill one worker of three, or two in one step, at a point of the step."""
    ranks = each.draw.sample(range(3), each.draw.choice([1, 1, 1, 2]))
    step, point = each.draw_step(), each.draw.randrange(3)
    for rank in ranks:
        each.order(rank, step, KILL, point)
    each.lose(step + 1)
    each.train()
    each.check(step, f"kill ranks {ranks} {POINTS[point]}", "lost")


def saves(each):
    """Kill the worker that writes a checkpoint, after a part of the file."""
    step, share = each.draw_step(), each.draw.choice([0.0, each.draw.random(), 1.0])
    trainer, path = each.trainer, each.folder / "state.pt"

    def die_while_saving(operator):
        write_state = operator_runner.write_state

        def write_a_part(state, shown, file):
            with tempfile.TemporaryFile() as whole:
                write_state(state, shown, whole)
                size = int(share * whole.tell())
                whole.seek(0)
                file.write(whole.read(size))
                file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

        if operator.world_rank == 0:
            operator_runner.write_state = write_a_part

    trainer.train(num_steps=step - trainer.global_step)
    trainer.apply_all_operators(die_while_saving)
    assert [*each.folder.glob("state.pt*")] in ([], [path])
    trainer.save(path)
    each.catch_up(step)
    saved, right = read_file(path), each.undisturbed.state_dict()
    for key in ("models", "optimizers", "epoch", "global_step"):
        assert plain(saved[key]) == plain(right[key]), f"the saved {key} differ"
    if each.draw.random() < 0.5:
        trainer.train(num_steps=1)
        trainer.load(path)
    each.lose(step + 1)
    each.train()
    each.check(step, f"kill rank 0 after {share:.0%} of the file", "lost")


def joins(each):
    """Let a worker join at a step. Some die in `setup` before, or a member dies in that step."""
    lost, step = each.draw.randrange(3), each.draw_step(most=10)
    joined, trouble = (
        step + each.draw.randint(2, 10),
        each.draw.choice(["", "replacement", "member"]),
    )
    (each.folder / "replacement waits").unlink(missing_ok=True)
    (each.folder / "hold").touch()
    each.order(lost, step, KILL)
    each.order(0, joined, "release")
    if trouble == "replacement":
        (each.folder / "replacement").write_text(KILL)
    elif trouble == "member":
        each.order(each.draw.randrange(2), joined, KILL, 1)
    each.lose(joined + 1)
    each.train()
    each.check(joined, f"one joins{trouble and f', a {trouble} dies'}", "lost")


def drains(each):
    """Send SIGTERM, as before a preemption, to a worker or two. There is room for one more.

    The epochs are short, so the workers may leave in a later one.
    """
    ranks = each.draw.sample(range(3), each.draw.choice([1, 1, 2]))
    pids = each.pids()
    step, point = each.draw_step(), each.draw.randrange(3)
    for rank in ranks:
        each.order(rank, step, f"signal {signal.SIGTERM:d} 0", point)
    each.lose(step + 1)
    each.train()
    while {pids[rank] for rank in ranks} & {*each.pids()}:
        each.train()
    each.check(step, f"SIGTERM to ranks {ranks} {POINTS[point]}", "draining")


def hosts(each):
    """Cut off a worker's host until the others train without it, or the driver's for a while."""
    step, rank = each.draw_step(), each.draw.choice([0, 0, 1, 1, "driver"])
    each.order(0 if rank == "driver" else rank, step, "cut host0" if rank == "driver" else "cut")
    each.lose(step + 1)
    each.train()
    each.check(step, f"cut the host of {rank}", None if rank == "driver" else "lost")


def drivers(each):
    """Check that the run resumes after the last kill, and order the next kill of this process."""
    trainer, hit = each.trainer, each.folder / "hit"
    trainer.train(num_steps=1)
    if hit.exists():
        killed, first = int(hit.read_text()), trainer.global_step - 1
        each.lose(trainer.global_step)
        assert killed // SAVE_EVERY * SAVE_EVERY <= first <= killed, (first, killed)
        while trainer.global_step < killed + 2:
            trainer.train(num_steps=killed + 2 - trainer.global_step)
        each.check(killed, f"kill the driver, resume at step {first}")
        hit.unlink()
    step, point = each.draw_step(2), each.draw.randrange(3)
    each.order(0, step, f"signal {signal.SIGKILL:d} {os.getpid()}", point)
    trainer.fit(10**6, validate_every=None, verbose=False)


IN_ONE_PROCESS = {each.__name__: each for each in (workers, saves, joins, drains)}


def start_ray():
    """Start Ray on this machine. On a busy machine, Ray gives up after 30 s."""
    for number in itertools.count():
        try:
            return ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        except Exception as error:
            if number == 5 or "timed out during startup" not in str(error):
                raise
            ray.shutdown()


def child(given, folder, *more):
    """Return the command of a driver in a process of its own."""
    command = [sys.executable, "-m", "tests.recoveries", given.kind, str(given.seed)]
    command += ["--folder", str(folder), "--number", str(given.number), *more]
    return command + ["--loses"] * given.loses


def cut_hosts(given):
    """Start hosts and a driver on one of them, and cut the hosts that the workers name."""
    with Hosts([0, 1, 2]) as network, (network.folder / "driver.log").open("w+") as log:
        (folder := network.folder / "orders").mkdir()
        order, short = folder / "cut", folder / "short"
        command = child(given, folder, "--address", network.address(0))
        driver = network.spawn(0, command, stderr=log)
        for number in itertools.count():
            if driver.poll() is not None:
                log.seek(0)
                sys.stderr.write(log.read())
                return driver.returncode
            time.sleep(0.1)
            if order.exists() and (host := order.read_text()):
                order.unlink()
                short.unlink(missing_ok=True)
                seen = os.path.getsize(log.name)
                network.cut(int(host.removeprefix("host")))

                def is_noticed(seen=seen):
                    said = Path(log.name).read_bytes()[seen:]
                    alone = b"own host is probably cut off" in said
                    return driver.poll() is not None or short.exists() or alone

                wait_until(is_noticed, SOON_S)
                network.heal(int(host.removeprefix("host")))
            elif number % 20 == 0:
                for host in (1, 2):  # Ray ends on a host that was silent for long
                    if not network.processes(host, "raylet"):
                        network.start_ray(host)


def kill_drivers(given):
    """Start drivers that one after the other resume a run and are killed."""
    start_ray()
    address = ray.get_runtime_context().gcs_address
    with tempfile.TemporaryDirectory() as folder:
        for life in range(given.number + 1):
            command = child(given, folder, "--address", address, "--life", str(life))
            if (ended := subprocess.run(command, check=False).returncode) != -signal.SIGKILL:
                return ended or 1
            # the last driver resumed, and was killed like the others
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=RECOVERIES)
    parser.add_argument("seed", type=int)
    parser.add_argument("--number", type=int, default=NUM_RECOVERIES, help="number of faults")
    parser.add_argument("--loses", action="store_true", help="plant a lost sample")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--address")
    parser.add_argument("--life", type=int, default=0)
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in background jobs
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ.setdefault("RAY_worker_niceness", "0")  # otherwise busy machines starve the workers
    if given.address is None and given.kind not in IN_ONE_PROCESS:
        return {"hosts": cut_hosts, "drivers": kill_drivers}[given.kind](given)
    if given.kind == "hosts":
        ray.init(_node_ip_address=given.address, log_to_driver=False)
    elif given.kind == "drivers":
        ray.init(given.address, log_to_driver=False)
    else:
        start_ray()
    with tempfile.TemporaryDirectory() as own:
        each = Round(given.kind, given.seed, given.folder or Path(own), given.loses, given.life)
        with each.trainer:
            if given.kind == "drivers":
                drivers(each)
            for _ in range(given.number):
                {**IN_ONE_PROCESS, "hosts": hosts}[given.kind](each)
    return 0


if __name__ == "__main__":
    sys.exit(main())
