"""A driver on a host of its own, which does what the test says: a line of JSON for each call."""

import json
import os
import sys
import time
import traceback

import ray

from raysgd import ElasticConfig
from raysgd.utils import BATCH_SIZE
from tests.ledger import Ledger, check_ledger, ledger_trainer

STEP_S = 0.02


class Logged(Ledger):
    """Writes down in a file of its process when a step was done, and by how many workers."""

    def setup(self, config):
        super().setup(config)
        path = os.path.join(config["folder"], f"steps-{os.getpid()}")
        self.log = open(path, "a", buffering=1)  # noqa: SIM115

    def train_batch(self, batch, batch_info):
        time.sleep(STEP_S)
        done = super().train_batch(batch, batch_info)
        self.log.write(json.dumps([time.time(), self.world_size]) + "\n")
        return done


class Driver:
    """Each method is a call that a test may make."""

    def start(self, address, folder, num_workers, num_samples, elastic):
        ray.init(_node_ip_address=address, log_to_driver=False)
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
        """The process of each worker by the address of its host."""
        members = self.trainer._controller.members
        return {member.info.node_ip: member.info.pid for member in members}

    def epoch(self):
        """Train an epoch from the first weights on; return what happened, once all is right."""
        num_before = len(self.trainer.events)
        self.trainer.load_state_dict(self.begin)
        check_ledger(self.trainer, self.trainer.train(max_retries=10))
        return [[event.kind, event.cause] for event in self.trainer.events[num_before:]]

    def grow(self, timeout_s):
        """Train until all workers are there."""
        ends = time.monotonic() + timeout_s
        while self.trainer.num_workers < self.trainer.max_workers:
            assert time.monotonic() < ends, f"not whole within {timeout_s} s"
            self.trainer.train(num_steps=5)


def main():
    driver = Driver()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray has to say is no answer
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"value": getattr(driver, name)(*arguments)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
