"""A driver on its own host. It reads one call per line of JSON and prints the answer as JSON."""

import json
import os
import sys
import time
import traceback

import ray

from raysgd import ElasticConfig
from raysgd.utils import BATCH_SIZE
from tests.ledger import Ledger, ledger_of, ledger_trainer
from tests.operators import fingerprint

STEP_S = 0.02


class Logged(Ledger):
    """A ledger that logs the time, group size, and number of each step, in a file per process.

    While a file ``stubborn-PID`` exists, that process holds its exceptions back.
    """

    def setup(self, config):
        super().setup(config)
        self.folder = config["folder"]
        path = os.path.join(self.folder, f"steps-{os.getpid()}")
        self.log = open(path, "a", buffering=1)  # noqa: SIM115

    def train_batch(self, batch, batch_info):
        time.sleep(STEP_S)
        try:
            done = super().train_batch(batch, batch_info)
        except Exception:
            while os.path.exists(os.path.join(self.folder, f"stubborn-{os.getpid()}")):
                time.sleep(0.1)
            raise
        self.log.write(json.dumps([time.time(), self.world_size, self.global_step]) + "\n")
        return done


class Driver:
    """The calls that a test can make."""

    def start(self, address, folder, num_workers, num_samples, elastic):
        ray.init(_node_ip_address=address, log_to_driver=False)
        self.enough = os.path.join(folder, "enough")
        self.num_samples = num_samples
        self.trainer = ledger_trainer(
            num_workers,
            num_samples,
            ElasticConfig(**elastic),
            Logged,
            folder=folder,
            **{BATCH_SIZE: 4 * num_workers},
        )
        self.begin = self.trainer.state_dict()

    def workers(self):
        """Return a process ID for each host with workers, by the address of the host."""
        members = self.trainer._controller.members
        return {member.location.node_ip: member.location.pid for member in members}

    def train(self):
        """Train until a file ``enough`` exists and no worker is missing. Check the ledger.

        Return the events.
        """
        trainer, num_before, num_epochs = self.trainer, len(self.trainer.events), 0
        trainer.load_state_dict(self.begin)
        while not os.path.exists(self.enough) or trainer.num_workers < trainer.max_workers:
            metrics = trainer.train(max_retries=100)
            num_epochs += 1
            assert metrics["num_samples"] <= self.num_samples, metrics
        counts = ledger_of(trainer) - num_epochs
        # the last step of an epoch may repeat samples
        assert counts.min() == 0
        assert counts.sum() < num_epochs * trainer.max_workers
        assert len(set(trainer.apply_all_operators(lambda op: fingerprint(op.model)))) == 1
        return [[event.kind, event.cause] for event in trainer.events[num_before:]]


def main():
    driver = Driver()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the output of Ray out of the answers
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"value": getattr(driver, name)(*arguments)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
