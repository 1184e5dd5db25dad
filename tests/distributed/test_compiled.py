"""A replacement worker of compiled models compiles before it joins, and nobody else anew."""

import itertools
import os
import time

import pytest

from raysgd import ElasticConfig
from raysgd.testing import chaos
from raysgd.utils import BATCH_SIZE
from tests.ledger import PacedLedger, ledger_of, ledger_trainer
from tests.operators import replica_hash

COMPILE_S, STEP_S, BATCH = 1.0, 0.02, 6


class Noting(PacedLedger):
    """Writes down when it compiles, and when its steps are done, and in what company."""

    def setup(self, config):
        self.notes = open(os.path.join(config["folder"], str(os.getpid())), "a", buffering=1)  # noqa: SIM115

        def compile_slowly(graph, inputs):
            time.sleep(COMPILE_S)
            self.note("compiled")
            return graph.forward

        super().setup({**config, "register": {"compile": {"backend": compile_slowly}}})

    def note(self, what):
        self.notes.write(f"{time.monotonic()} {self.world_size} {what}\n")

    def train_batch(self, batch, batch_info):
        time.sleep(self.config["step_s"])
        self.backward(-self.model(batch).mean(), num_samples=len(batch))
        self.optimizer_step(self.optimizer)
        self.note("step")
        return {"num_samples": len(batch)}


def notes_of(folder, pid):
    lines = (folder / str(pid)).read_text().splitlines()
    return [(float(at), int(size), what) for at, size, what in map(str.split, lines)]


@pytest.mark.slow("a worker starts anew, and compiles twice")
def test_others_go_on_while_a_replacement_compiles_and_compile_nothing_themselves(
    ray_cluster, tmp_path
):
    config = {"num_samples": 396, BATCH_SIZE: BATCH, "step_s": STEP_S, "folder": str(tmp_path)}
    elastic = ElasticConfig(initial_s=0.05, max_s=0.05, jitter=0.0)
    with ledger_trainer(3, elastic=elastic, operator_cls=Noting, **config) as trainer:
        trainer.train(num_steps=10)
        *stay, goes = trainer.apply_all_workers(os.getpid)
        chaos.kill(trainer, 2)
        trainer.train()
        while trainer.num_workers < 3:
            trainer.train()
        trainer.train()
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
        repeats = ledger_of(trainer) * BATCH - trainer.epoch  # each update moves by the mean
        comes = trainer.apply_all_workers(os.getpid)[2]
    assert set(repeats.tolist()) <= {0, 1}
    assert repeats.sum() <= BATCH  # the step in which one was lost
    assert comes != goes
    notes_of_all = [notes_of(tmp_path, pid) for pid in (*stay, comes)]
    for notes in notes_of_all:  # also of two, who share the parts of three, nothing is new
        kinds = [what for _, _, what in notes]
        assert kinds[0] == "compiled"
        assert kinds.count("compiled") == 1
    steps = [(at, size) for at, size, what in notes_of_all[0] if what == "step"]
    lost = next(i for i, (_, size) in enumerate(steps) if size == 2)
    joined = next(i for i, (_, size) in enumerate(steps) if i > lost and size == 3)
    longest = max(b - a for (a, _), (b, _) in itertools.pairwise(steps[joined - 5 : joined + 5]))
    assert longest < COMPILE_S
